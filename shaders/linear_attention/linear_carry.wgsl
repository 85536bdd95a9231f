// Copies the states of sequences between the caller's memory and the memory in which kernels sum
// them.
//
// state [sequences, kv_heads, features, value_dim]   norm [sequences, kv_heads, features, 1]
// carry [sequences, kv_heads, features, state_stride]: packed rows add a first and a last sequence
//
// Bindings (declared by the host): state and norm if there are any, carry. `first_slot` is the
// first sequence of the dispatch. The kernel reads and writes every state once. An invocation
// copies a vec4 of a state.

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
    // Packed rows add a sequence before the caller's sequences and one after them.
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
