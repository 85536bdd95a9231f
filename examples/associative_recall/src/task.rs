//! The task is multi-query associative recall. A sequence lists pairs of a key and a value. Then it
//! asks for the value of each key. Source: Arora et al. 2023, "Zoology: Measuring and Improving
//! Recall in Efficient Language Models", <https://arxiv.org/abs/2312.04927>.

use training::{NONE, Random};

pub const KEYS: usize = 32;
pub const VALUES: usize = 16;
pub const VOCABULARY: usize = KEYS + VALUES;

/// Sequences of two tokens for each pair, and one for each question.
pub struct Batch {
    /// `[batch, 3 · pairs]`: keys from 0 on, then values.
    pub tokens: Vec<u32>,
    /// The value of a key that is asked for, or [`NONE`].
    pub targets: Vec<u32>,
}

impl Batch {
    pub fn new(random: &mut Random, batch: usize, pairs: usize) -> Self {
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for _ in 0..batch {
            let mut keys: [u32; KEYS] = std::array::from_fn(|n| n as u32);
            let mut asked: Vec<(u32, u32)> = Vec::new();
            for n in 0..pairs {
                keys.swap(n, n + random.below(KEYS - n));
                let value = (KEYS + random.below(VALUES)) as u32;
                asked.push((keys[n], value));
                tokens.extend([keys[n], value]);
                targets.extend([NONE; 2]);
            }
            for n in 0..pairs {
                asked.swap(n, n + random.below(pairs - n));
                tokens.push(asked[n].0);
                targets.push(asked[n].1);
            }
        }
        Batch { tokens, targets }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_values_of_keys() {
        let (batch, pairs) = (5, 8);
        let got = Batch::new(&mut Random::new(3, 1), batch, pairs);
        for (tokens, targets) in got.tokens.chunks(3 * pairs).zip(got.targets.chunks(3 * pairs)) {
            let (listed, asked) = tokens.split_at(2 * pairs);
            assert!(targets[..2 * pairs].iter().all(|target| *target == NONE));
            for (key, target) in asked.iter().zip(&targets[2 * pairs..]) {
                let mut values = listed.chunks(2).filter(|pair| pair[0] == *key).map(|pair| pair[1]);
                assert_eq!((values.next(), values.next()), (Some(*target), None));
            }
        }
    }
}
