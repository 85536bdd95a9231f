//! A layer's configuration whose fields cases set freely.

use wgpu_attention::layers::{MultiHeadConfig, OutputGate};
use wgpu_attention::rows::NormConfig;
use wgpu_attention::{DType, Shape};

/// The fields of a [`MultiHeadConfig`].
#[derive(Clone, Copy, Debug)]
pub struct LayerOptions {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub query_features: usize,
    pub key_features: usize,
    pub value_features: usize,
    pub out_features: usize,
    pub narrow: bool,
    pub add_zero_attn: bool,
    pub qk_norm: Option<NormConfig>,
    pub output_gate: Option<OutputGate>,
    pub scale: Option<f64>,
    pub softcap: Option<f64>,
    pub dtype: DType,
}

impl LayerOptions {
    /// Sets the defaults of [`MultiHeadConfig::new`].
    pub fn new(embed_dim: usize, heads: usize) -> Self {
        let head_dim = if heads > 0 && embed_dim.is_multiple_of(heads) { embed_dim / heads } else { 0 };
        LayerOptions {
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

    pub fn config(&self) -> MultiHeadConfig {
        // A width that the heads divide, so that no error concerns a width that is set below.
        MultiHeadConfig::new(self.heads, self.heads)
            .kv_heads(self.kv_heads)
            .head_dim(self.head_dim)
            .value_dim(self.value_dim)
            .query_features(self.query_features)
            .key_features(self.key_features)
            .value_features(self.value_features)
            .out_features(self.out_features)
            .narrow(self.narrow)
            .add_zero_attn(self.add_zero_attn)
            .qk_norm(self.qk_norm)
            .output_gate(self.output_gate)
            .scale(self.scale)
            .softcap(self.softcap)
            .dtype(self.dtype)
    }

    /// Returns the shape of the inner attention. The `appended` keys come after the first `kv_len`
    /// keys.
    pub fn shape(&self, batch: usize, q_len: usize, kv_len: usize, appended: usize) -> Shape {
        let LayerOptions { heads, kv_heads, head_dim, value_dim, .. } = *self;
        let kv_len = kv_len.saturating_add(appended);
        Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim }
    }
}
