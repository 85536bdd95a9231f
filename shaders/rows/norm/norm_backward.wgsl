// The gradient of a norm's input, and the statistics of its rows. Let g = d_out · weight, n the
// normalised row, and r its scale. Then d_x = r · (g − mean of g − n · mean of g n) + d_sum.
// RMSNorm omits the mean of g.
//
// x, residual, d_out, d_sum, d_x [batch, heads, length, features]   weight [features]
// statistics [rows, 3]: mean, rest, scale (negative with FAR_EXPONENT)
//
// ROW_LANES invocations share a row, as in norm.wgsl.
//
// Bindings (declared by the host): x, residual, weight if present, d_out, d_sum if present, d_x and
// statistics if requested. `IN_FOURS`: all except statistics are accessed as vec4. ACCUMULATES: the
// gradient is added to d_x.
// Bytes: x, residual and d_out once from memory, and a second time from caches; d_sum once, d_x
// once.

// d_out · weight from channel d on; zero past the last channel. Both passes must round the product
// in the same way. A compiler may contract the product and `− mean` to a fused multiply-add. If the
// difference is 0, this leaves the rounding error of the product, and 1 / √eps multiplies it.
// `p.rows >> 31u` is 0, but no compiler knows this. A product whose bits are joined with it cannot
// be contracted.
fn weighted4(at: Place, d: u32) -> vec4<f32> {
    var g = d_out_at4(view_at(p.d_out, at.b, at.h, at.i, d), p.d_out.strides.w, p.features - d);
    if HAS_WEIGHT {
        g *= weight_at4(p.weight_at.x + d * p.weight_at.y, p.weight_at.y, p.features - d);
    }
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(g) | vec4<u32>(p.rows >> 31u));
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
        if HAS_D_X {
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
                store_d_x4(at, d, d_x);
            }
        }
    }
}
