// Attention over the union of disjoint sets of keys, from the output and the log-sum-exp of each
// set:
//
//   out = Σ exp(lseₙ − lse) outₙ
//   lse = ln Σ exp(lseₙ)
//
// outₙ, out [batch, heads, q_len, value_dim]   lseₙ, lse [batch, heads, q_len, 1]
//
// Bindings (declared by the host): out, lse, part_out0.., part_lse0...
//
// With ACCUMULATES, out and lse already hold a part. The kernel reads and writes everything once;
// ROW_LANES invocations share a row.

struct MergePart {
    out: View,
    lse: View,
}

const ROW_LANES: u32 = 16u;
const ROWS: u32 = 4u;

// A part that has seen no key has no share, whatever its output holds. By the bits, so that a NaN
// propagates.
fn has_seen(lse: f32) -> bool {
    return bitcast<u32>(lse) != bitcast<u32>(p.neg_inf);
}

// Adds a part's log-sum-exp to the running one. NaN goes to the sum, because max and exp may lose
// it.
fn with_part(total: vec2<f32>, lse: f32) -> vec2<f32> {
    if any_nan(vec4<f32>(lse)) {
        return vec2<f32>(total.x, lse);
    } else {
        return merged(total, vec2<f32>(lse, select(1.0, 0.0, lse == p.neg_inf)), p.neg_inf);
    }
}

// A channel of the mean of all parts / 2 to the power of `exponent`.
fn mean_of(b: u32, h: u32, i: u32, d: u32, mine: f32, total: vec2<f32>, exponent: u32) -> f32 {
    var sum = 0.0;
    if ACCUMULATES {
        if has_seen(mine) {
            sum = lowered(vec4<f32>(out_at(view_at(p.out, b, h, i, d))), exponent).x * share_of(mine, total, p.neg_inf);
        }
    }
    for (var n = 0u; n < PARTS; n++) {
        let lse = part_lse_at(n, view_at(p.parts[n].lse, b, h, i, 0u));
        if has_seen(lse) {
            let value = part_out_at(n, view_at(p.parts[n].out, b, h, i, d));
            sum += lowered(vec4<f32>(value), exponent).x * share_of(lse, total, p.neg_inf);
        }
    }
    return sum;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let h = group.y;
    let b = group.z;
    let i = min(group.x * ROWS + index / ROW_LANES, p.q_len - 1u);
    let used = group.x * ROWS + index / ROW_LANES < p.q_len;
    let lane = index % ROW_LANES;
    let lse_here = view_at(p.lse, b, h, i, 0u);
    var total = vec2<f32>(p.neg_inf, 0.0);
    var mine = p.neg_inf;
    if ACCUMULATES {
        mine = lse_at(lse_here);
        total = with_part(total, mine);
    }
    for (var n = 0u; n < PARTS; n++) {
        total = with_part(total, part_lse_at(n, view_at(p.parts[n].lse, b, h, i, 0u)));
    }
    // The row's other invocations have read lse before one of them writes it.
    storageBarrier();
    if used {
        let seen = is_seen(total, p.neg_inf);
        for (var d = lane; d < p.value_dim; d += ROW_LANES) {
            var sum = 0.0;
            if seen {
                sum = mean_of(b, h, i, d, mine, total, 0u);
                if !all_finite(vec4<f32>(sum)) {
                    sum = mean_of_half(vec4<f32>(mean_of(b, h, i, d, mine, total, 1u))).x;
                }
            }
            out_store(view_at(p.out, b, h, i, d), sum);
        }
        if lane == 0u {
            lse_store(lse_here, lse_of(total, p.neg_inf));
        }
    }
}
