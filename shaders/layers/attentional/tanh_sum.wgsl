// The last step of the attentional vector: out = tanh(a + b). (Luong et al. 2015, equation 5.)
//
// a, b [batch, 1, length, channels], f32   out [batch, 1, length, channels]
//
// Bindings (declared by the host): a, b, out. An invocation computes four channels: two reads, a
// tanh and a write each.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let d = (group.x * WORKGROUP + lane) * 4u;
    if d >= p.channels {
        return;
    }
    let rest = p.channels - d;
    let x = a_at4(view_at(p.a, group.z, 0u, group.y, d), p.a.strides.w, rest)
        + b_at4(view_at(p.b, group.z, 0u, group.y, d), p.b.strides.w, rest);
    let t = tanh4(x);
    for (var c = 0u; c < min(4u, rest); c++) {
        out_store(view_at(p.out, group.z, 0u, group.y, d + c), component(t, c));
    }
}
