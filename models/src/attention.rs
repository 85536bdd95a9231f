//! The names that published models give to an attention layer's weights, as one struct.

use wgpu_attention::layers::{MultiHeadConfig, MultiHeadWeights};
use wgpu_attention::{Gpu, Linear};

use crate::Tensors;
use crate::error::Error;
use crate::tensor::TensorData;
use crate::upload::{DeviceTensor, upload, upload_f32};

/// The naming scheme of a file's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Naming {
    /// BERT, RoBERTa, MiniLM, BGE, E5 of `transformers`: `encoder.layer.N.attention.self.query`.
    Bert,
    /// Llama, Mistral, Qwen, SmolLM of `transformers`: `model.layers.N.self_attn.q_proj`.
    Llama,
    /// The encoder of Whisper, and of BART, in `transformers`:
    /// `model.encoder.layers.N.self_attn.q_proj`.
    WhisperEncoder,
    /// Self-attention in the decoder of Whisper: `model.decoder.layers.N.self_attn.q_proj`.
    WhisperDecoder,
    /// Attention of Whisper's decoder to its encoder's output:
    /// `model.decoder.layers.N.encoder_attn.q_proj`.
    WhisperCross,
    /// Any decoder in a GGUF file: `blk.N.attn_q`. For `general.architecture` = `llama`, query and
    /// key rows are in the order for rotating adjacent channels. `transformers` instead rotates
    /// the first half of the channels against the second.
    Gguf,
}

impl Naming {
    /// Prefixes that the names may have: a model saved as part of a larger one has its name as
    /// prefix.
    const fn prefixes(self) -> &'static [&'static str] {
        match self {
            Naming::Bert => &["", "bert.", "roberta.", "xlm-roberta.", "model."],
            Naming::Gguf => &[""],
            _ => &["model.", ""],
        }
    }

    /// The text before the layer's number, the text after it, then the names of query, key, value
    /// and out.
    const fn parts(self) -> (&'static str, &'static str, [&'static str; 4]) {
        const PROJ: [&str; 4] = ["q_proj", "k_proj", "v_proj", "out_proj"];
        match self {
            Naming::Bert => {
                ("encoder.layer.", ".attention.", ["self.query", "self.key", "self.value", "output.dense"])
            }
            Naming::Llama => ("layers.", ".self_attn.", ["q_proj", "k_proj", "v_proj", "o_proj"]),
            Naming::WhisperEncoder => ("encoder.layers.", ".self_attn.", PROJ),
            Naming::WhisperDecoder => ("decoder.layers.", ".self_attn.", PROJ),
            Naming::WhisperCross => ("decoder.layers.", ".encoder_attn.", PROJ),
            Naming::Gguf => ("blk.", ".", ["attn_q", "attn_k", "attn_v", "attn_output"]),
        }
    }
}

/// A linear layer's weights in a file.
#[derive(Clone, Copy, Debug)]
pub struct LinearTensors<'a> {
    /// `[out_features, in_features]`.
    pub weight: TensorData<'a>,
    /// `[out_features]`.
    pub bias: Option<TensorData<'a>>,
}

impl<'a> LinearTensors<'a> {
    /// Finds `NAME.weight` and, if the file has it, `NAME.bias`.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Type`]; [`Error::Shape`] if the weight is no matrix or the bias
    /// does not have one element for each row.
    pub fn new(tensors: &'a impl Tensors, name: &str) -> Result<Self, Error> {
        let weight = tensors.tensor(&format!("{name}.weight"))?;
        let &[rows, _] = weight.shape() else {
            return Err(weight.wrong_shape("[out_features, in_features]".into()));
        };
        let bias = format!("{name}.bias");
        let bias =
            tensors.contains(&bias).then(|| tensors.tensor(&bias)?.expect_shape(&[rows])).transpose()?;
        Ok(LinearTensors { weight, bias })
    }

    fn size(&self) -> [usize; 2] {
        // `new` has checked that the shape has two dimensions.
        [self.weight.shape()[0], self.weight.shape()[1]]
    }

    /// Returns an error if the size is not `[out_features, in_features]`.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn expect(self, size: [usize; 2]) -> Result<Self, Error> {
        self.weight.expect_shape(&size)?;
        Ok(self)
    }

    /// Copies the weights into buffers, as stored.
    ///
    /// # Errors
    /// The same as [`upload`].
    pub fn upload(&self, gpu: &Gpu) -> Result<LinearBuffers, Error> {
        Ok(LinearBuffers {
            weight: upload(gpu, &self.weight)?,
            bias: self.bias.as_ref().map(|bias| upload(gpu, bias)).transpose()?,
        })
    }

    /// Copies the weights into buffers, as f32.
    ///
    /// # Errors
    /// The same as [`upload_f32`].
    pub fn upload_f32(&self, gpu: &Gpu) -> Result<LinearBuffers, Error> {
        Ok(LinearBuffers {
            weight: upload_f32(gpu, &self.weight)?,
            bias: self.bias.as_ref().map(|bias| upload_f32(gpu, bias)).transpose()?,
        })
    }
}

/// A linear layer's weights on a device.
#[derive(Clone, Debug)]
pub struct LinearBuffers {
    /// `[out_features, in_features]`.
    pub weight: DeviceTensor,
    /// `[out_features]`.
    pub bias: Option<DeviceTensor>,
}

