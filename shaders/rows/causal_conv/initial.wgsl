// The initial states of sequences.
//
// Needs: p.initial, p.channels; HAS_INITIAL; initial_at4, view_at.
// Gives: kept4.

// Four channels of a row of a state, from d on.
fn kept4(s: u32, k: u32, d: u32) -> vec4<f32> {
    if HAS_INITIAL {
        return initial_at4(view_at(p.initial, s, 0u, k, d), p.initial.strides.w, p.channels - d);
    } else {
        return vec4<f32>();
    }
}
