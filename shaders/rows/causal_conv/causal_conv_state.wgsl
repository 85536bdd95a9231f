// The states after causal convolutions: the last WIDTH − 1 rows of each sequence. A sequence with
// fewer rows also keeps rows of its state before the call.
//
// x [batch, 1, length, channels]   initial, state [states, 1, WIDTH − 1, channels]
// numbers, slots as in causal_conv.wgsl
//
// An invocation has a sequence and four channels. It reads all rows before it writes one, so the
// state may be the initial state.
//
// Bindings (declared by the host): x, numbers if LENGTHS or PACKED, slots if present, initial if
// present, state. IN_PLACE: the state is also the initial state. `IN_FOURS`: x, initial and state
// are accessed as vec4.
// Bytes: WIDTH − 1 rows of x and of state for each sequence.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let first = group.y * (WORKGROUP / LANES) + index / LANES;
    for (var d = (group.x * LANES + index % LANES) * 4u; d < p.channels; d += p.across) {
        for (var s = first; s < p.sequences; s += p.step) {
            let q = sequence_of(s);
            let slot = slot_of(s);
            if slot < p.states {
                fill(q, q.end + KEPT - q.first, d);
                /* unrolled */ for (var j = 1u; j < WIDTH; j++) {
                    store_state4(slot, j - 1u, d, window[j]);
                }
            }
        }
    }
}
