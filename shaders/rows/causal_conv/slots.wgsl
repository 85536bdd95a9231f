// The states of sequences, in a tensor of states by slots.
//
// Needs: p.slots, p.initial, p.state, p.channels, p.states; HAS_INITIAL, HAS_SLOTS, IN_FOURS,
// IN_PLACE; component, initial_at4, slots_at, state_at4, state_store, state_store4, view_at.
// Gives: kept4, slot_of, store_state4.

// The index of a sequence's state. It is p.states if the sequence has none.
fn slot_of(s: u32) -> u32 {
    if HAS_SLOTS {
        return min(slots_at(view_at(p.slots, s, 0u, 0u, 0u)), p.states);
    } else {
        return s;
    }
}

// Four channels of a row of a state, from d on.
fn kept4(s: u32, k: u32, d: u32) -> vec4<f32> {
    let slot = slot_of(s);
    var row = vec4<f32>();
    if slot < p.states {
        if IN_PLACE {
            row = state_at4(view_at(p.state, slot, 0u, k, d), p.state.strides.w, p.channels - d);
        } else if HAS_INITIAL {
            row = initial_at4(view_at(p.initial, slot, 0u, k, d), p.initial.strides.w, p.channels - d);
        }
    }
    return row;
}

// Stores four channels of a row of a state.
fn store_state4(slot: u32, k: u32, d: u32, value: vec4<f32>) {
    let o = view_at(p.state, slot, 0u, k, d);
    if IN_FOURS {
        state_store4(o, value);
    } else {
        for (var c = 0u; c < min(4u, p.channels - d); c++) {
            state_store(o + c * p.state.strides.w, component(value, c));
        }
    }
}
