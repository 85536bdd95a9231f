//! The configuration of a layer of an encoder or a decoder: attention, norms and their order,
//! activation.

use crate::layers::multi_head::config::MultiHeadConfig;
use crate::matmul::Activation;
use crate::rows::norm::config::NormConfig;
use crate::tensor::{Error, check_sizes};

/// The position of a layer's norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOrder {
    /// After each sum: `x = norm(x + f(x))` (Vaswani et al. 2017; `norm_first=False` of PyTorch).
    Post,
    /// Before each part: `x = x + f(norm(x))` (Xiong et al. 2020; `norm_first=True`).
    Pre,
}

/// The dimensions and fixed options of the layers of an encoder or a decoder.
///
/// `nn.TransformerEncoderLayer(d, heads, dim_feedforward)` is
/// `TransformerLayerConfig::new(MultiHeadConfig::new(d, heads), dim_feedforward)`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct TransformerLayerConfig {
    pub(crate) attention: MultiHeadConfig,
    pub(crate) hidden_features: usize,
    pub(crate) activation: Activation,
    pub(crate) gated: bool,
    pub(crate) order: NormOrder,
    pub(crate) norm: NormConfig,
    pub(crate) keys_of: Option<usize>,
}

impl TransformerLayerConfig {
    /// Makes a layer of `attention` and a feed-forward part with `hidden_features` between its
    /// products. The attention's inputs and output must have one width. Defaults: ReLU, LayerNorm
    /// after each sum.
    #[doc(alias = "dim_feedforward")]
    pub fn new(attention: MultiHeadConfig, hidden_features: usize) -> Self {
        TransformerLayerConfig {
            attention,
            hidden_features,
            activation: Activation::Relu,
            gated: false,
            order: NormOrder::Post,
            norm: NormConfig::layer(),
            keys_of: None,
        }
    }

    /// Activation between the products of the feed-forward part.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    /// Sets whether a second product of the same input multiplies the activation's output: SwiGLU
    /// with [`Activation::Silu`]. Source: Shazeer 2020, "GLU variants improve transformer".
    pub fn gated(mut self, gated: bool) -> Self {
        self.gated = gated;
        self
    }

    /// Position of the norms.
    #[doc(alias = "norm_first")]
    pub fn order(mut self, order: NormOrder) -> Self {
        self.order = order;
        self
    }

    /// The kind of norm of rows.
    #[doc(alias = "layer_norm_eps")]
    pub fn norm(mut self, norm: NormConfig) -> Self {
        self.norm = norm;
        self
    }

    /// Reads the keys and values of layer `source` of the same stack in this layer's
    /// self-attention. `source` must be an earlier layer with its own keys. This is cross-layer
    /// attention (Brandon et al. 2024, arXiv 2405.12981). The last `num_kv_shared_layers` layers of
    /// Gemma 3n and Gemma 4 use it.
    ///
    /// The layer projects queries only. Its mask, scale and softcap are independent of `source`.
    /// Its rotation must be the rotation of `source`.
    ///
    /// Pass the `key`, `value` and `bias_kv` of the weights of `source` for this layer, and the
    /// norm of its keys. They must be the same tensors. A [`Cache`](crate::Cache) has one layer for
    /// each layer of the stack with its own keys, in their order. Gradients of the weights of keys
    /// and values belong to `source`. They are sums over all layers that read its keys.
    #[doc(alias = "num_kv_shared_layers")]
    #[doc(alias = "kv_sharing")]
    pub fn keys_of(mut self, source: impl Into<Option<usize>>) -> Self {
        self.keys_of = source.into();
        self
    }

    /// Returns `layers` equal configurations for an `operator`.
    pub(crate) fn repeated(self, operator: &'static str, layers: usize) -> Result<Vec<Self>, Error> {
        self.check()?;
        check_sizes(operator, &[("layers", layers)])?;
        Ok(vec![self; layers])
    }

    /// Returns the first configuration. It refuses another number of configurations than `layers`.
    /// It also refuses differences in other options than scale, softcap and `keys_of`. `keys_of`
    /// must name an earlier layer with its own keys.
    pub(crate) fn of_layers(
        configs: &[TransformerLayerConfig],
        layers: usize,
    ) -> Result<TransformerLayerConfig, Error> {
        check_sizes("stack", &[("layers", layers)])?;
        configs.iter().try_for_each(TransformerLayerConfig::check)?;
        let Some(first) = configs.first().filter(|_| configs.len() == layers) else {
            return Err(Error::Length { tensor: "configs", expected: layers, got: configs.len() });
        };
        let common = |config: &TransformerLayerConfig| {
            let MultiHeadConfig { scale, softcap, .. } = first.attention;
            let attention = MultiHeadConfig { scale, softcap, ..config.attention };
            TransformerLayerConfig { attention, keys_of: None, ..*config }
        };
        if configs.iter().any(|config| common(config) != common(first)) {
            let why = "layers may differ only in `MultiHeadConfig::scale`, `MultiHeadConfig::softcap` and `TransformerLayerConfig::keys_of`";
            return Err(Error::Unsupported { what: "`configs` of layers that differ in other options", why });
        }
        for (n, config) in configs.iter().enumerate() {
            let own = |source: &usize| *source < n && configs[*source].keys_of.is_none();
            if let Some(source) = config.keys_of.filter(|source| !own(source)) {
                let expected = "the index of an earlier layer without `keys_of`";
                return Err(Error::Option { option: "keys_of", value: source as f64, expected });
            }
        }
        Ok(*first)
    }

    /// Features of a layer's input and output.
    pub(crate) fn features(&self) -> usize {
        self.attention.out_features
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        self.attention.check()?;
        check_sizes("block", &[("hidden_features", self.hidden_features)])?;
        self.norm.check()?;
        let MultiHeadConfig { query_features, key_features, value_features, out_features, .. } =
            self.attention;
        if [query_features, key_features, value_features].iter().any(|n| *n != out_features) {
            let why =
                "a block adds the output to the input; make queries, keys, values and output equally wide";
            return Err(Error::Unsupported {
                what: "attention with inputs and output of different widths",
                why,
            });
        }
        Ok(())
    }
}
