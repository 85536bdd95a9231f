// The gradient of a tanh's argument: d_sum = d_out · (1 − out²).
//
// out, d_out [batch, 1, length, channels]   d_sum [batch, 1, length, channels], f32
//
// Bindings (declared by the host): out, d_out, d_sum. An invocation computes one element: two reads
// and a write.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let d = group.x * WORKGROUP + lane;
    if d >= p.channels {
        return;
    }
    let t = out_at(view_at(p.out, group.z, 0u, group.y, d));
    let x = d_out_at(view_at(p.d_out, group.z, 0u, group.y, d)) * ((1.0 - t) * (1.0 + t));
    d_sum_store(view_at(p.d_sum, group.z, 0u, group.y, d), x);
}
