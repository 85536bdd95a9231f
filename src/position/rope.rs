//! Rotary position embedding as numbers: the channels of each pair, and the speed of its rotation.

use std::f64::consts::TAU;

use super::kernels::rotation_table::ORDER_HALF;
use crate::tensor::Error;

/// The most channels that carry positions.
pub(super) const MOST_CHANNELS: usize = 1 << 16;

/// The two channels of a pair that a rotation turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RopeOrder {
    /// Channel `n` and channel `n + rotary_dim / 2` (GPT-NeoX, Llama as `transformers` stores it).
    #[default]
    Half,
    /// Channels `2n` and `2n + 1` (RoFormer, GPT-J).
    Interleaved,
}

// Kernels take the order as a number.
const _: () = assert!(RopeOrder::Half as u32 == ORDER_HALF);

impl RopeOrder {
    /// Returns the channels of pair `n` of `pairs`.
    pub(crate) fn channels(self, n: usize, pairs: usize) -> [usize; 2] {
        match self {
            RopeOrder::Half => [n, n + pairs],
            RopeOrder::Interleaved => [2 * n, 2 * n + 1],
        }
    }
}

/// The axis of each pair's position: time, height or width (Wang et al. 2024, "Qwen2-VL").
///
/// The three numbers are the pairs of time, height and width. Their sum is `rotary_dim / 2`. In
/// configurations of `transformers` they are `mrope_section`.
///
/// [`RowPositions::Tensor`](super::RowPositions::Tensor) describes positions on three axes. Rows of
/// text have equal positions on all axes. For these rows sections change nothing.
#[doc(alias = "mrope_section")]
#[doc(alias = "M-RoPE")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RopeSections {
    /// First the pairs of time, then of height, then of width (Qwen2-VL, Qwen2.5-VL).
    Contiguous([usize; 3]),
    /// Every third pair, from pair 1 on, is of height, until height has its number of pairs. Width
    /// likewise begins at pair 2. All other pairs are of time (Qwen3-VL).
    Interleaved([usize; 3]),
}

impl RopeSections {
    /// The number of axes.
    pub(crate) const AXES: usize = 3;

    fn pairs(self) -> [usize; 3] {
        match self {
            RopeSections::Contiguous(pairs) | RopeSections::Interleaved(pairs) => pairs,
        }
    }

    /// Returns the axis of the position of pair `n`: time, height or width.
    pub(crate) fn axis(self, n: usize) -> usize {
        match self {
            RopeSections::Contiguous([time, height, _]) => {
                usize::from(n >= time) + usize::from(n >= time + height)
            }
            RopeSections::Interleaved(pairs) => {
                let axis = n % 3;
                if n / 3 < pairs[axis] { axis } else { 0 }
            }
        }
    }

    /// Returns the bounds of the pairs of height and of width. They are the first pairs of
    /// contiguous sections, and the ends of interleaved sections. Call it after `check`.
    pub(crate) fn bounds(self) -> [usize; 2] {
        match self {
            RopeSections::Contiguous([time, height, _]) => [time, time + height],
            RopeSections::Interleaved([_, height, width]) => [3 * height, 3 * width],
        }
    }

    /// Checks that every pair is in one section.
    fn check(self, pairs: usize) -> Result<(), Error> {
        let sections = self.pairs();
        let sum = sections.into_iter().fold(0, usize::saturating_add);
        let option = "the sum of the rope's sections";
        require(option, sum as f64, sum == pairs, "`rotary_dim / 2`, the number of pairs")?;
        let RopeSections::Interleaved([_, height, width]) = self else { return Ok(()) };
        // The sum is small, so no product overflows.
        let expected = "at most a third of the pairs, because every third pair is of height";
        require("the interleaved section of height", height as f64, 3 * height <= pairs + 1, expected)?;
        let expected = "at most a third of the pairs, because every third pair is of width";
        require("the interleaved section of width", width as f64, 3 * width <= pairs, expected)
    }
}

