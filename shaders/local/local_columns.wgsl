// Sums over the queries in whose window each key is: the gradient of values, of weights and d_out,
// and that of keys, of the gradients of scores and queries. Both over the query heads that share
// them.
//   y[j] = Σ_h Σ_i band[h, i, j] x[h, i]
//
// band [batch, heads, q_len, widest window]   x [batch, heads, q_len, dim]   y [batch, kv_heads, kv_len, dim]
// positions [batch, heads or 1, q_len, 1]   lengths [batch or 1, 1, 1, 1]
//
// An invocation has four channels of a key at a time. Positions are in any order: it asks each
// query whether it sees the key.
//
// Bindings (declared by the host): band, x, positions, lengths if there are any, y; ACCUMULATES: y
// holds what is added to. Reads every position for every key: q_len · kv_len of them; rows of x
// once for each key in their window.

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
