// The storages of channels in words. Storages from Q8 on have scales.
//
// Needs: nothing.
// Gives: BF16, E4M3, E4M3_FIRST, E4M3_SHIFT, E5M2, E5M2_FIRST, E5M2_SHIFT, F16, F32, GAUSSIAN4, Q4,
// Q8; gaussian_levels.

const F32: u32 = 0u;
const F16: u32 = 1u;
const BF16: u32 = 2u;
const Q8: u32 = 3u;
const E4M3: u32 = 4u;
const E5M2: u32 = 5u;
const Q4: u32 = 6u;
const GAUSSIAN4: u32 = 7u;

// A normal float of eight bits becomes an f32 by a shift of SHIFT bits and the addition of FIRST.
const E4M3_SHIFT: u32 = 20u;
const E4M3_FIRST: u32 = 0x3c000000u;
const E5M2_SHIFT: u32 = 21u;
const E5M2_FIRST: u32 = 0x38000000u;

// The levels of GAUSSIAN4 with these numbers, 0 to 15 (src/cache/reference.rs).
fn gaussian_levels(numbers: vec4<f32>) -> vec4<f32> {
    let t = numbers - 7.5;
    let square = t * t;
    return t * (0.26071 + square * (0.0003008 + square * 0.00002658));
}
