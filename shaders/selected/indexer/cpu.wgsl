// The scores of an indexer, for drivers that run on a CPU: no workgroup memory, no barriers. An
// invocation computes four keys for QUERIES queries. A block has HEADS heads of each query, so that
// the invocation holds QUERIES · HEADS vectors of products. Loads of queries are uniform: the
// compiler broadcasts them instead of gathering.
//
// Constants: LANES, QUERIES, HEADS.
//
// Needs: p.columns, p.head_dim, p.heads, p.keys, p.queries; HEADS, LANES, QUERIES; k_four,
// q_four, range_of_all, store_scores, weighted.
// Gives: main.

// Channels d .. d + 4 of keys j .. j + 4, a column for each channel.
fn block_of_keys(b: u32, j: u32, d: u32) -> mat4x4<f32> {
    let last = p.keys - 1u;
    return transpose(mat4x4<f32>(
        k_four(b, min(j, last), d),
        k_four(b, min(j + 1u, last), d),
        k_four(b, min(j + 2u, last), d),
        k_four(b, min(j + 3u, last), d),
    ));
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    let first = group.y * QUERIES;
    let last = min(first + QUERIES, p.queries) - 1u;
    let tile = group.x * LANES * 4u;
    let j = tile + lane * 4u;
    if j >= p.columns {
        return;
    }
    let range = range_of_all(b, first, last);
    let is_needed = range.x < tile + LANES * 4u && range.y > tile;

    var sums: array<vec4<f32>, QUERIES>;
    for (var n = 0u; n < QUERIES; n++) {
        sums[n] = vec4<f32>();
    }
    for (var h = 0u; h < select(0u, p.heads, is_needed); h += HEADS) {
        var products: array<array<vec4<f32>, HEADS>, QUERIES>;
        for (var n = 0u; n < QUERIES; n++) {
            for (var c = 0u; c < HEADS; c++) {
                products[n][c] = vec4<f32>();
            }
        }
        for (var d = 0u; d < p.head_dim; d += 4u) {
            let keys = block_of_keys(b, j, d);
            for (var n = 0u; n < QUERIES; n++) {
                for (var c = 0u; c < HEADS; c++) {
                    products[n][c] += keys * q_four(b, min(h + c, p.heads - 1u), min(first + n, last), d);
                }
            }
        }
        for (var n = 0u; n < QUERIES; n++) {
            for (var c = 0u; c < HEADS; c++) {
                sums[n] += weighted(b, h + c, min(first + n, last), products[n][c]);
            }
        }
    }
    for (var n = 0u; n <= last - first; n++) {
        store_scores(b, first + n, j, sums[n]);
    }
}
