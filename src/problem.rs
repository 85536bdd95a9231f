//! The dimensions of one attention call, unified from its tensors and checked once.

use crate::error::Error;
use crate::tensor::{DType, LONGEST_AXIS, TensorView, check_sizes, expect};

/// The seven dimensions of attention.
///
/// Queries are `[batch, heads, q_len, head_dim]`, keys `[batch, kv_heads, kv_len, head_dim]`,
/// values `[batch, kv_heads, kv_len, value_dim]`, the output `[batch, heads, q_len, value_dim]`.
/// Query head `h` uses key/value head `h / (heads / kv_heads)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Independent sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; a divisor of `heads` (grouped-query attention; 1 is multi-query).
    pub kv_heads: usize,
    /// Queries per sequence.
    pub q_len: usize,
    /// Keys per sequence.
    pub kv_len: usize,
    /// Channels of queries and keys.
    pub head_dim: usize,
    /// Channels of values and of the output.
    pub value_dim: usize,
}

impl Shape {
    /// Self-attention: one length, one head count, one width.
    pub const fn new(batch: usize, heads: usize, length: usize, head_dim: usize) -> Self {
        Shape { batch, heads, kv_heads: heads, q_len: length, kv_len: length, head_dim, value_dim: head_dim }
    }

    /// Query heads per key/value head.
    pub const fn group(&self) -> usize {
        self.heads / if self.kv_heads == 0 { 1 } else { self.kv_heads }
    }

    /// `[batch, heads, q_len, head_dim]`.
    pub const fn q(&self) -> [usize; 4] {
        [self.batch, self.heads, self.q_len, self.head_dim]
    }

    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub const fn k(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.kv_len, self.head_dim]
    }

    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub const fn v(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.kv_len, self.value_dim]
    }

    /// `[batch, heads, q_len, value_dim]`.
    pub const fn out(&self) -> [usize; 4] {
        [self.batch, self.heads, self.q_len, self.value_dim]
    }

    /// `[batch, heads, q_len, kv_len]`: attention weights, and what masks broadcast to.
    pub const fn weights(&self) -> [usize; 4] {
        [self.batch, self.heads, self.q_len, self.kv_len]
    }

    /// `[batch, heads, q_len, 1]`: the log-sum-exp of every query's scores.
    pub const fn lse(&self) -> [usize; 4] {
        [self.batch, self.heads, self.q_len, 1]
    }

    /// Multiplications and additions of `q kᵀ` and `weights · v`, unmasked.
    pub fn flops(&self) -> f64 {
        let pairs = self.weights().into_iter().map(|n| n as f64).product::<f64>();
        2.0 * pairs * (self.head_dim as f64 + self.value_dim as f64)
    }

    /// Refuses zero dimensions and head counts that do not divide.
    ///
    /// # Errors
    /// [`Error::ZeroSize`], [`Error::NotDivisible`].
    pub fn check(&self) -> Result<(), Error> {
        let sizes = [
            ("batch", self.batch),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("q_len", self.q_len),
            ("kv_len", self.kv_len),
            ("head_dim", self.head_dim),
            ("value_dim", self.value_dim),
        ];
        check_sizes("shape", &sizes)?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::NotDivisible {
                what: "heads",
                value: self.heads,
                by: "kv_heads",
                divisor: self.kv_heads,
            });
        }
        Ok(())
    }

    /// Refuses pairs that no tensor could have, where none need bound them.
    pub(crate) fn check_lengths(&self) -> Result<(), Error> {
        let lengths =
            [("batch", self.batch), ("heads", self.heads), ("q_len", self.q_len), ("kv_len", self.kv_len)];
        match lengths.into_iter().find(|(_, n)| *n > LONGEST_AXIS) {
            Some((option, n)) => Err(Error::Option { option, value: n as f64, expected: "below 2^29" }),
            None => Ok(()),
        }
    }

    /// The dimensions that `q`, `k`, `v` and `out` agree on.
    pub(crate) fn of(
        q: &TensorView,
        k: &TensorView,
        v: &TensorView,
        out: &TensorView,
    ) -> Result<Self, Error> {
        let [batch, heads, q_len, head_dim] = q.shape();
        let [_, kv_heads, kv_len, _] = k.shape();
        let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim: v.shape()[3] };
        shape.check()?;
        let tensors = [("k", k, shape.k()), ("v", v, shape.v()), ("out", out, shape.out())];
        for (name, tensor, wanted) in tensors {
            (0..4).try_for_each(|axis| expect(name, tensor.shape(), axis, wanted[axis]))?;
        }
        Ok(shape)
    }
}

/// How far scores have come on their way to the softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScoreStage {
    /// `scale · q·k`, of every pair. Mode 0 of `qk_matmul_output_mode` in ONNX's Attention, whose mode 3 are the weights.
    Scaled,
    /// After the softcap, of every pair. As before where there is none.
    Softcapped,
    /// What goes into the softmax: after softcap, bias and mask, −∞ where a query does not see the key.
    Biased,
}

/// Refuses numbers that no score survives.
pub(crate) fn check_options(scale: Option<f64>, softcap: Option<f64>) -> Result<(), Error> {
    if let Some(value) = scale.filter(|s| !s.is_finite()) {
        return Err(Error::Option { option: "scale", value, expected: "finite" });
    }
    if let Some(value) = softcap.filter(|c| !(c.is_finite() && *c >= f64::from(f32::MIN_POSITIVE))) {
        let expected = "finite and above 0, no smaller than a normal f32";
        return Err(Error::Option { option: "softcap", value, expected });
    }
    Ok(())
}

