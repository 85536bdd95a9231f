// The states of sequences between memory of the caller's and that in which they are added up.
//
// state [sequences, kv_heads, features, value_dim]   norm [sequences, kv_heads, features, 1]
// carry [sequences and those of packed rows that are of none, kv_heads, features, state_stride]
//
// Bindings (declared by the host): state and norm if there are any, carry. `first_slot` is the
// first sequence of the dispatch. Reads and writes everything once; an invocation has four floats
// of a state.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let kv = group.y;
    let sequence = p.first_slot + group.z;
    let e = (group.x * WORKGROUP + index) * 4u;
    if e >= p.features * p.state_stride {
        return;
    }
    let f = e / p.state_stride;
    let c = e % p.state_stride;
    let at = (sequence * p.kv_heads + kv) * p.features * p.state_stride + e;
    // Packed rows have a sequence before the caller's and one after them.
    var own = sequence;
    if p.sequences > 0u {
        own = sequence - 1u;
        if sequence == 0u || sequence + 1u == p.sequences {
            leave(at);
            return;
        }
    }
    move_state(own, kv, f, c, at);
}
