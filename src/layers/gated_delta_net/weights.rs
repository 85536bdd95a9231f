//! The weights of a gated DeltaNet layer, and their order in checkpoints.

use super::GatedDeltaNetConfig;
use crate::tensor::{Error, expect_length};

/// The weights of a gated DeltaNet layer, or their gradients. `T` is a tensor on the device, or
/// numbers on the host.
///
/// Rows of the projections are in the layer's order, not in that of a checkpoint.
/// [`from_checkpoint`](Self::from_checkpoint) changes the order, and
/// [`to_checkpoint`](Self::to_checkpoint) changes it back.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GatedDeltaNetWeights<T> {
    /// `[2 · keys + 2 · values, features]`: rows for all queries, all keys, all values, all gates.
    /// `keys` is `heads · head_dim`, `values` is `value_heads · value_dim`.
    pub in_proj_qkvz: T,
    /// `[2 · value_heads, features]`: rows for b, from which β comes, then a, for the decay.
    pub in_proj_ba: T,
    /// `[2 · keys + values, conv_width]`. The last column meets the current row.
    pub conv1d: T,
    /// `[value_heads]`: the natural logarithm of the factor of the decay.
    pub a_log: T,
    /// `[value_heads]`.
    pub dt_bias: T,
    /// `[value_dim]`: the factor of the gated norm.
    pub norm: T,
    /// `[features, values]`.
    pub out_proj: T,
}

/// The names of [`GatedDeltaNetWeights`] in errors, in their order.
pub(super) const NAMES: [&str; 7] = [
    "in_proj_qkvz.weight",
    "in_proj_ba.weight",
    "conv1d.weight",
    "A_log",
    "dt_bias",
    "norm.weight",
    "out_proj.weight",
];

impl<T> GatedDeltaNetWeights<T> {
    /// Applies `f` to each tensor, in the order of the fields.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> GatedDeltaNetWeights<U> {
        GatedDeltaNetWeights {
            in_proj_qkvz: f(self.in_proj_qkvz),
            in_proj_ba: f(self.in_proj_ba),
            conv1d: f(self.conv1d),
            a_log: f(self.a_log),
            dt_bias: f(self.dt_bias),
            norm: f(self.norm),
            out_proj: f(self.out_proj),
        }
    }

    /// Applies `f` to each tensor, in the order of the fields, until it fails.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn try_map<U, E>(self, mut f: impl FnMut(T) -> Result<U, E>) -> Result<GatedDeltaNetWeights<U>, E> {
        Ok(GatedDeltaNetWeights {
            in_proj_qkvz: f(self.in_proj_qkvz)?,
            in_proj_ba: f(self.in_proj_ba)?,
            conv1d: f(self.conv1d)?,
            a_log: f(self.a_log)?,
            dt_bias: f(self.dt_bias)?,
            norm: f(self.norm)?,
            out_proj: f(self.out_proj)?,
        })
    }

    /// Pairs the tensors with those of `other`.
    pub fn zip<U>(self, other: GatedDeltaNetWeights<U>) -> GatedDeltaNetWeights<(T, U)> {
        GatedDeltaNetWeights {
            in_proj_qkvz: (self.in_proj_qkvz, other.in_proj_qkvz),
            in_proj_ba: (self.in_proj_ba, other.in_proj_ba),
            conv1d: (self.conv1d, other.conv1d),
            a_log: (self.a_log, other.a_log),
            dt_bias: (self.dt_bias, other.dt_bias),
            norm: (self.norm, other.norm),
            out_proj: (self.out_proj, other.out_proj),
        }
    }

    /// References to the tensors.
    pub fn as_ref(&self) -> GatedDeltaNetWeights<&T> {
        GatedDeltaNetWeights {
            in_proj_qkvz: &self.in_proj_qkvz,
            in_proj_ba: &self.in_proj_ba,
            conv1d: &self.conv1d,
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
            norm: &self.norm,
            out_proj: &self.out_proj,
        }
    }

    /// The tensors with the names of a checkpoint, in the order of the fields.
    pub fn named(self) -> [(&'static str, T); 7] {
        let GatedDeltaNetWeights { in_proj_qkvz, in_proj_ba, conv1d, a_log, dt_bias, norm, out_proj } = self;
        let [qkvz, ba, conv, log, bias, of_norm, out] = NAMES;
        [
            (qkvz, in_proj_qkvz),
            (ba, in_proj_ba),
            (conv, conv1d),
            (log, a_log),
            (bias, dt_bias),
            (of_norm, norm),
            (out, out_proj),
        ]
    }
}

impl GatedDeltaNetConfig {
    /// The shapes of the weights, as views: matrices `[1, 1, rows, columns]`, vectors `[1, 1, 1,
    /// n]`.
    pub fn weight_shapes(&self) -> GatedDeltaNetWeights<[usize; 4]> {
        let matrix = |rows, columns| [1, 1, rows, columns];
        GatedDeltaNetWeights {
            in_proj_qkvz: matrix(self.projected(), self.features),
            in_proj_ba: matrix(self.value_heads.saturating_mul(2), self.features),
            conv1d: matrix(self.mixed(), self.conv_width),
            a_log: matrix(1, self.value_heads),
            dt_bias: matrix(1, self.value_heads),
            norm: matrix(1, self.value_dim),
            out_proj: matrix(self.features, self.values()),
        }
    }

    /// The rows of one key head in a checkpoint's `in_proj_qkvz`. For each part: its first row in
    /// the layer's order, and the number of rows.
    fn parts_of_head(&self, head: usize) -> [[usize; 2]; 4] {
        let values = self.value_heads / self.heads * self.value_dim;
        let (keys, first) = (self.keys(), 2 * self.keys());
        [
            [head * self.head_dim, self.head_dim],
            [keys + head * self.head_dim, self.head_dim],
            [first + head * values, values],
            [first + self.values() + head * values, values],
        ]
    }

