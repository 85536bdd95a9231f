// out, lse from what the splits of a row's keys left: means by their own weights.
//
// partial: per (batch, kv_head, packed row, split) value_dim means, padded to vectors; then, from stats on, the
// maximum of scores and the total of weights in the first half of a vector.
// out [batch, heads, q_len, value_dim]   lse [batch, heads, q_len, 1]
//
// Bindings (declared by the host): partial, out; lse and the sinks where used.
// Floor: every mean is read once, by ROW_LANES invocations side by side.

struct Params {
    out: View,
    lse: View,
    mask: MaskParams,
    heads: u32,
    kv_heads: u32,
    group: u32,
    value_dim: u32,
    rows: u32,       // packed, of all sequences and heads
    splits: u32,
    stats: u32,
    first: u32,      // workgroups before this dispatch's
}

@group(0) @binding(0) var<uniform> p: Params;

const ROW_LANES: u32 = 32u;
const ROWS: u32 = 2u;

fn total_at(o: u32) -> vec2<f32> {
    return partial_at4(p.stats + o * 4u, 1u, 4u).xy;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let row = (group.x + p.first) * ROWS + index / ROW_LANES;
    let lane = index % ROW_LANES;
    if row >= p.rows {
        return;
    }
    let packed = p.mask.q_len * p.group;
    let z = row / packed;
    let b = z / p.kv_heads;
    let h = z % p.kv_heads * p.group + row % packed % p.group;
    let i = row % packed / p.group;
    let neg_inf = p.mask.neg_inf;

    var total = vec2<f32>(neg_inf, 0.0);
    for (var s = 0u; s < p.splits; s++) {
        total = merged(total, total_at(row * p.splits + s), neg_inf);
    }
    total = with_sink(total, b, h);
    let seen = is_seen(total, neg_inf);
    let width = (p.value_dim + 3u) / 4u * 4u;
    for (var d = lane * 4u; d < p.value_dim; d += ROW_LANES * 4u) {
        var sum = vec4<f32>();
        for (var s = 0u; s < p.splits; s++) {
            let o = row * p.splits + s;
            // What saw no key, or nothing that counts, has no share, whatever it holds.
            let state = total_at(o);
            let share = select(0.0, share_of(state.x, total, neg_inf) * state.y, seen);
            if bitcast<u32>(share) != 0u {
                sum += share * partial_at4(o * width + d, 1u, 4u);
            }
        }
        store_out(b, h, i, d, sum);
    }
    if HAS_LSE {
        if lane == 0u {
            lse_store(view_at(p.lse, b, h, i, 0u), lse_of(total, neg_inf));
        }
    }
}
