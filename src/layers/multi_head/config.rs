//! The configuration of a multi-head attention layer.

use crate::matmul::SideShape;
use crate::rows::norm::config::NormConfig;
use crate::tensor::{DType, Error, Shape, check_sizes};

/// The dimensions and fixed options of a multi-head attention layer.
///
/// `nn.MultiheadAttention(embed_dim, heads)` is `MultiHeadConfig::new(embed_dim, heads)`. Its
/// `kdim` and `vdim` are `key_features` and `value_features`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct MultiHeadConfig {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) query_features: usize,
    pub(crate) key_features: usize,
    pub(crate) value_features: usize,
    pub(crate) out_features: usize,
    pub(crate) narrow: bool,
    pub(crate) add_zero_attn: bool,
    pub(crate) qk_norm: Option<NormConfig>,
    pub(crate) output_gate: Option<OutputGate>,
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) dtype: DType,
}

/// Granularity of a layer's [output gate](MultiHeadConfig::output_gate) (Qiu et al. 2025, "Gated
/// attention for large language models", <https://arxiv.org/abs/2505.06708>, section 2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OutputGate {
    /// One gate for each channel of each head, as in Qwen3-Next: `heads · value_dim` gates per
    /// query.
    Elementwise,
    /// One gate for each head, which multiplies all channels of the head: `heads` gates per query.
    Headwise,
}

impl MultiHeadConfig {
    /// Makes a layer whose inputs and output are `embed_dim` wide, split evenly into `heads`.
    /// Defaults: f32, scale `1 / √head_dim`, as many key/value heads as heads. If `heads` does not
    /// divide `embed_dim`, set `head_dim` and `value_dim`.
    #[doc(alias = "num_heads")]
    pub fn new(embed_dim: usize, heads: usize) -> Self {
        let divides = heads > 0 && embed_dim.is_multiple_of(heads);
        let head_dim = if divides { embed_dim / heads } else { 0 };
        MultiHeadConfig {
            heads,
            kv_heads: heads,
            head_dim,
            value_dim: head_dim,
            query_features: embed_dim,
            key_features: embed_dim,
            value_features: embed_dim,
            out_features: embed_dim,
            narrow: false,
            add_zero_attn: false,
            qk_norm: None,
            output_gate: None,
            scale: None,
            softcap: None,
            dtype: DType::F32,
        }
    }

    /// Key/value heads, a divisor of `heads`: query head `h` uses `h / (heads / kv_heads)`.
    /// `nn.MultiheadAttention` has as many key/value heads as query heads.
    #[doc(alias = "enable_gqa")]
    pub fn kv_heads(mut self, kv_heads: usize) -> Self {
        self.kv_heads = kv_heads;
        self
    }

    /// Channels of one head's queries and keys. It does not change `value_dim`.
    pub fn head_dim(mut self, head_dim: usize) -> Self {
        self.head_dim = head_dim;
        self
    }

