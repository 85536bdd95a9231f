//! The task is induction. A sequence repeats a random series of letters. So a repeated letter has
//! the same successor as the last time.

/// The target of a letter whose successor is not predictable is [`NONE`].
pub use training::NONE;
use training::Random;

pub const VOCABULARY: usize = 26;
pub const LENGTH: usize = 20;
/// Sequences of a batch.
pub const BATCH: usize = 64;
/// The number of different letters before the first repetition. Each sequence has a random one, so
/// no fixed distance gives the answer.
const PERIODS: std::ops::RangeInclusive<usize> = 5..=12;

/// The purpose of a series of random numbers.
#[derive(Clone, Copy)]
pub enum Series {
    Weights,
    Training,
    HeldOut,
}

/// Sequences, and the target after each letter.
#[derive(Clone)]
pub struct Batch {
    /// `[BATCH, LENGTH]`, from 0 to `VOCABULARY` − 1.
    pub tokens: Vec<u32>,
    /// `[BATCH, LENGTH]`: the next token, or [`NONE`].
    pub targets: Vec<u32>,
    /// The number of letters before the first repetition, for each sequence.
    pub periods: Vec<usize>,
}

impl Batch {
    pub fn new(random: &mut Random) -> Self {
        let mut batch = Batch { tokens: Vec::new(), targets: Vec::new(), periods: Vec::new() };
        for _ in 0..BATCH {
            let period = PERIODS.start() + random.below(PERIODS.end() - PERIODS.start() + 1);
            let mut letters: [u32; VOCABULARY] = std::array::from_fn(|n| n as u32);
            for n in 0..period {
                letters.swap(n, n + random.below(VOCABULARY - n));
            }
            let token = |i: usize| letters[i % period];
            batch.tokens.extend((0..LENGTH).map(token));
            let target = |i: usize| if is_known(i, period) { token(i + 1) } else { NONE };
            batch.targets.extend((0..LENGTH).map(target));
            batch.periods.push(period);
        }
        batch
    }

    /// The number of targets.
    pub fn known(&self) -> usize {
        self.targets.iter().filter(|target| **target != NONE).count()
    }

    /// Returns the batch with only the targets of one sequence.
    pub fn only(&self, sequence: usize) -> Self {
        let mut batch = self.clone();
        for (n, target) in batch.targets.iter_mut().enumerate() {
            if n / LENGTH != sequence {
                *target = NONE;
            }
        }
        batch
    }

    /// The letters of a sequence.
    pub fn text(&self, sequence: usize) -> String {
        let tokens = &self.tokens[sequence * LENGTH..][..LENGTH];
        tokens.iter().map(|token| char::from(b'a' + *token as u8)).collect()
    }
}

/// True if the letter after token `i` is predictable: token `i` is a repetition, and not the last.
pub fn is_known(i: usize, period: usize) -> bool {
    i >= period && i + 1 < LENGTH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_what_followed_the_last_time() {
        let batch = Batch::new(&mut Random::new(7, Series::Training as usize));
        let (mut known, mut lengths) = (0, std::collections::BTreeSet::new());
        for sequence in 0..BATCH {
            let tokens = &batch.tokens[sequence * LENGTH..][..LENGTH];
            let targets = &batch.targets[sequence * LENGTH..][..LENGTH];
            for (i, target) in targets.iter().enumerate() {
                let before = tokens[..i].iter().rposition(|token| *token == tokens[i]);
                let want = before.filter(|_| i + 1 < LENGTH).map_or(NONE, |before| tokens[before + 1]);
                assert_eq!(*target, want, "token {i} of {tokens:?}");
                if i + 1 < LENGTH && *target != NONE {
                    assert_eq!(*target, tokens[i + 1]);
                    known += 1;
                }
            }
            lengths.insert(batch.periods[sequence]);
        }
        assert_eq!(batch.known(), known);
        assert_eq!(lengths.len(), PERIODS.count());
    }
}
