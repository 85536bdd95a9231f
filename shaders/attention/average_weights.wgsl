// The mean of the attention weights over groups of heads, in the caller's layout and type.
//
// weights [batch, heads, q_len, kv_len], f32   out [batch, heads / group, q_len, kv_len]
// Bindings (declared by the host): weights, out.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let j = group.x * 64u + lane;
    if j >= p.kv_len {
        return;
    }
    let b = group.z / p.out_heads;
    let h = group.z % p.out_heads;
    var sum = 0.0;
    for (var g = 0u; g < p.group; g++) {
        sum += weights_at(view_at(p.weights, b, h * p.group + g, group.y, j));
    }
    out_store(view_at(p.out, b, h, group.y, j), sum / f32(p.group));
}
