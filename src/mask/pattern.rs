//! Regular sparse patterns: rules by the positions of query and key alone.

use crate::tensor::{Error, LONGEST_AXIS};

/// Which half of a two-part sparse pattern a query sees (Child et al. 2019, "Generating long
/// sequences with sparse transformers", section 4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PatternPart {
    /// The keys near the query.
    Near,
    /// The keys that carry information further.
    Far,
    /// Either ("merged").
    Both,
    /// Near for even heads, far for odd ones.
    ByHead,
}

/// A regular sparse pattern. `d = j − position` is the distance of key `j` from the query's own
/// position; positions count from the first key of the query's sequence. Patterns do not look at
/// what is past or future: the autoregressive ones are meant with
/// [`Mask::causal`](crate::Mask::causal).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pattern {
    /// Keys whose distance is a multiple of `dilation`; with `window` this is dilated sliding
    /// attention (Longformer).
    Dilated {
        /// At least 1.
        dilation: usize,
    },
    /// Near: `|d| ≤ stride`. Far: `d` is a multiple of `stride` (Child et al. 2019, "strided").
    Strided {
        /// At least 1.
        stride: usize,
        /// Which of the two.
        part: PatternPart,
    },
    /// Near: the query's own block of `stride` keys. Far: the last `summary` keys of every block of
    /// `stride` (Child et al. 2019, "fixed").
    Fixed {
        /// At least 1.
        stride: usize,
        /// Between 1 and `stride`.
        summary: usize,
        /// Which of the two.
        part: PatternPart,
    },
    /// The query's own block of `block` keys.
    Local {
        /// At least 1.
        block: usize,
    },
}

/// A pattern in numbers: all of them are one rule with other parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PatternParams {
    /// Near keys lie within so many positions, or in the same block if `None`.
    pub reach: Option<usize>,
    pub stride: usize,
    /// Far keys by their own position instead of the distance: the last so many of every block.
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

    /// How far from a query its keys lie at most; `None` where far keys may lie anywhere. As
    /// `pattern_key_range` in `mask/pattern.wgsl`.
    pub(crate) fn reach(self) -> Option<usize> {
        let PatternParams { reach, stride, part, .. } = self.params();
        // By head, every other one sees far keys.
        (part == PatternPart::Near).then(|| reach.unwrap_or(stride.saturating_sub(1)))
    }

    /// Whether a query at `position` sees the key at `key`, both from the sequence's start, in head
    /// `h`.
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