/// The change of a model's frequencies for sequences longer than it was trained with. `factor` is
/// the ratio of the lengths, at least 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// No change.
    #[default]
    None,
    /// Divides every frequency by `factor` (position interpolation). Source: Chen et al. 2023,
    /// "Extending context window of large language models via positional interpolation".
    Linear {
        /// The ratio of the lengths.
        factor: f64,
    },
    /// Changes the base to `base · factor^(d / (d − 2))`, `d = rotary_dim`. This interpolates the
    /// slowest pair, and the fastest stays (bloc97 2023, "NTK-aware scaled RoPE").
    NtkAware {
        /// The ratio of the lengths.
        factor: f64,
    },
    /// Interpolates slow pairs (Peng et al. 2023, "YaRN").
    ///
    /// - Pairs with `beta_fast` turns or more within `original_len` stay.
    /// - Pairs with `beta_slow` turns or fewer are interpolated.
    /// - Pairs between are interpolated in proportion to their number.
    ///
    /// The range of pairs between is rounded outwards to whole pairs. The first pair always stays.
    Yarn {
        /// The ratio of the lengths.
        factor: f64,
        /// The number of positions that the model was trained with.
        original_len: usize,
        /// The number of turns from which a pair stays; 32 in the paper.
        beta_fast: f64,
        /// The number of turns up to which a pair is interpolated; 1 in the paper.
        beta_slow: f64,
        /// The factor of cos and sin; `None` is `0.1 · ln(factor) + 1`.
        attention_factor: Option<f64>,
    },
    /// Interpolates slow pairs, as in Llama 3.1.
    ///
    /// - Pairs with `high_freq_factor` turns or more within `original_len` stay.
    /// - Pairs with `low_freq_factor` turns or fewer are interpolated.
    /// - Pairs between are interpolated in proportion to their turns.
    Llama3 {
        /// The ratio of the lengths; 8 in Llama 3.1.
        factor: f64,
        /// The number of turns up to which a pair is interpolated; 1 in Llama 3.1.
        low_freq_factor: f64,
        /// The number of turns from which a pair stays; 4 in Llama 3.1.
        high_freq_factor: f64,
        /// The number of positions that the model was trained with; 8192 in Llama 3.1.
        original_len: usize,
    },
}

/// A rotary position embedding (Su et al. 2021, "RoFormer").
///
/// It turns pair `n` of a row at position `p` by the angle `p · frequency[n]`. Without scaling,
/// `frequency[n] = base^(−2n / rotary_dim)`. So scores depend only on distances.
///
/// ```
/// use wgpu_attention::position::RopeConfig;
/// let rope = RopeConfig::new(4).base(100.0);
/// assert_eq!(rope.frequencies(), [1.0, 0.1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct RopeConfig {
    pub(crate) rotary_dim: usize,
    pub(crate) base: f64,
    pub(crate) order: RopeOrder,
    pub(crate) scaling: RopeScaling,
    pub(crate) sections: Option<RopeSections>,
}

impl RopeConfig {
    /// Makes a configuration that turns the first `rotary_dim` channels of a head. The base is
    /// 10000, the order [`RopeOrder::Half`], without scaling and sections.
    pub fn new(rotary_dim: usize) -> Self {
        let (order, scaling) = (RopeOrder::default(), RopeScaling::None);
        RopeConfig { rotary_dim, base: 10000.0, order, scaling, sections: None }
    }

    /// Sets the base of the frequencies, `rope_theta` in many models' configurations.
    pub fn base(mut self, base: f64) -> Self {
        self.base = base;
        self
    }

    /// Sets the two channels of a pair.
    pub fn order(mut self, order: RopeOrder) -> Self {
        self.order = order;
        self
    }

    /// Sets the scaling, for sequences longer than the model was trained with.
    pub fn scaling(mut self, scaling: RopeScaling) -> Self {
        self.scaling = scaling;
        self
    }

    /// Sets the axis of each pair's position, for positions in time, height and width (M-RoPE). It
    /// combines with every order and scaling.
    ///
    /// ```
    /// use wgpu_attention::position::{RopeConfig, RopeSections};
    /// let qwen2_vl = RopeConfig::new(128).base(1e6).sections(RopeSections::Contiguous([16, 24, 24]));
    /// let qwen3_vl = RopeConfig::new(128).base(5e6).sections(RopeSections::Interleaved([24, 20, 20]));
    /// assert!(qwen2_vl.check().is_ok() && qwen3_vl.check().is_ok());
    /// ```
    pub fn sections(mut self, sections: RopeSections) -> Self {
        self.sections = Some(sections);
        self
    }

    /// Returns the number of axes that a tensor of positions may have.
    pub(crate) fn axes(&self) -> usize {
        self.sections.map_or(1, |_| RopeSections::AXES)
    }

    /// Returns the radians that each pair turns per position, after scaling. They are
    /// `rotary_dim / 2` numbers, none above 1. The result is empty if [`check`](Self::check)
    /// returns an error.
    pub fn frequencies(&self) -> Vec<f64> {
        if self.check().is_err() {
            return Vec::new();
        }
        let dim = self.rotary_dim as f64;
        let base = match self.scaling {
            RopeScaling::NtkAware { factor } => self.base * factor.powf(dim / (dim - 2.0)),
            _ => self.base,
        };
        let pairs = 0..self.rotary_dim / 2;
        pairs.map(|n| self.scaled(n as f64, base.powf(-2.0 * n as f64 / dim))).collect()
    }

