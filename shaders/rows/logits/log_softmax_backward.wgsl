// The gradient of log_softmax.wgsl, from its output: d_x = d_out − exp(out) · Σ d_out.
//
// out, d_out, d_x [batch, heads, length, columns]
//
// ROW_LANES invocations share a row, as in norm.wgsl.
//
// Bindings (declared by the host): out, d_out, d_x. `IN_FOURS`: all of them are accessed as vec4.
// ACCUMULATES: the gradient is added to d_x.
// Bytes: out once, d_out once from memory and once from caches; d_x once.

fn store4(o: u32, d: u32, gradient: vec4<f32>) {
    let step = p.d_x.strides.w;
    var sum = gradient;
    if ACCUMULATES {
        sum += d_x_at4(o, step, p.columns - d);
    }
    if IN_FOURS {
        d_x_store4(o, sum);
    } else {
        for (var c = 0u; c < min(4u, p.columns - d); c++) {
            d_x_store(o + c * step, component(sum, c));
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let lane = lane_of(index);
    for (var row = first_row(group.x, index); row < p.rows; row += p.step) {
        let plane = row / p.length;
        let i = row - plane * p.length;
        let b = plane / p.heads;
        let h = plane - b * p.heads;
        var sums = vec4<f32>();
        var far_sums = vec4<f32>();
        for (var d = lane * 4u; d < p.columns; d += ROW_LANES * 4u) {
            let d_out = d_out_at4(view_at(p.d_out, b, h, i, d), p.d_out.strides.w, p.columns - d);
            sums += d_out;
            far_sums += lowered(d_out, FAR_EXPONENT);
        }
        let totals = row_sums(sums, far_sums, lane);
        let is_far = !all_finite(vec4<f32>(totals.x));
        for (var d = lane * 4u; d < p.columns; d += ROW_LANES * 4u) {
            let d_out = d_out_at4(view_at(p.d_out, b, h, i, d), p.d_out.strides.w, p.columns - d);
            let y = out_at4(view_at(p.out, b, h, i, d), p.out.strides.w, p.columns - d);
            let share = select(exp(y), vec4<f32>(), y == vec4<f32>(-p.inf));
            // If the sum is beyond f32's range, the share of it may still be in range. The kernel
            // computes half the difference, because the difference may be in range even if the
            // share is not.
            let far = mean_of_half(lowered(d_out, 1u) - share * totals.y * 0x1p99f);
            store4(view_at(p.d_x, b, h, i, d), d, select(d_out - share * totals.x, far, is_far));
        }
    }
}
