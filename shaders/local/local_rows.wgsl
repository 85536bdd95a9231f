// Sums over the keys of each query's window: the output, of weights and values, and the gradient of
// queries, of those of scores and keys.
//   y[i] = Σ_j band[i, j] x[j]
//
// band [batch, heads, q_len, widest window]   x [batch, kv_heads, kv_len, dim]   y [batch, heads, q_len, dim]
// positions [batch, heads or 1, q_len, 1]   lengths [batch or 1, 1, 1, 1]
//
// An invocation has four channels of a query at a time. A query without keys gets 0.
//
// Bindings (declared by the host): band, x, positions, lengths if there are any, y; ACCUMULATES: y
// holds what is added to. Reads rows of x once for each query whose window they are in.

// Four channels of a query's sum / 2 to the power of `exponent`. `row` is where its band begins.
fn band_times_rows(b: u32, h: u32, reach: Reach, row: u32, d: u32, exponent: u32) -> vec4<f32> {
    var sum = vec4<f32>();
    for (var m = 0u; m < reach.count; m++) {
        let x = view_at(p.x, b, h / p.group, reach.first + m, d);
        sum += band_at(row + m) * lowered(x_at4(x, p.x.strides.w, p.dim - d), exponent);
    }
    return sum;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let h = group.y;
    let b = group.z;
    for (var n = group.x * WORKGROUP + lane; n < p.work; n += p.step) {
        let i = n / p.fours;
        let d = (n - i * p.fours) * 4u;
        let rest = p.dim - d;
        let reach = reach_of(b, h, i);
        let row = view_at(p.band, b, h, i, 0u);
        var sum = band_times_rows(b, h, reach, row, d, 0u);
        // The weights of the output add up to more than 1 by their rounding.
        if !all_finite(sum) {
            sum = mean_of_half(band_times_rows(b, h, reach, row, d, 1u));
        }
        store_row(view_at(p.y, b, h, i, d), rest, sum);
    }
}