    /// Returns the scaled frequency of pair `n`, from its frequency with a base.
    fn scaled(&self, n: f64, frequency: f64) -> f64 {
        // The share of the frequency that stays.
        let (factor, kept) = match self.scaling {
            RopeScaling::None | RopeScaling::NtkAware { .. } => return frequency,
            RopeScaling::Linear { factor } => (factor, 0.0),
            RopeScaling::Yarn { factor, original_len, beta_fast, beta_slow, .. } => {
                let dim = self.rotary_dim as f64;
                // The pair, as a real number, with this number of turns within the original length.
                let pair =
                    |turns: f64| dim * (original_len as f64 / (turns * TAU)).ln() / (2.0 * self.base.ln());
                let low = pair(beta_fast).floor().max(0.0);
                let high = pair(beta_slow).ceil().min(dim - 1.0).max(low);
                // An empty range is a step.
                let width = if high == low { 0.001 } else { high - low };
                (factor, 1.0 - ((n - low) / width).clamp(0.0, 1.0))
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
                let turns = original_len as f64 * frequency / TAU;
                let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (factor, kept.clamp(0.0, 1.0))
            }
        };
        frequency / factor * (1.0 - kept) + frequency * kept
    }

    /// Returns the factor of cos and sin: 1, except with [`RopeScaling::Yarn`].
    pub fn amplitude(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor: Some(amplitude), .. } => amplitude,
            RopeScaling::Yarn { factor, .. } => 0.1 * factor.ln() + 1.0,
            _ => 1.0,
        }
    }

    /// Checks that the numbers make a rotation.
    ///
    /// # Errors
    /// - [`Error::ZeroSize`]
    /// - [`Error::NotDivisible`] for an odd `rotary_dim`
    /// - [`Error::Option`] for a number out of range
    /// - [`Error::Option`] for sections whose sum is not `rotary_dim / 2`, or whose interleaved
    ///   height or width has more than every third pair
    pub fn check(&self) -> Result<(), Error> {
        check_channels("rotary_dim", self.rotary_dim)?;
        if !self.rotary_dim.is_multiple_of(2) {
            let (what, by) = ("rotary_dim", "the channels of a pair");
            return Err(Error::NotDivisible { what, value: self.rotary_dim, by, divisor: 2 });
        }
        check_base("rope base", self.base)?;
        self.sections.map_or(Ok(()), |sections| sections.check(self.rotary_dim / 2))?;
        match self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } | RopeScaling::NtkAware { factor } => check_factor(factor)?,
            RopeScaling::Yarn { factor, original_len, beta_fast, beta_slow, .. } => {
                check_factor(factor)?;
                check_range(["beta_slow", "beta_fast"], [beta_slow, beta_fast], original_len)?;
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
                check_factor(factor)?;
                let names = ["low_freq_factor", "high_freq_factor"];
                check_range(names, [low_freq_factor, high_freq_factor], original_len)?;
            }
        }
        let amplitude = self.amplitude();
        let expected = "above 0 and a normal f32";
        require("attention_factor", amplitude, amplitude > 0.0 && (amplitude as f32).is_normal(), expected)
    }
}

fn require(option: &'static str, value: f64, fits: bool, expected: &'static str) -> Result<(), Error> {
    if value.is_finite() && fits { Ok(()) } else { Err(Error::Option { option, value, expected }) }
}

/// Checks the factor. A factor below 1 would make frequencies above 1.
fn check_factor(factor: f64) -> Result<(), Error> {
    require("factor", factor, factor >= 1.0, "finite and at least 1")
}

/// Checks the numbers of turns between which a pair is interpolated in part.
fn check_range(names: [&'static str; 2], [low, high]: [f64; 2], original_len: usize) -> Result<(), Error> {
    require("original_len", original_len as f64, original_len > 0, "at least 1")?;
    require(names[0], low, low > 0.0, "finite and above 0")?;
    require(names[1], high, high > low, "finite and above the lower bound")
}

/// Checks that a table of this width is possible.
pub(crate) fn check_channels(option: &'static str, channels: usize) -> Result<(), Error> {
    if channels == 0 {
        return Err(Error::ZeroSize { tensor: "positions", axis: option });
    }
    if channels > MOST_CHANNELS {
        return Err(Error::Option { option, value: channels as f64, expected: "at most 65536" });
    }
    Ok(())
}

/// Checks the base. Other bases make frequencies above 1, whose angles are less exact, or no
/// frequencies.
pub(crate) fn check_base(option: &'static str, base: f64) -> Result<(), Error> {
    require(option, base, base > 1.0, "finite and above 1")
}

/// Returns the frequencies of the sinusoidal encoding: `base^(−2n / dim)` for channels `2n` and
/// `2n + 1`.
pub(crate) fn sinusoid_frequencies(dim: usize, base: f64) -> impl Iterator<Item = f64> {
    (0..dim.div_ceil(2)).map(move |n| base.powf(-2.0 * n as f64 / dim as f64))
}
