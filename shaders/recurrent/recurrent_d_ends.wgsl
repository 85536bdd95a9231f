// The part of a chunk's first state in the gradients of its decays, for each channel. It is the
// decayed state times the gradient of the state after the chunk.
//
// memory: ends, states and d_states. d_ends [features] of a chunk
//
// Bindings (declared by the host): memory. Floors: values multiply-adds a channel; two states read
// a chunk. An invocation computes four channels.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let f = (group.x * WORKGROUP + index) * 4u;
    if f >= p.features {
        return;
    }
    let slot = group.z * p.slots + group.y;
    let at = (slot * p.features + f) * p.values;
    var sum = vec4<f32>();
    for (var c = 0u; c < p.values; c += 4u) {
        sum += vec4<f32>(
            dot(at4(p.states + at + c), at4(p.d_states + at + c)),
            dot(at4(p.states + at + p.values + c), at4(p.d_states + at + p.values + c)),
            dot(at4(p.states + at + 2u * p.values + c), at4(p.d_states + at + 2u * p.values + c)),
            dot(at4(p.states + at + 3u * p.values + c), at4(p.d_states + at + 3u * p.values + c)),
        );
    }
    sum *= at4(p.ends + slot * p.features + f);
    memory_store4(p.d_ends + slot * p.features + f, sum);
}
