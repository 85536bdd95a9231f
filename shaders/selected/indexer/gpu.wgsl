// The scores of an indexer, for GPUs. A workgroup of 16 × 16 invocations computes TILE rows of TILE
// keys. A row is a head of a query: HEADS rows for each of TILE / HEADS queries. Rows of queries
// and keys are staged in workgroup memory, as in matmul/gpu.wgsl. Each invocation holds 4 × 4
// products. It adds their weighted values, then workgroup memory adds those of a query's rows.
//
// Constants: TILE (64), TILE_K (16), HEADS (4 to TILE, a power of two). If there are more than TILE
// heads, the workgroup processes them block by block.
//
// Minimum of workgroup memory accesses, per channel and invocation: 16 multiply-adds and two vector
// loads. Minimum of global memory accesses: 2 / TILE elements per multiply-add.
//
// Needs: p.columns, p.head_dim, p.heads, p.keys, p.queries; HEADS, TILE, TILE_K; k_four,
// q_four, range_of_all, store_scores, weighted.
// Gives: main.

const QUERIES: u32 = TILE / HEADS;
const VECTORS: u32 = TILE / 4u;     // of a staged row
const VECTORS_K: u32 = TILE_K / 4u;
// Shifts of staged rows, which spread the stores over all banks.
const SHIFT: u32 = 8u / VECTORS_K;

// Arrays of scalars, because neighbours store to parts of one vector. Such stores race if a
// compiler loads, changes and stores the whole vector (Metal and D3D do).
var<workgroup> tile_q: array<f32, (TILE_K * VECTORS + 8u) * 4u>;
var<workgroup> tile_k: array<f32, (TILE_K * VECTORS + 8u) * 4u>;

fn staged_q(v: u32) -> vec4<f32> {
    return vec4<f32>(tile_q[v * 4u], tile_q[v * 4u + 1u], tile_q[v * 4u + 2u], tile_q[v * 4u + 3u]);
}

fn staged_k(v: u32) -> vec4<f32> {
    return vec4<f32>(tile_k[v * 4u], tile_k[v * 4u + 1u], tile_k[v * 4u + 2u], tile_k[v * 4u + 3u]);
}

// The query and the head of row r. They exist, or are the last ones.
fn load_q(b: u32, first: u32, head: u32, r: u32, d: u32) -> vec4<f32> {
    let i = min(first + r / HEADS, p.queries - 1u);
    let h = min(head + r % HEADS, p.heads - 1u);
    return loaded(q_four(b, h, i, min(d, (p.head_dim - 1u) & ~3u)), d);
}

fn load_k(b: u32, j: u32, d: u32) -> vec4<f32> {
    return loaded(k_four(b, min(j, p.keys - 1u), min(d, (p.head_dim - 1u) & ~3u)), d);
}

// Zeros for vectors past the last channel.
fn loaded(x: vec4<f32>, d: u32) -> vec4<f32> {
    return select(vec4<f32>(), x, d < p.head_dim);
}

// The products of an invocation. Only constants may index this array, so loops over it are marked
// as unrolled (src/kernel/unroll.rs).
var<private> products: array<vec4<f32>, 4>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    let first = group.y * QUERIES;
    let tile = group.x * TILE;
    let range = range_of_all(b, first, min(first + QUERIES, p.queries) - 1u);
    let is_needed = range.x < tile + TILE && range.y > tile;

    // The vectors that this invocation stages: four channels of a row and of a key.
    let row = lane / VECTORS_K;
    let d = lane % VECTORS_K * 4u;
    let to = d * VECTORS + d / 4u * SHIFT + row / 4u;
    // The vectors of products that it computes. 32 neighbours have 4 × 8 vectors, which minimises
    // the number of different loads.
    let x = lane % 8u + lane / 32u % 2u * 8u;
    let y = lane / 8u % 4u + lane / 64u * 4u;
    // Its rows are heads of one query.
    let query = min(first + y * 4u / HEADS, p.queries - 1u);
    var sums = vec4<f32>();
    for (var head = 0u; head < select(0u, p.heads, is_needed); head += HEADS) {
        /* unrolled */ for (var c = 0u; c < 4u; c++) {
            products[c] = vec4<f32>();
        }
        var next_q = load_q(b, first, head, row, d);
        var next_k = load_k(b, tile + row, d);
        for (var k0 = 0u; k0 < p.head_dim; k0 += TILE_K) {
            /* unrolled */ for (var c = 0u; c < 4u; c++) {
                tile_q[(to + c * VECTORS) * 4u + row % 4u] = next_q[c];
                tile_k[(to + c * VECTORS) * 4u + row % 4u] = next_k[c];
            }
            workgroupBarrier();
            // The loads of the next step overlap with this step's arithmetic.
            next_q = load_q(b, first, head, row, k0 + TILE_K + d);
            next_k = load_k(b, tile + row, k0 + TILE_K + d);
            for (var k4 = 0u; k4 < VECTORS_K; k4++) {
                for (var k = 0u; k < 4u; k++) {
                    let o = k4 * (4u * VECTORS + SHIFT) + k * VECTORS;
                    let q = staged_q(o + y);
                    let keys = staged_k(o + x);
                    products[0] = fma(vec4<f32>(q.x), keys, products[0]);
                    products[1] = fma(vec4<f32>(q.y), keys, products[1]);
                    products[2] = fma(vec4<f32>(q.z), keys, products[2]);
                    products[3] = fma(vec4<f32>(q.w), keys, products[3]);
                }
            }
            workgroupBarrier();
        }
        /* unrolled */ for (var c = 0u; c < 4u; c++) {
            sums += weighted(b, head + (y * 4u + c) % HEADS, query, products[c]);
        }
    }
    /* unrolled */ for (var c = 0u; c < 4u; c++) {
        tile_q[(y * VECTORS + x) * 4u + c] = sums[c];
    }
    workgroupBarrier();
    // An invocation adds the rows of a query for four keys.
    let i = first + lane / VECTORS;
    let j = tile + lane % VECTORS * 4u;
    if lane < QUERIES * VECTORS && i < p.queries && j < p.columns {
        var total = vec4<f32>();
        let rows = HEADS / 4u;
        for (var n = 0u; n < rows; n++) {
            total += staged_q((lane / VECTORS * rows + n) * VECTORS + lane % VECTORS);
        }
        store_scores(b, i, j, total);
    }
}