impl LinearBuffers {
    /// The view that operators take as an argument.
    ///
    /// # Errors
    /// The same as [`DeviceTensor::view`].
    pub fn view(&self) -> Result<Linear<'_>, Error> {
        Ok(Linear {
            weight: self.weight.view()?,
            bias: self.bias.as_ref().map(DeviceTensor::view).transpose()?,
        })
    }
}

/// An attention layer's weights in a file.
#[derive(Clone, Copy, Debug)]
pub struct AttentionTensors<'a> {
    /// `[heads · head_dim, features]`.
    pub query: LinearTensors<'a>,
    /// `[kv_heads · head_dim, key_features]`.
    pub key: LinearTensors<'a>,
    /// `[kv_heads · head_dim, key_features]`.
    pub value: LinearTensors<'a>,
    /// `[features, heads · head_dim]`.
    pub out: LinearTensors<'a>,
}

impl<'a> AttentionTensors<'a> {
    /// Finds the weights of layer `layer`, counted from 0.
    ///
    /// # Errors
    /// [`Error::Missing`] and [`Error::Type`]; [`Error::Shape`] if the four shapes do not match.
    pub fn new(tensors: &'a impl Tensors, naming: Naming, layer: usize) -> Result<Self, Error> {
        let (before, after, parts) = naming.parts();
        let name = |prefix: &str, part: &str| format!("{prefix}{before}{layer}{after}{part}");
        // If no prefix matches, the error names the first.
        let prefixes = naming.prefixes();
        let found = prefixes.iter().find(|p| tensors.contains(&format!("{}.weight", name(p, parts[0]))));
        let prefix = found.unwrap_or(&prefixes[0]);
        let [query, key, value, out] = parts.map(|part| LinearTensors::new(tensors, &name(prefix, part)));
        let (query, key, value, out) = (query?, key?, value?, out?);
        let [width, features] = query.size();
        Ok(AttentionTensors {
            query,
            key,
            value: value.expect(key.size())?,
            out: out.expect([features, width])?,
        })
    }

    /// The layer's configuration for an operator: sizes from the shapes, and scale 1/√head_dim.
    /// The element type is f32, as [`upload_f32`](Self::upload_f32) uploads; set another with
    /// `dtype`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the widths do not split into `heads` equal heads.
    pub fn config(&self, heads: usize) -> Result<MultiHeadConfig, Error> {
        let ([width, features], [key_width, key_features]) = (self.query.size(), self.key.size());
        let not = || {
            self.query.weight.wrong_shape(format!("a first dimension that is a multiple of {heads} (heads)"))
        };
        let head_dim = width.checked_div(heads).filter(|d| *d > 0 && d * heads == width).ok_or_else(not)?;
        let kv_heads = key_width / head_dim;
        if kv_heads == 0 || kv_heads * head_dim != key_width || !heads.is_multiple_of(kv_heads) {
            return Err(self
                .key
                .weight
                .wrong_shape(format!("a first dimension of {head_dim} times a divisor of {heads} (heads)")));
        }
        Ok(MultiHeadConfig::new(features, heads)
            .kv_heads(kv_heads)
            .head_dim(head_dim)
            .value_dim(head_dim)
            .key_features(key_features)
            .value_features(key_features))
    }

    /// Copies the weights into buffers, as stored.
    ///
    /// # Errors
    /// The same as [`upload`].
    pub fn upload(&self, gpu: &Gpu) -> Result<AttentionBuffers, Error> {
        self.each(|linear| linear.upload(gpu))
    }

    /// Copies the weights into buffers, as f32.
    ///
    /// # Errors
    /// The same as [`upload_f32`].
    pub fn upload_f32(&self, gpu: &Gpu) -> Result<AttentionBuffers, Error> {
        self.each(|linear| linear.upload_f32(gpu))
    }

    fn each(
        &self,
        upload: impl Fn(&LinearTensors) -> Result<LinearBuffers, Error>,
    ) -> Result<AttentionBuffers, Error> {
        Ok(AttentionBuffers {
            query: upload(&self.query)?,
            key: upload(&self.key)?,
            value: upload(&self.value)?,
            out: upload(&self.out)?,
        })
    }
}

/// An attention layer's weights on a device.
#[derive(Clone, Debug)]
pub struct AttentionBuffers {
    /// `[heads · head_dim, features]`.
    pub query: LinearBuffers,
    /// `[kv_heads · head_dim, key_features]`.
    pub key: LinearBuffers,
    /// `[kv_heads · head_dim, key_features]`.
    pub value: LinearBuffers,
    /// `[features, heads · head_dim]`.
    pub out: LinearBuffers,
}

impl AttentionBuffers {
    /// The view that operators take as an argument.
    ///
    /// # Errors
    /// The same as [`DeviceTensor::view`].
    pub fn view(&self) -> Result<MultiHeadWeights<'_>, Error> {
        Ok(MultiHeadWeights {
            query: self.query.view()?,
            key: self.key.view()?,
            value: self.value.view()?,
            out: self.out.view()?,
            bias_kv: None,
            qk_norm: None,
            gate: None,
        })
    }
}
