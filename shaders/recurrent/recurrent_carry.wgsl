// Copies the states of sequences between the caller's memory and the memory that kernels update. A
// sequence whose slot does not exist begins with zeros, and its last state is dropped.
//
// state [slots, value_heads, head_dim, value_dim]   indices [sequences, 1, 1, 1]
// carry [states, value_heads, features, values]: sequence n has state n · p.left + p.right
//
// Bindings (declared by the host): state and indices if there are any, carry. `first_sequence` is
// the first sequence of the dispatch. Floors: 8 bytes an element. An invocation copies four
// channels.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let h = group.y;
    let sequence = p.first_sequence + group.z;
    let e = (group.x * WORKGROUP + index) * 4u;
    let f = e / p.values;
    let c = e % p.values;
    if f >= p.features {
        return;
    }
    let at = ((sequence * p.left + p.right) * p.value_heads + h) * p.features * p.values + e;
    var slot = sequence;
    if HAS_INDICES {
        slot = indices_at(view_at(p.indices, sequence, 0u, 0u, 0u));
    }
    let is_there = HAS_STATE && slot < p.all_states && f < p.head_dim;
    var value = vec4<f32>();
    if IS_KEPT {
        value = carry_at4(at, 1u, 4u);
    }
    for (var n = 0u; n < 4u; n++) {
        if is_there && c + n < p.value_dim {
            let o = view_at(p.state, slot, h, f, c + n);
            if IS_KEPT {
                var sum = component(value, n);
                if p.accumulates != 0u {
                    sum += state_at(o);
                }
                state_store(o, sum);
            } else {
                value = select(value, vec4<f32>(state_at(o)), vec4<u32>(0u, 1u, 2u, 3u) == vec4<u32>(n));
            }
        }
    }
    if !IS_KEPT {
        carry_store4(at, value);
    }
}