    /// Channels of one head's values.
    pub fn value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = value_dim;
        self
    }

    /// Width of the queries' input, `embed_dim` unless set.
    pub fn query_features(mut self, query_features: usize) -> Self {
        self.query_features = query_features;
        self
    }

    /// Width of the keys' input, `embed_dim` unless set.
    #[doc(alias = "kdim")]
    pub fn key_features(mut self, key_features: usize) -> Self {
        self.key_features = key_features;
        self
    }

    /// Width of the values' input, `embed_dim` unless set.
    #[doc(alias = "vdim")]
    pub fn value_features(mut self, value_features: usize) -> Self {
        self.value_features = value_features;
        self
    }

    /// Width of the output, `embed_dim` unless set.
    pub fn out_features(mut self, out_features: usize) -> Self {
        self.out_features = out_features;
        self
    }

    /// Sets whether each head reads only its slice of the inputs, instead of all features. This is
    /// the narrow variant of Bloem, "Transformers from scratch", 2019. Head `h` of `n` reads
    /// features `h · width / n ..`, and its weights are `[head_dim, width / n]`.
    pub fn narrow(mut self, narrow: bool) -> Self {
        self.narrow = narrow;
        self
    }

    /// Sets whether the layer appends one key and one value of zeros, which every query sees.
    pub fn add_zero_attn(mut self, add_zero_attn: bool) -> Self {
        self.add_zero_attn = add_zero_attn;
        self
    }

    /// Norm of each head's projected query and key, before rotation, as in Qwen3 and Gemma 3. The
    /// weights are [`MultiHeadWeights::qk_norm`](crate::layers::MultiHeadWeights::qk_norm). The
    /// norm does not change appended keys.
    pub fn qk_norm(mut self, qk_norm: impl Into<Option<NormConfig>>) -> Self {
        self.qk_norm = qk_norm.into();
        self
    }

    /// Gate of the heads' outputs, `None` by default. The output projection reads `attention ·
    /// sigmoid(x W_gᵀ + b_g)`, where `x` is the queries' input. Source: Qiu et al. 2025,
    /// <https://arxiv.org/abs/2505.06708>. `W_g` and `b_g` are
    /// [`MultiHeadWeights::gate`](crate::layers::MultiHeadWeights::gate). The logits and the
    /// product are stored in the layer's dtype. In a [narrow](Self::narrow) layer a head's gate
    /// reads that head's slice of `x`.
    ///
    /// A gate without weights is an [`Error::Unsupported`](crate::Error::Unsupported), and so are
    /// weights of a gate that the layer does not have.
    #[doc(alias = "attn_output_gate")]
    #[doc(alias = "gated attention")]
    pub fn output_gate(mut self, output_gate: impl Into<Option<OutputGate>>) -> Self {
        self.output_gate = output_gate.into();
        self
    }

    /// Factor of `q·k` instead of `1 / √head_dim`, rounded to f32.
    pub fn scale(mut self, scale: impl Into<Option<f64>>) -> Self {
        self.scale = scale.into();
        self
    }

    /// Bounds the scores: `softcap · tanh(score / softcap)`, rounded to f32.
    pub fn softcap(mut self, softcap: impl Into<Option<f64>>) -> Self {
        self.softcap = softcap.into();
        self
    }

    /// Element type of inputs, weights, intermediate and output tensors: F32, F16 or BF16. Sums are
    /// always f32.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// The shape of the attention inside the layer. The `appended` keys follow the `kv_len` keys of
    /// the input.
    pub(crate) fn shape(&self, batch: usize, q_len: usize, kv_len: usize, appended: usize) -> Shape {
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

    /// The shape of the projection of queries, keys or values.
    pub(crate) fn side(&self, side: Side) -> SideShape {
        let (heads, dim, features) = match side {
            Side::Query => (self.heads, self.head_dim, self.query_features),
            Side::Key => (self.kv_heads, self.head_dim, self.key_features),
            Side::Value => (self.kv_heads, self.value_dim, self.value_features),
        };
        SideShape { heads, dim, features, narrow: self.narrow }
    }

    /// The shape of the gate's projection, if the layer has a gate.
    pub(crate) fn gate_side(&self) -> Option<SideShape> {
        let dim = match self.output_gate? {
            OutputGate::Elementwise => self.value_dim,
            OutputGate::Headwise => 1,
        };
        Some(SideShape { dim, ..self.side(Side::Query) })
    }

    /// Refuses weights of a gate that the layer does not have, and a gate without weights.
    pub(crate) fn check_gate(&self, weights: bool) -> Result<(), Error> {
        let (what, why) = match (self.output_gate.is_some(), weights) {
            (true, false) => (
                "`MultiHeadConfig::output_gate` without weights",
                "the layer has a gate; set `gate` of the weights",
            ),
            (false, true) => (
                "`gate` of the weights without `output_gate`",
                "the layer has no gate; set `MultiHeadConfig::output_gate`",
            ),
            _ => return Ok(()),
        };
        Err(Error::Unsupported { what, why })
    }

    /// Refuses zero dimensions, widths that heads do not divide, and widths that exceed 32-bit
    /// indices.
    pub(crate) fn check(&self) -> Result<(), Error> {
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
        self.qk_norm.map_or(Ok(()), |norm| norm.check())?;
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