/// The dimensions and fixed options of a multi-head attention layer.
///
/// `nn.MultiheadAttention(embed_dim, heads)` is `LayerConfig::new(embed_dim, heads)`; its `kdim` and
/// `vdim` are `key_features` and `value_features`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerConfig {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; a divisor of `heads`.
    pub kv_heads: usize,
    /// Channels of one head's queries and keys.
    pub head_dim: usize,
    /// Channels of one head's values.
    pub value_dim: usize,
    /// Width of the queries' input.
    pub query_features: usize,
    /// Width of the keys' input.
    pub key_features: usize,
    /// Width of the values' input.
    pub value_features: usize,
    /// Width of the output.
    pub out_features: usize,
    /// Each head sees only its own slice of the inputs instead of all of them (the narrow form of Bloem,
    /// "Transformers from scratch", 2019): head `h` of `n` reads features `h · width / n ..`, and its weights
    /// are `[head_dim, width / n]`.
    pub narrow: bool,
    /// Appends one key and one value of zeros, seen by every query (`add_zero_attn`).
    pub zero_attention: bool,
    /// Factor of `q·k`; `None` is `1 / √head_dim`.
    pub scale: Option<f32>,
    /// Bound on the scores: `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// Element type of inputs, weights, intermediate and output tensors.
    pub dtype: DType,
}

impl LayerConfig {
    /// A layer whose inputs and output are `embed_dim` wide, split evenly into `heads`. Where that is not
    /// possible, [`check`](Self::check) refuses it unless `head_dim` and `value_dim` are set.
    pub fn new(embed_dim: usize, heads: usize) -> Self {
        let divides = heads > 0 && embed_dim.is_multiple_of(heads);
        let head_dim = if divides { embed_dim / heads } else { 0 };
        LayerConfig {
            heads,
            kv_heads: heads,
            head_dim,
            value_dim: head_dim,
            query_features: embed_dim,
            key_features: embed_dim,
            value_features: embed_dim,
            out_features: embed_dim,
            narrow: false,
            zero_attention: false,
            scale: None,
            softcap: None,
            dtype: DType::F32,
        }
    }

    /// The attention problem inside the layer; `appended` keys come after the `kv_len` given.
    pub fn shape(&self, batch: usize, q_len: usize, kv_len: usize, appended: usize) -> Shape {
        Shape {
            batch,
            heads: self.heads,
            kv_heads: self.kv_heads,
            q_len,
            kv_len: kv_len.saturating_add(appended),
            head_dim: self.head_dim,
            value_dim: self.value_dim,
        }
    }

    /// How the queries, keys or values of this layer are projected.
    pub(crate) fn side(&self, side: Side) -> SideShape {
        let (heads, dim, features) = match side {
            Side::Query => (self.heads, self.head_dim, self.query_features),
            Side::Key => (self.kv_heads, self.head_dim, self.key_features),
            Side::Value => (self.kv_heads, self.value_dim, self.value_features),
        };
        SideShape { heads, dim, features, narrow: self.narrow }
    }

    /// Refuses zero dimensions, widths that heads do not divide, and widths that no index reaches.
    ///
    /// # Errors
    /// [`Error::ZeroSize`], [`Error::NotDivisible`], [`Error::Option`].
    pub fn check(&self) -> Result<(), Error> {
        let sizes = [
            ("heads", self.heads),
            ("query_features", self.query_features),
            ("key_features", self.key_features),
            ("value_features", self.value_features),
            ("out_features", self.out_features),
        ];
        check_sizes("layer", &sizes)?;
        if self.head_dim == 0 && !self.query_features.is_multiple_of(self.heads) {
            let (value, divisor) = (self.query_features, self.heads);
            return Err(Error::NotDivisible { what: "embed_dim", value, by: "heads", divisor });
        }
        self.shape(1, 1, 1, 0).check()?;
        let widths = [
            ("heads · head_dim", self.heads, self.head_dim),
            ("heads · value_dim", self.heads, self.value_dim),
            ("query_features", self.query_features, 1),
            ("key_features", self.key_features, 1),
            ("value_features", self.value_features, 1),
            ("out_features", self.out_features, 1),
        ];
        for (option, heads, dim) in widths {
            if heads.checked_mul(dim).is_none_or(|n| n as u64 > u64::from(u32::MAX)) {
                let value = heads as f64 * dim as f64;
                return Err(Error::Option { option, value, expected: "below 2^32" });
            }
        }
        for (side, what) in
            [(Side::Query, "query_features"), (Side::Key, "key_features"), (Side::Value, "value_features")]
        {
            self.side(side).check(what)?;
        }
        Ok(())
    }
}

/// The three inputs of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Query,
    Key,
    Value,
}

/// One side's projection: `features → heads × dim`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SideShape {
    pub heads: usize,
    pub dim: usize,
    pub features: usize,
    pub narrow: bool,
}

impl SideShape {
    /// Features that one head reads.
    pub fn read(&self) -> usize {
        if self.narrow { self.features / self.heads } else { self.features }
    }

    /// Refuses widths that the heads of a narrow projection do not divide.
    pub fn check(&self, what: &'static str) -> Result<(), Error> {
        if self.narrow && !self.features.is_multiple_of(self.heads) {
            let SideShape { heads: divisor, features: value, .. } = *self;
            return Err(Error::NotDivisible { what, value, by: "heads", divisor });
        }
        Ok(())
    }

    /// `[1, heads, dim, read]` if narrow, `[1, 1, heads · dim, features]` otherwise.
    pub fn weight(&self) -> [usize; 4] {
        if self.narrow {
            [1, self.heads, self.dim, self.read()]
        } else {
            [1, 1, self.heads.saturating_mul(self.dim), self.features]
        }
    }
}
