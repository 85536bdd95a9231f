//! The source of random choices: a seed, or the bytes of a fuzzer.

use crate::random::Rng;

/// A stream of choices. When its bytes have run out, it always returns the first choice.
pub struct Choices<'a> {
    rng: Rng,
    bytes: Option<&'a [u8]>,
}

impl<'a> Choices<'a> {
    pub fn seeded(seed: u64) -> Self {
        Choices { rng: Rng::new(seed), bytes: None }
    }

    /// Reads choices from the bytes that cargo-fuzz would provide.
    pub fn bytes(bytes: &'a [u8]) -> Self {
        Choices { rng: Rng::new(0), bytes: Some(bytes) }
    }

    pub fn word(&mut self) -> u64 {
        let Some(bytes) = &mut self.bytes else { return self.rng.word() };
        let (now, rest) = bytes.split_at(bytes.len().min(4));
        *bytes = rest;
        now.iter().fold(0, |word, byte| word << 8 | u64::from(*byte))
    }

    /// Returns a number in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.word() % n.max(1) as u64) as usize
    }

    /// Returns a number in `low..=high`.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// Returns true with a chance of one in `n`, and false when the bytes have run out.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Returns an unusual number.
    pub fn size(&mut self) -> usize {
        const LIMITS: [usize; 12] = [
            1 << 16,
            1 << 24,
            1 << 28,
            (i32::MAX / 4) as usize,
            i32::MAX as usize,
            1 << 31,
            u32::MAX as usize,
            1 << 32,
            1 << 48,
            isize::MAX as usize,
            1 << 63,
            usize::MAX,
        ];
        match self.below(8) {
            0 => 0,
            1 => 1,
            2 => self.pick(&[2, 3, 5, 7, 13, 31, 61, 127, 251]),
            3 => self.between(2, 40),
            4 => self.pick(&[64, 65, 255, 256, 257, 1024, 4095, 4096, 16383, 16384, 65535]),
            _ => {
                let limit = self.pick(&LIMITS);
                limit.wrapping_add(self.below(5)).wrapping_sub(2)
            }
        }
    }

    /// Returns a float of any kind.
    pub fn float(&mut self) -> f32 {
        match self.below(3) {
            0 => self.pick(&[0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-3, 100.0]),
            1 => self.pick(&[
                f32::NAN,
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::MAX,
                f32::MIN,
                f32::MIN_POSITIVE,
                1e-45,
                1.0 - f32::EPSILON / 2.0,
                1.0 + f32::EPSILON,
                16777216.0,
            ]),
            _ => f32::from_bits(self.word() as u32),
        }
    }
}
