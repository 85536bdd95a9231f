// The gradient of a norm's input, and the statistics of its rows. Let g = d_out · weight, n the
// normalised row, and r its scale. Then d_x = r · (g − mean of g − n · mean of g n) + d_sum.
// RMSNorm omits the mean of g.
//
// HAS_GATE: g also has the factor f(gate), and d_gate = d_out · (n · weight + bias) · f'(gate).
// GATE_FIRST: n and r are those of x · f(gate). With e in place of d_x above, d_x = e · f(gate) and
// d_gate = e · x · f'(gate).
//
// x, residual, gate, d_out, d_sum, d_x, d_gate [batch, heads, length, features]
// weight, bias [features]   statistics [rows, 3]: mean, rest, scale (negative with FAR_EXPONENT)
//
// ROW_LANES invocations share a row, as in norm.wgsl.
//
// Bindings (declared by the host): x, residual, weight, bias and gate if present. Then d_out, d_sum
// if present, d_x, d_gate and statistics if requested. `IN_FOURS`: all except statistics are
// accessed as vec4. ACCUMULATES: the gradients are added to d_x and d_gate. A gated norm has
// neither residual nor d_sum.
// Bytes: x, residual and d_out once from memory, and a second time from caches; d_sum once, d_x
// once.

// d_out · weight from channel d on; zero past the last channel. Both passes must round the product
// in the same way. A compiler may contract the product and `− mean` to a fused multiply-add. If the
// difference is 0, this leaves the rounding error of the product, and 1 / √eps multiplies it.
fn weighted4(at: Place, d: u32) -> vec4<f32> {
    var g = d_out_at4(view_at(p.d_out, at.b, at.h, at.i, d), p.d_out.strides.w, p.features - d);
    if HAS_WEIGHT {
        g *= weight_at4(p.affine.x + d * p.affine.y, p.affine.y, p.features - d);
    }
    if HAS_GATE && !GATE_FIRST {
        g *= activate4(gate4(at, d));
    }
    return rounded4(g);
}

// The mean over a row. For a sum beyond f32's range, sums.y is the sum of the terms / 2 to the
// power of FAR_EXPONENT.
fn mean_of(sums: vec2<f32>) -> f32 {
    let means = sums / f32(p.features);
    return select(means.y * 0x1p100f, means.x, all_finite(vec4<f32>(means.x)));
}

fn store_d_x4(at: Place, d: u32, gradient: vec4<f32>) {
    let o = view_at(p.d_x, at.b, at.h, at.i, d);
    var sum = gradient;
    if ACCUMULATES {
        sum += d_x_at4(o, p.d_x.strides.w, p.features - d);
    }
    if IN_FOURS {
        d_x_store4(o, sum);
    } else {
        for (var c = 0u; c < min(4u, p.features - d); c++) {
            d_x_store(o + c * p.d_x.strides.w, component(sum, c));
        }
    }
}

fn store_d_gate4(at: Place, d: u32, gradient: vec4<f32>) {
    let o = view_at(p.d_gate, at.b, at.h, at.i, d);
    var sum = gradient;
    if ACCUMULATES {
        sum += d_gate_at4(o, p.d_gate.strides.w, p.features - d);
    }
    if IN_FOURS {
        d_gate_store4(o, sum);
    } else {
        for (var c = 0u; c < min(4u, p.features - d); c++) {
            d_gate_store(o + c * p.d_gate.strides.w, component(sum, c));
        }
    }
}

// The gradient of a gate after the norm, without the slope: d_out times the row before the gate.
fn gated_rows4(at: Place, d: u32, n: vec4<f32>) -> vec4<f32> {
    var y = n;
    if HAS_WEIGHT {
        y *= weight_at4(p.affine.x + d * p.affine.y, p.affine.y, p.features - d);
    }
    if HAS_BIAS {
        y += bias_at4(p.affine.z + d * p.affine.w, p.affine.w, p.features - d);
    }
    return y * d_out_at4(view_at(p.d_out, at.b, at.h, at.i, d), p.d_out.strides.w, p.features - d);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let lane = lane_of(index);
    for (var row = first_row(group.x, index); row < p.rows; row += p.step) {
        let at = place_of(row);
        let s = statistics_of(at, lane);
        if HAS_STATISTICS {
            if lane == 0u {
                statistics_store(3u * row, s.mean);
                statistics_store(3u * row + 1u, s.rest);
                // The sign encodes the exponent.
                statistics_store(3u * row + 2u, select(-s.scale, s.scale, s.exponent == 0u));
            }
        }
        if HAS_D_X || HAS_D_GATE {
            var sums = vec4<f32>();
            var far_sums = vec4<f32>();
            var products = vec4<f32>();
            var far_products = vec4<f32>();
            for (var d = lane * 4u; d < p.features; d += ROW_LANES * 4u) {
                let g = weighted4(at, d);
                let n = normalised4(input4(at, d), s);
                sums += g;
                let far_g = lowered(g, FAR_EXPONENT);
                far_sums += far_g;
                products += g * n;
                far_products += far_g * n;
            }
            var mean = 0.0;
            if CENTRED {
                mean = mean_of(row_sums(sums, far_sums, lane));
            }
            let along = mean_of(row_sums(products, far_products, lane));
            for (var d = lane * 4u; d < p.features; d += ROW_LANES * 4u) {
                let n = normalised4(input4(at, d), s);
                var d_x = lowered(s.scale * (weighted4(at, d) - mean - n * along), s.exponent);
                if HAS_D_SUM {
                    d_x += d_sum_at4(view_at(p.d_sum, at.b, at.h, at.i, d), p.d_sum.strides.w, p.features - d);
                }
                if HAS_D_GATE {
                    var d_gate = gated_rows4(at, d, n);
                    if GATE_FIRST {
                        d_gate = d_x * bare4(at, d);
                    }
                    store_d_gate4(at, d, d_gate * slope4(gate4(at, d)));
                }
                if GATE_FIRST {
                    d_x *= activate4(gate4(at, d));
                }
                if HAS_D_X {
                    store_d_x4(at, d, d_x);
                }
            }
        }
    }
}
