// The gradient of rows whose mean is computed: d_x = g / count, zero for rows without a mean.
// Without L2, g is d_out. With L2 and the mean m, g is (d_out − m (m · d_out) / |m|²) / |m|.
//
// x, d_x [batch, 1, length, features]   d_out [sequences, 1, 1, features]
// numbers, keep as in mean_pool.wgsl
//
// ROW_LANES invocations share a sequence.
//
// Bindings (declared by the host): x if L2, numbers if LENGTHS or PACKED, keep if KEEP, d_out, d_x.
// `IN_FOURS`: x, d_out and d_x are accessed as vec4. ACCUMULATES: the gradient is added to d_x.
// Bytes: with L2 x once from memory and a second time from caches; d_x once.

fn d_out4(s: u32, d: u32) -> vec4<f32> {
    return d_out_at4(view_at(p.d_out, s, 0u, 0u, d), p.d_out.strides.w, p.features - d);
}

fn store4(b: u32, i: u32, d: u32, gradient: vec4<f32>) {
    let o = view_at(p.d_x, b, 0u, i, d);
    let step = p.d_x.strides.w;
    var sum = gradient;
    if ACCUMULATES {
        sum += d_x_at4(o, step, p.features - d);
    }
    if IN_FOURS {
        d_x_store4(o, sum);
    } else {
        for (var c = 0u; c < min(4u, p.features - d); c++) {
            d_x_store(o + c * step, component(sum, c));
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let lane = lane_of(index);
    for (var s = first_row(group.x, index); s < p.sequences; s += p.step) {
        let sequence = sequence_of(s);
        var scale = 1.0;
        var along = 0.0;
        var exponent = 0u;
        if L2 {
            var squares = vec4<f32>();
            var far_squares = vec4<f32>();
            var products = vec4<f32>();
            var far_products = vec4<f32>();
            for (var d = lane * 4u; d < p.features; d += ROW_LANES * 4u) {
                let mean = mean4(sequence, d);
                let far_mean = lowered(mean, FAR_EXPONENT);
                squares += mean * mean;
                far_squares += far_mean * far_mean;
                products += mean * d_out4(s, d);
                far_products += far_mean * d_out4(s, d);
            }
            let near = row_sum(squares, lane);
            let far = row_sum(far_squares, lane);
            exponent = far_exponent(near);
            let norm = sqrt(select(far, near, exponent == 0u));
            let eps = lowered(vec4<f32>(p.eps), exponent).x;
            scale = 1.0 / max(norm, eps);
            let near_product = row_sum(products, lane);
            let product = select(row_sum(far_products, lane), near_product, exponent == 0u);
            // If the divisor is eps, the gradient does not depend on the length.
            along = select(0.0, product * scale * scale, norm > eps);
        }
        // Rows outside all sequences of a packed entry also need a gradient, which is zero. The
        // first sequence writes the rows before it, and the last sequence writes the rows after it.
        var first = 0u;
        var end = p.length;
        if PACKED {
            first = select(sequence.first, 0u, s == 0u);
            end = select(sequence.end, p.length, s + 1u == p.sequences);
        }
        let share = scale / f32(max(sequence.count, 1u));
        for (var d = lane * 4u; d < p.features; d += ROW_LANES * 4u) {
            var gradient = d_out4(s, d);
            if L2 {
                gradient -= along * lowered(mean4(sequence, d), exponent);
            }
            gradient = lowered(gradient * share, exponent);
            for (var i = first; i < end; i++) {
                let within = i >= sequence.first && i < sequence.end && is_kept(sequence.b, i);
                if within || !ACCUMULATES {
                    store4(sequence.b, i, d, select(vec4<f32>(), gradient, within));
                }
            }
        }
    }
}
