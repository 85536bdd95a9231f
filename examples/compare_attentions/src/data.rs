//! The input sequence for all kinds of attention.

use std::f32::consts::TAU;

/// Channels of a token.
pub const DIM: usize = 64;
/// The number of topics in a sequence.
const TOPICS: usize = 16;
/// Tokens before the topic changes, on average.
const RUN: f32 = 24.0;
/// The norm of a topic's vector, and the deviation of its tokens. Two tokens of one topic have a
/// score about 5 higher than two of different topics.
const LENGTH: f32 = 6.5;
const SPREAD: f32 = 0.35;
/// The norm of a token's vector.
pub const LENGTH_OF_KEYS: f64 = 7.1;

/// Tokens in runs of one topic, and topics come back later. A query attends to all tokens of its
/// topic, near and far.
pub struct Sequence {
    /// Queries, which are also the keys, `[length, DIM]`.
    pub qk: Vec<f32>,
    pub v: Vec<f32>,
}

impl Sequence {
    pub fn new(length: usize, seed: u64) -> Self {
        let mut rng = Rng(seed);
        let mut vector = |size: f32| -> Vec<f32> { (0..DIM).map(|_| rng.normal() * size).collect() };
        let size = LENGTH / (DIM as f32).sqrt();
        let topics: Vec<_> = (0..TOPICS).map(|_| [vector(size), vector(1.0)]).collect();
        let mut topic = 0;
        let (mut qk, mut v) = (Vec::new(), Vec::new());
        for _ in 0..length {
            if rng.unit() < 1.0 / RUN {
                topic = (rng.unit() * TOPICS as f32) as usize % TOPICS;
            }
            let [direction, value] = &topics[topic];
            qk.extend(direction.iter().map(|x| x + SPREAD * rng.normal()));
            v.extend(value.iter().map(|x| x + rng.normal()));
        }
        Sequence { qk, v }
    }
}

/// SplitMix64 (Steele et al. 2014).
pub struct Rng(pub u64);

impl Rng {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A random number in (0, 1].
    fn unit(&mut self) -> f32 {
        ((self.word() >> 40) + 1) as f32 / (1u64 << 24) as f32
    }

    /// A normally distributed random number, by Box and Muller's method.
    pub fn normal(&mut self) -> f32 {
        let (a, b) = (self.unit(), self.unit());
        (-2.0 * a.ln()).sqrt() * (TAU * b).cos()
    }
}
