//! Chooses the next token.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Chooses tokens by their logits: the likeliest, or a random one by probability.
#[derive(Clone, Debug)]
pub struct Sampler {
    temperature: f64,
    top_p: f64,
    random: ChaCha8Rng,
}

impl Sampler {
    /// At `temperature` 0, the sampler chooses the likeliest token. Otherwise, it draws a token by
    /// its probability, softmax(logits / temperature). It draws among the fewest likeliest tokens
    /// whose probabilities sum to at least `top_p`. The same `seed` gives the same tokens.
    pub fn new(temperature: f64, top_p: f64, seed: u64) -> Self {
        Sampler { temperature, top_p, random: ChaCha8Rng::seed_from_u64(seed) }
    }

    /// Returns a token; `None` if a logit is not finite.
    pub fn choose(&mut self, logits: &[f32]) -> Option<u32> {
        let best = likeliest(logits)?;
        if self.temperature == 0.0 {
            return Some(best);
        }
        let most = logits[best as usize];
        let weight = |logit: f32| (f64::from(logit - most) / self.temperature).exp();
        // Sort the likeliest first, and on a tie the smaller number first.
        let mut order: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|logit| weight(*logit))).collect();
        order.sort_by(|a, b| b.1.total_cmp(&a.1));
        let all: f64 = order.iter().map(|(_, weight)| weight).sum();
        let mut kept = 0.0;
        let enough = order.iter().position(|(_, weight)| {
            kept += weight;
            kept >= self.top_p * all
        });
        order.truncate(enough.map_or(order.len(), |last| last + 1));
        // Use 53 bits, the precision of f64.
        let draw = (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = draw * order.iter().map(|(_, weight)| weight).sum::<f64>();
        let chosen = order.iter().find(|(_, weight)| {
            left -= weight;
            left < 0.0
        });
        Some(chosen.map_or(best, |(token, _)| *token))
    }
}

/// Returns the likeliest token, on a tie the first; `None` if a logit is not finite.
pub fn likeliest(logits: &[f32]) -> Option<u32> {
    let mut best = None;
    for (token, logit) in (0..).zip(logits) {
        if !logit.is_finite() {
            return None;
        }
        if best.is_none_or(|(_, most)| *logit > most) {
            best = Some((token, *logit));
        }
    }
    best.map(|(token, _)| token)
}

#[cfg(test)]
mod tests {
    use std::f32::consts::LN_2;

    use super::*;

    /// Logits with the probabilities 0.25, 0.5, 0.125, 0.125.
    const LOGITS: [f32; 4] = [-LN_2, 0.0, -2.0 * LN_2, -2.0 * LN_2];

    fn counts(temperature: f64, top_p: f64) -> [usize; 4] {
        let mut sampler = Sampler::new(temperature, top_p, 1);
        let mut counts = [0; 4];
        for _ in 0..8000 {
            counts[sampler.choose(&LOGITS).expect("finite") as usize] += 1;
        }
        counts
    }

    #[test]
    fn tokens_come_as_often_as_they_are_likely() {
        let near = |counts: [usize; 4], wanted: [f64; 4]| {
            // Allow five standard deviations.
            let off =
                |(n, p): (usize, f64)| (n as f64 - 8000.0 * p).abs() <= 5.0 * (8000.0 * p * (1.0 - p)).sqrt();
            assert!(counts.into_iter().zip(wanted).all(off), "{counts:?}, not {wanted:?}");
        };
        near(counts(1.0, 1.0), [0.25, 0.5, 0.125, 0.125]);
        // The squared probabilities, normalised.
        near(counts(0.5, 1.0), [4.0 / 22.0, 16.0 / 22.0, 1.0 / 22.0, 1.0 / 22.0]);
        near(counts(1.0, 0.7), [1.0 / 3.0, 2.0 / 3.0, 0.0, 0.0]);
        near(counts(1.0, 0.4), [0.0, 1.0, 0.0, 0.0]);
        near(counts(0.0, 1.0), [0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn a_seed_chooses_the_same() {
        let all = |seed| -> Vec<_> {
            let mut sampler = Sampler::new(1.0, 1.0, seed);
            (0..64).map(|_| sampler.choose(&LOGITS)).collect()
        };
        assert_eq!(all(7), all(7));
        assert_ne!(all(7), all(8));
    }

    #[test]
    fn non_finite_logits_choose_nothing() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(Sampler::new(1.0, 1.0, 0).choose(&[0.0, bad]), None);
            assert_eq!(likeliest(&[0.0, bad]), None);
        }
        assert_eq!(likeliest(&[1.0, 2.0, 2.0]), Some(1));
        assert_eq!(likeliest(&[]), None);
    }
}
