// The gradients of a merge, for one part. With share = exp(part_lse − lse): d_part_out = share ·
// d_out, d_part_lse = share · (d_out · (part_out − out) + d_lse).
//
// part_out, out, d_out, d_part_out [batch, heads, q_len, value_dim]
// part_lse, lse, d_lse, d_part_lse [batch, heads, q_len, 1]
//
// Bindings (declared by the host), in this order: part_out, part_lse, out, lse, d_out, d_lse if
// there is one, d_part_out, d_part_lse.
// The kernel reads everything once and d_out twice; ROW_LANES invocations share a row.

// The terms of each invocation of a row, of half of d_out · (part_out − out).
var<workgroup> products: array<f32, ROWS * ROW_LANES>;

@compute @workgroup_size(ROWS * ROW_LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let h = group.y;
    let b = group.z;
    let i = min(group.x * ROWS + index / ROW_LANES, p.q_len - 1u);
    let used = group.x * ROWS + index / ROW_LANES < p.q_len;
    let lane = index % ROW_LANES;
    let part_lse = part_lse_at(view_at(p.part_lse, b, h, i, 0u));
    // A part that has seen no key has no share, whatever its output holds. By the bits, so that a
    // NaN propagates.
    let seen = bitcast<u32>(part_lse) != bitcast<u32>(p.neg_inf);
    let below = part_lse - lse_at(view_at(p.lse, b, h, i, 0u));
    // Some drivers' exp loses NaN.
    let share = select(exp(below), below, any_nan(vec4<f32>(below)));
    var mine = 0.0;
    for (var d = lane; d < p.value_dim; d += ROW_LANES) {
        let d_out = d_out_at(view_at(p.d_out, b, h, i, d));
        // Half of each, because the difference of two finite numbers may not be finite.
        let outs = vec4<f32>(part_out_at(view_at(p.part_out, b, h, i, d)), out_at(view_at(p.out, b, h, i, d)), 0.0, 0.0);
        let halves = lowered(outs, 1u);
        let off = halves.x - halves.y;
        mine += d_out * off;
        if used {
            d_part_out_store(view_at(p.d_part_out, b, h, i, d), select(0.0, share * d_out, seen));
        }
    }
    products[index] = mine;
    workgroupBarrier();
    if used && lane == 0u {
        var sum = 0.0;
        for (var n = 0u; n < ROW_LANES; n++) {
            sum += products[index + n];
        }
        d_part_lse_store(view_at(p.d_part_lse, b, h, i, 0u), select(0.0, share * d_lse_of(b, h, i) + 2.0 * (share * sum), seen));
    }
}
