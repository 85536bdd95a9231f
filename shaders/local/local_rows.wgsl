// Sums over the keys in the window of each query. The output sums weights times values. The
// gradient of queries sums gradients of scores times keys.
//   y[i] = Σ_j band[i, j] x[j]
//
// band [batch, heads, q_len, widest window]   x [batch, kv_heads, kv_len, dim]
// y [batch, heads, q_len, dim]   positions [batch, heads or 1, q_len, 1]
// lengths [batch or 1, 1, 1, 1]
//
// An invocation computes four channels of a query at a time. A query without keys gets 0.
//
// Bindings (declared by the host): band, x, positions, lengths if there are any, y. With
// ACCUMULATES the kernel adds to the contents of y. It reads a row of x once for each query whose
// window contains it.

// Returns four channels of a query's sum, divided by 2 to the power of `exponent`. `row` is the
// offset of the query's band.
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
        // Rounding can make the weights of the output sum to more than 1.
        if !all_finite(sum) {
            sum = mean_of_half(band_times_rows(b, h, reach, row, d, 1u));
        }
        store_row(view_at(p.y, b, h, i, d), rest, sum);
    }
}