    /// For each row of a checkpoint's `in_proj_qkvz`, the row in the layer's order.
    fn qkvz_rows(&self) -> impl Iterator<Item = usize> {
        let parts = (0..self.heads).flat_map(|head| self.parts_of_head(head));
        parts.flat_map(|[first, count]| first..first + count)
    }

    /// For each row of a checkpoint's `in_proj_ba`, the row in the layer's order.
    fn ba_rows(&self) -> impl Iterator<Item = usize> {
        let group = self.value_heads / self.heads;
        let value_heads = self.value_heads;
        (0..2 * value_heads).map(move |row| {
            let (head, within) = (row / (2 * group), row % (2 * group));
            within / group * value_heads + head * group + within % group
        })
    }
}

impl<T: Copy + Default> GatedDeltaNetWeights<Vec<T>> {
    /// Takes the weights from a checkpoint of Qwen3-Next or Qwen3.5. `tensor` returns the elements
    /// of a tensor of the layer, such as `in_proj_qkvz.weight` or `A_log`, if there is one. `T` is
    /// any type of numbers, or their bits.
    ///
    /// Qwen3-Next has `in_proj_qkvz.weight` and `in_proj_ba.weight`, with the rows of each key head
    /// together. Qwen3.5 has `in_proj_qkv.weight`, `in_proj_z.weight`, `in_proj_b.weight` and
    /// `in_proj_a.weight`, with the rows of each part together. A norm's weight is used as it is.
    ///
    /// # Errors
    /// A missing tensor, or one with a wrong number of elements.
    pub fn from_checkpoint(
        config: &GatedDeltaNetConfig,
        mut tensor: impl FnMut(&str) -> Option<Vec<T>>,
    ) -> Result<Self, Error> {
        config.check()?;
        let shapes = config.weight_shapes();
        let features = config.features;
        let mut get = |name: &'static str, shape: [usize; 4]| {
            let why = "the checkpoint has no such tensor; see `GatedDeltaNetWeights::from_checkpoint`";
            let values = tensor(name).ok_or(Error::Unsupported { what: name, why })?;
            expect_length(name, &values, shape.iter().copied().fold(1, usize::saturating_mul))?;
            Ok::<_, Error>(values)
        };
        let rows = |count: usize| [1, 1, count, features];
        let in_proj_qkvz = match get("in_proj_qkv.weight", rows(config.mixed())) {
            Ok(mut qkv) => {
                qkv.extend(get("in_proj_z.weight", rows(config.values()))?);
                qkv
            }
            Err(Error::Unsupported { .. }) => {
                let stored = get(NAMES[0], shapes.in_proj_qkvz)?;
                in_own_order(&stored, features, config.qkvz_rows())
            }
            Err(error) => return Err(error),
        };
        let in_proj_ba = match get("in_proj_b.weight", rows(config.value_heads)) {
            Ok(mut b) => {
                b.extend(get("in_proj_a.weight", rows(config.value_heads))?);
                b
            }
            Err(Error::Unsupported { .. }) => {
                in_own_order(&get(NAMES[1], shapes.in_proj_ba)?, features, config.ba_rows())
            }
            Err(error) => return Err(error),
        };
        Ok(GatedDeltaNetWeights {
            in_proj_qkvz,
            in_proj_ba,
            conv1d: get(NAMES[2], shapes.conv1d)?,
            a_log: get(NAMES[3], shapes.a_log)?,
            dt_bias: get(NAMES[4], shapes.dt_bias)?,
            norm: get(NAMES[5], shapes.norm)?,
            out_proj: get(NAMES[6], shapes.out_proj)?,
        })
    }

    /// Returns the weights, or their gradients, in the order of a checkpoint of Qwen3-Next. It has
    /// the rows of each key head of `in_proj_qkvz` and `in_proj_ba` together.
    /// [`named`](Self::named) adds the names.
    ///
    /// # Errors
    /// A tensor with a wrong number of elements.
    pub fn to_checkpoint(&self, config: &GatedDeltaNetConfig) -> Result<Self, Error> {
        self.check(config)?;
        let features = config.features;
        Ok(GatedDeltaNetWeights {
            in_proj_qkvz: in_order(&self.in_proj_qkvz, features, config.qkvz_rows()),
            in_proj_ba: in_order(&self.in_proj_ba, features, config.ba_rows()),
            ..self.clone()
        })
    }
}

impl<T> GatedDeltaNetWeights<Vec<T>> {
    /// Refuses tensors with a wrong number of elements.
    pub(super) fn check(&self, config: &GatedDeltaNetConfig) -> Result<(), Error> {
        config.check()?;
        let shapes = config.weight_shapes().named();
        self.as_ref().named().into_iter().zip(shapes).try_for_each(|((name, values), (_, shape))| {
            expect_length(name, values, shape.iter().copied().fold(1, usize::saturating_mul))
        })
    }
}

/// Moves row n of `stored` to the n-th of `rows`.
fn in_own_order<T: Copy + Default>(
    stored: &[T],
    features: usize,
    rows: impl Iterator<Item = usize>,
) -> Vec<T> {
    let mut own = vec![T::default(); stored.len()];
    for (from, to) in stored.chunks_exact(features).zip(rows) {
        own[to * features..][..features].copy_from_slice(from);
    }
    own
}

/// Moves the n-th of `rows` to row n.
fn in_order<T: Copy>(own: &[T], features: usize, rows: impl Iterator<Item = usize>) -> Vec<T> {
    rows.flat_map(|row| &own[row * features..][..features]).copied().collect()
}
