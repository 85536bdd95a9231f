//! Regular sparse patterns: rules on the positions of query and key.

use crate::tensor::{Error, LONGEST_AXIS};

/// The part of a two-part sparse pattern that a query sees.
///
/// Source: Child et al. 2019, "Generating long sequences with sparse transformers", section 4.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PatternPart {
    /// The keys near the query.
    Near,
    /// The keys that carry information further.
    Far,
    /// Both parts ("merged").
    Both,
    /// Near for even heads, far for odd ones.
    ByHead,
}

/// A regular sparse pattern.
///
/// `d = j − position` is the distance of key `j` from the query's position. Positions count from
/// the first key of the query's sequence. Patterns do not distinguish past from future keys.
/// Combine autoregressive patterns with [`Mask::causal`](crate::Mask::causal).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pattern {
    /// Keys whose distance is a multiple of `dilation`. With `window` this is dilated sliding
    /// attention (Longformer).
    Dilated {
        /// At least 1.
        dilation: usize,
    },
    /// Near: `|d| ≤ stride`. Far: `d` is a multiple of `stride` (Child et al. 2019, "strided").
    Strided {
        /// At least 1.
        stride: usize,
        /// The part that queries see.
        part: PatternPart,
    },
    /// Near: the query's block of `stride` keys. Far: the last `summary` keys of every block of
    /// `stride` (Child et al. 2019, "fixed").
    Fixed {
        /// At least 1.
        stride: usize,
        /// Between 1 and `stride`.
        summary: usize,
        /// The part that queries see.
        part: PatternPart,
    },
    /// The query's block of `block` keys.
    Local {
        /// At least 1.
        block: usize,
    },
}

/// A pattern in numbers: all patterns are one rule with other parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PatternParams {
    /// The largest distance of near keys. `None`: near keys lie in the query's block.
    pub reach: Option<usize>,
    pub stride: usize,
    /// The number of far keys at the end of every block. `None`: the distance decides.
    pub summary: Option<usize>,
    pub part: PatternPart,
}

impl Pattern {
    pub(crate) fn params(self) -> PatternParams {
        match self {
            Pattern::Dilated { dilation } => {
                PatternParams { reach: Some(0), stride: dilation, summary: None, part: PatternPart::Far }
            }
            Pattern::Strided { stride, part } => {
                PatternParams { reach: Some(stride), stride, summary: None, part }
            }
            Pattern::Fixed { stride, summary, part } => {
                PatternParams { reach: None, stride, summary: Some(summary), part }
            }
            Pattern::Local { block } => {
                PatternParams { reach: None, stride: block, summary: Some(1), part: PatternPart::Near }
            }
        }
    }

    pub(crate) fn check(self) -> Result<(), Error> {
        let (option, size) = match self {
            Pattern::Dilated { dilation } => ("pattern dilation", dilation),
            Pattern::Strided { stride, .. } | Pattern::Fixed { stride, .. } => ("pattern stride", stride),
            Pattern::Local { block } => ("pattern block", block),
        };
        // Kernels count positions in signed 32 bits.
        if !(1..=LONGEST_AXIS).contains(&size) {
            return Err(Error::Option { option, value: size as f64, expected: "at least 1 and below 2^29" });
        }
        match self {
            Pattern::Fixed { stride, summary, .. } if !(1..=stride).contains(&summary) => {
                let expected = "at least 1 and at most the stride";
                Err(Error::Option { option: "pattern summary", value: summary as f64, expected })
            }
            _ => Ok(()),
        }
    }

    /// Returns the largest distance of a query's keys, or `None` if far keys may lie anywhere. The
    /// shader's function is `pattern_key_range` in `mask/pattern.wgsl`.
    pub(crate) fn reach(self) -> Option<usize> {
        let PatternParams { reach, stride, part, .. } = self.params();
        // With `ByHead`, odd heads see far keys.
        (part == PatternPart::Near).then(|| reach.unwrap_or(stride.saturating_sub(1)))
    }

    /// True if a query at `position` sees the key at `key` in head `h`. Both count from the
    /// sequence's start.
    pub(crate) fn mask_mod(self, position: i64, key: i64, h: usize) -> bool {
        let PatternParams { reach, stride, summary, part } = self.params();
        let (stride, distance) = (stride as i64, key - position);
        let near = match reach {
            Some(reach) => distance.abs() <= reach as i64,
            None => key.div_euclid(stride) == position.div_euclid(stride),
        };
        let far = match summary {
            Some(n) => key.rem_euclid(stride) >= stride - n as i64,
            None => distance.rem_euclid(stride) == 0,
        };
        match part {
            PatternPart::Near => near,
            PatternPart::Far => far,
            PatternPart::Both => near || far,
            PatternPart::ByHead => {
                if h.is_multiple_of(2) {
                    near
                } else {
                    far
                }
            }
        }
    }
}
