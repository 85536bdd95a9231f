// How words hold channels. FORMAT: one of these.

const F32: u32 = 0u;
const F16: u32 = 1u;
const Q8: u32 = 2u;
const Q4: u32 = 3u;
const PER_WORD: u32 = array<u32, 4>(1u, 2u, 4u, 8u)[FORMAT];
// Whether channels share scales.
const SCALED: bool = FORMAT >= Q8;
