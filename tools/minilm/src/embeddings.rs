//! The work before the first layer, on the GPU: rows of tables, and LayerNorm.

use std::error::Error;

use wgpu_attention::rows::{Embedding, EmbeddingForward, Norm, NormConfig, NormForward, NormWeights};
use wgpu_attention::{DType, Gpu, Recorder, TensorView};
use wgpu_attention_models::{Safetensors, upload_f32};

use crate::{EPSILON, POSITIONS, Tokens, WIDTH};

/// A LayerNorm's weights on the device, in f32.
pub struct NormBuffers {
    weight: wgpu::Buffer,
    bias: wgpu::Buffer,
}

impl NormBuffers {
    /// Reads `NAME.weight` and `NAME.bias`.
    pub fn new(gpu: &Gpu, weights: &Safetensors, name: &str) -> Result<Self, wgpu_attention_models::Error> {
        let vector = |part: &str| {
            let vector = weights.tensor(&format!("{name}.{part}"))?.expect_shape(&[WIDTH])?;
            Ok::<_, wgpu_attention_models::Error>(upload_f32(gpu, &vector)?.buffer)
        };
        Ok(NormBuffers { weight: vector("weight")?, bias: vector("bias")? })
    }

    pub fn view(&self) -> NormWeights<'_> {
        let [weight, bias] =
            [&self.weight, &self.bias].map(|buffer| Some(TensorView::vector(buffer, DType::F32, WIDTH)));
        NormWeights { weight, bias }
    }
}

/// Word + position + token type 0, normalised.
pub struct Embeddings {
    words: wgpu::Buffer,
    vocabulary: usize,
    positions: wgpu::Buffer,
    types: wgpu::Buffer,
    weights: NormBuffers,
    embedding: Embedding,
    norm: Norm,
}

impl Embeddings {
    /// Uploads the file's tables.
    pub fn new(gpu: &Gpu, weights: &Safetensors) -> Result<Self, Box<dyn Error>> {
        let table = |kind: &str, rows: Option<usize>| {
            let table = weights.tensor(&format!("embeddings.{kind}_embeddings.weight"))?;
            let rows = rows.or(table.shape().first().copied()).unwrap_or(0);
            let table = table.expect_shape(&[rows, WIDTH])?;
            Ok::<_, wgpu_attention_models::Error>((upload_f32(gpu, &table)?.buffer, rows))
        };
        let (words, vocabulary) = table("word", None)?;
        Ok(Embeddings {
            words,
            vocabulary,
            positions: table("position", Some(POSITIONS))?.0,
            types: table("token_type", Some(2))?.0,
            weights: NormBuffers::new(gpu, weights, "embeddings.LayerNorm")?,
            embedding: Embedding::with_pipelines(gpu.pipelines()),
            norm: Norm::with_pipelines(gpu.pipelines(), NormConfig::layer().eps(EPSILON))?,
        })
    }

    /// Refuses sentences of more than [`POSITIONS`] tokens, and tokens without an embedding. The
    /// device cannot report these errors.
    pub fn check(&self, tokens: &[Tokens]) -> Result<(), Box<dyn Error>> {
        let vocabulary = self.vocabulary;
        for Tokens { ids, .. } in tokens {
            if ids.len() > POSITIONS {
                let n = ids.len();
                return Err(format!("a sentence has {n} tokens, the model reads {POSITIONS}").into());
            }
            if let Some(id) = ids.iter().find(|id| **id as usize >= vocabulary) {
                return Err(format!(
                    "token {id} has no embedding, the weights have {vocabulary}: are they and tokenizer.json of one model?"
                )
                .into());
            }
        }
        Ok(())
    }

    /// Records the first layer's input `x` `[batch, 1, length, WIDTH]`. It reads words and their
    /// positions in their sentences, each `[batch, 1, length, 1]`. It also writes `sum`, which has
    /// the shape of `x`.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        [words, positions]: [TensorView; 2],
        [sum, x]: [TensorView; 2],
    ) -> Result<(), wgpu_attention::Error> {
        let table = |buffer, rows| TensorView::matrix(buffer, DType::F32, [rows, WIDTH]);
        let [word, position] = [table(&self.words, self.vocabulary), table(&self.positions, POSITIONS)];
        self.embedding.forward(into, &EmbeddingForward::new(words, word, sum))?;
        self.embedding.forward(into, &EmbeddingForward::new(positions, position, sum).accumulate(true))?;
        // Every token is of type 0. Its row is added to every sum.
        let kind = TensorView::new(&self.types, DType::F32, x.shape()).with_strides([0, 0, 0, 1]);
        let NormWeights { weight, bias } = self.weights.view();
        let call = NormForward::new(sum, x).residual(kind).weight(weight).bias(bias);
        self.norm.forward(into, &call)
    }
}
