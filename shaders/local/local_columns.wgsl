// Sums over the queries whose window contains a key, over the query heads that share the key. The
// gradient of values sums weights times d_out. The gradient of keys sums gradients of scores times
// queries.
//   y[j] = Σ_h Σ_i band[h, i, j] x[h, i]
//
// band [batch, heads, q_len, widest window]   x [batch, heads, q_len, dim]
// y [batch, kv_heads, kv_len, dim]   positions [batch, heads or 1, q_len, 1]
// lengths [batch or 1, 1, 1, 1]
//
// An invocation computes four channels of a key at a time. Positions have no order, so it tests the
// window of every query.
//
// Bindings (declared by the host): band, x, positions, lengths if there are any, y. With
// ACCUMULATES the kernel adds to the contents of y. It reads every position for every key, q_len ·
// kv_len of them. It reads a row of x once for each key in its window.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let kv = group.y;
    let b = group.z;
    for (var n = group.x * WORKGROUP + lane; n < p.work; n += p.step) {
        let j = n / p.fours;
        let d = (n - j * p.fours) * 4u;
        let rest = p.dim - d;
        var sum = vec4<f32>();
        for (var h = kv * p.group; h < (kv + 1u) * p.group; h++) {
            for (var i = 0u; i < p.q_len; i++) {
                let reach = reach_of(b, h, i);
                if j >= reach.first && j < reach.first + reach.count {
                    let weight = band_at(view_at(p.band, b, h, i, j - reach.first));
                    sum += weight * x_at4(view_at(p.x, b, h, i, d), p.x.strides.w, rest);
                }
            }
        }
        store_row(view_at(p.y, b, kv, j, d), rest, sum);
    }
}
