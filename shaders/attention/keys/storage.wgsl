// The packing of channels in words. STORAGE_KIND is one of these kinds.
//
// Needs: STORAGE_KIND.
// Gives: BF16, F16, F32, PER_WORD, Q4, Q8, SCALED.

const F32: u32 = 0u;
const F16: u32 = 1u;
const BF16: u32 = 2u;
const Q8: u32 = 3u;
const Q4: u32 = 4u;
const PER_WORD: u32 = array<u32, 5>(1u, 2u, 2u, 4u, 8u)[STORAGE_KIND];
// True if channels share scales.
const SCALED: bool = STORAGE_KIND >= Q8;
