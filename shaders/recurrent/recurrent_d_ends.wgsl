// The gradient of the logarithm of a chunk's whole decay, for each channel. The state before the
// chunk and the keys of the chunk pass it on to the state after the chunk.
//
// memory: suffix_keys and d_suffix_keys [features] of each row, ends, states and d_states. d_ends
// [features] of a chunk
//
// Bindings (declared by the host): memory. Floors: values + chunk_len multiply-adds a channel; two
// states and 8 · chunk_len · features bytes read a chunk. An invocation computes four channels.

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
    let row = row_at(group.z, group.y) * p.features + f;
    for (var t = 0u; t < p.chunk_len; t++) {
        sum += at4(p.suffix_keys + row + t * p.features) * at4(p.d_suffix_keys + row + t * p.features);
    }
    memory_store4(p.d_ends + slot * p.features + f, sum);
}
