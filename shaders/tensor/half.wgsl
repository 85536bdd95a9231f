// f16 in the lower 16 bits of a word, for devices without the feature.
//
// Needs: nothing.
// Gives: half_at.

// Drivers may flush numbers below the smallest normal number, so these are computed from their
// bits.
fn half_at(word: u32) -> f32 {
    let small = f32(word & 0x3ffu) * select(0x1p-24, -0x1p-24, (word & 0x8000u) != 0u);
    return select(unpack2x16float(word).x, small, (word & 0x7c00u) == 0u);
}
