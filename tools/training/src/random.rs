//! Random numbers.

/// A random number generator: Steele et al. 2014, "Fast splittable pseudorandom number generators".
pub struct Random(u64);

impl Random {
    /// The generator of one series of a seed.
    pub fn new(seed: u64, series: usize) -> Self {
        let mut seeds = Random(seed);
        let start = (0..=series).fold(0, |_, _| seeds.next());
        Random(start)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number less than `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Returns a number between −1 and 1.
    pub fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
