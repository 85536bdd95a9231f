// Running sums of the states of chunks, in order. The sum before a chunk replaces the state of the
// chunk. Without causality only the total is written. In the backward pass the sums go from the
// last chunk to the first.
//
// states [batch · kv_heads, slots of the span, features, state_stride]
// carry [sequences, kv_heads, features, state_stride]
//
// Bindings (declared by the host): states, carry, chunks if there is a table. The kernel reads and
// writes every state once. An invocation computes a vec4 of all states.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let kv = group.y;
    let b = group.z;
    let size = p.features * p.state_stride;
    let e = (group.x * WORKGROUP + index) * 4u;
    if e >= size {
        return;
    }
    var sequence = HIDDEN;
    var running = vec4<f32>();
    for (var n = 0u; n < p.slots; n++) {
        var slot = n;
        if IS_REVERSE {
            slot = p.slots - 1u - n;
        }
        let chunk = chunk_of(b, kv, p.first_slot + slot);
        if chunk.count > 0u && chunk.ordinal != HIDDEN {
            if chunk.sequence != sequence {
                if sequence != HIDDEN {
                    carry_store4((sequence * p.kv_heads + kv) * size + e, running);
                }
                sequence = chunk.sequence;
                running = carry_at4((sequence * p.kv_heads + kv) * size + e, 1u, 4u);
            }
            let at = ((b * p.kv_heads + kv) * p.slots + slot) * size + e;
            let own = states_at4(at, 1u, 4u);
            if IS_CAUSAL {
                states_store4(at, running);
            }
            if IS_SCALED {
                let after = log_after(b, kv, p.first_slot + slot);
                running *= hidden_or_exp(log_before(b, kv, p.first_slot + slot), after);
                if IS_CAUSAL && !IS_REVERSE {
                    running += own * hidden_or_exp(log_within(b, kv, p.first_slot + slot), after);
                } else {
                    running += own;
                }
            } else {
                running += own;
            }
        }
    }
    if sequence != HIDDEN {
        carry_store4((sequence * p.kv_heads + kv) * size + e, running);
    }
}
