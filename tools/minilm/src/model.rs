//! The whole model: six layers on the GPU over sentences side by side, pooling on the CPU.

use std::error::Error;
use std::sync::Arc;

use wgpu_attention::{
    Activation, BlockConfig, DType, DeviceMask, EncoderForward, EncoderLayerWeights, FeedForwardWeights, Gpu,
    LayerConfig, Mask, NormConfig, NormWeights, Scratch, ScratchSize, TensorView, TransformerEncoder,
};
use wgpu_attention_models::{AttentionTensors, LinearTensors, Naming, Safetensors, upload};

use crate::{EPSILON, Embeddings, HEADS, HIDDEN, LAYERS, Tokens, WIDTH};

/// Tokens of a sentence that the model is made for, `[CLS]` and `[SEP]` included.
pub const LONGEST: usize = 256;
/// Tokens that are computed at once, if no sentence alone has more.
const TOGETHER: usize = 4096;

/// The layers' weights in the device's memory, and room for what is computed at once. The functions that end in `_async` work in
/// browsers too; the others block.
pub struct Model {
    gpu: Gpu,
    embeddings: Embeddings,
    encoder: TransformerEncoder,
    scratch: Scratch,
    x: wgpu::Buffer,
    out: wgpu::Buffer,
    starts: wgpu::Buffer,
    full: BatchSize,
}

/// What is computed at once. All full batches have one size, so that the second and later ones create nothing on the device.
#[derive(Clone, Copy, Debug)]
pub struct BatchSize {
    /// Tokens.
    rows: usize,
    sentences: usize,
}

impl BatchSize {
    /// Without room for more.
    pub fn of(tokens: &[Tokens]) -> Self {
        BatchSize { rows: tokens.iter().map(|t| t.ids.len()).sum(), sentences: tokens.len() }
    }
}

/// What every layer's heads of one sentence attend to.
#[derive(Clone, Debug, PartialEq)]
pub struct Maps {
    /// `[LAYERS, HEADS, n, n]` of n tokens: of a query, the rows, to the keys.
    pub weights: Vec<f32>,
    /// The sentence's unit vector, of `WIDTH` numbers.
    pub vector: Vec<f32>,
}

/// Where the layers write besides the last one's output.
#[derive(Clone, Copy, Default)]
struct Between<'a> {
    /// `[LAYERS − 1, size.rows, WIDTH]`.
    hidden: Option<&'a wgpu::Buffer>,
    /// `[LAYERS, HEADS, size.rows, size.rows]`.
    weights: Option<&'a wgpu::Buffer>,
}

impl Model {
    /// The file's weights in the device's memory, and room for what is computed at once of `tokens`.
    pub fn new(gpu: &Gpu, weights: &Arc<Safetensors>, tokens: &[Tokens]) -> Result<Self, Box<dyn Error>> {
        let longest = tokens.iter().map(|t| t.ids.len()).max().unwrap_or(0);
        Self::with_room(gpu, weights, longest.max(TOGETHER.min(BatchSize::of(tokens).rows)))
    }

    /// The file's weights in the device's memory, and room for `rows` tokens at once.
    pub fn with_room(gpu: &Gpu, weights: &Arc<Safetensors>, rows: usize) -> Result<Self, Box<dyn Error>> {
        // Every sentence has two tokens at least.
        let full = BatchSize { rows, sentences: rows / 2 };
        let file = &**weights;
        // The views below borrow the buffers of all layers.
        let mut attentions = Vec::new();
        let mut linears = Vec::new();
        let mut norms = Vec::new();
        for n in 0..LAYERS {
            let layer = format!("encoder.layer.{n}");
            let attention = AttentionTensors::new(file, Naming::Bert, n)?;
            attention.query.expect([WIDTH, WIDTH])?;
            attentions.push(attention.upload_f32(gpu)?);
            for (name, size) in [("intermediate.dense", [HIDDEN, WIDTH]), ("output.dense", [WIDTH, HIDDEN])] {
                let linear = LinearTensors::new(file, &format!("{layer}.{name}"))?.expect(size)?;
                linears.push(linear.upload_f32(gpu)?);
            }
            for name in ["attention.output", "output"] {
                for part in ["weight", "bias"] {
                    let name = format!("{layer}.{name}.LayerNorm.{part}");
                    norms.push(upload(gpu, &file.tensor(&name)?.expect_shape(&[WIDTH])?)?);
                }
            }
        }
        let mut layers = Vec::new();
        for ((attention, linears), norms) in attentions.iter().zip(linears.chunks(2)).zip(norms.chunks(4)) {
            let norm = |weight: usize| -> Result<NormWeights<'_>, wgpu_attention_models::Error> {
                Ok(NormWeights { weight: Some(norms[weight].view()?), bias: Some(norms[weight + 1].view()?) })
            };
            let [up, down] = [linears[0].view()?, linears[1].view()?];
            layers.push(EncoderLayerWeights {
                attention: attention.view()?,
                feed_forward: FeedForwardWeights { up, gate: None, down },
                norms: [norm(0)?, norm(2)?],
            });
        }
        let config = BlockConfig::new(LayerConfig::new(WIDTH, HEADS), HIDDEN)
            .activation(Activation::Gelu)
            .norm(NormConfig::layer().eps(EPSILON));
        Ok(Model {
            embeddings: Embeddings::new(weights)?,
            encoder: TransformerEncoder::with_pipelines(gpu.pipelines(), config, &layers, None)?,
            scratch: Scratch::new(gpu.device(), ScratchSize::default())?,
            x: gpu.buffer(full.rows * WIDTH * size_of::<f32>())?,
            out: gpu.buffer(full.rows * WIDTH * size_of::<f32>())?,
            starts: gpu.buffer((full.sentences + 1) * size_of::<u32>())?,
            gpu: gpu.clone(),
            full,
        })
    }

    /// The unit vectors of sentences, `WIDTH` numbers each. `done` hears of how many there are after every batch.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn embed(&mut self, tokens: &[Tokens], done: impl FnMut(usize)) -> Result<Vec<f32>, Box<dyn Error>> {
        pollster::block_on(self.embed_async(tokens, done))
    }

    /// [`embed`](Self::embed), not blocking.
    pub async fn embed_async(
        &mut self,
        tokens: &[Tokens],
        mut done: impl FnMut(usize),
    ) -> Result<Vec<f32>, Box<dyn Error>> {
        let mut vectors = Vec::with_capacity(tokens.len() * WIDTH);
        let mut rest = tokens;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(self.batch(rest)?);
            rest = later;
            let x = self.input(now)?;
            let size = if rest.is_empty() { BatchSize::of(now) } else { self.full };
            let hidden = self.run(x, now, size, Between::default()).await?;
            vectors.extend(pooled(&hidden, now));
            done(tokens.len() - rest.len());
        }
        Ok(vectors)
    }

    /// What the heads attend to in one sentence, and its vector.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn maps(&mut self, tokens: &Tokens) -> Result<Maps, Box<dyn Error>> {
        pollster::block_on(self.maps_async(tokens))
    }

    /// [`maps`](Self::maps), not blocking.
    pub async fn maps_async(&mut self, tokens: &Tokens) -> Result<Maps, Box<dyn Error>> {
        let sentence = std::slice::from_ref(tokens);
        self.batch(sentence)?;
        let n = LAYERS * HEADS * tokens.ids.len().pow(2);
        let buffer = self.gpu.buffer(n * size_of::<f32>())?;
        let between = Between { weights: Some(&buffer), hidden: None };
        let hidden = self.run(self.input(sentence)?, sentence, BatchSize::of(sentence), between).await?;
        let weights = self.gpu.download_async(&buffer, n).await?;
        Ok(Maps { weights, vector: pooled(&hidden, sentence) })
    }

    /// How many of the first sentences are computed at once.
    fn batch(&self, tokens: &[Tokens]) -> Result<usize, Box<dyn Error>> {
        let ends = tokens.iter().scan(0, |end, sentence| {
            *end += sentence.ids.len();
            Some(*end)
        });
        match ends.take_while(|end| *end <= self.full.rows).take(self.full.sentences).count() {
            0 => {
                Err(format!("a sentence of {} tokens: room for {}", tokens[0].ids.len(), self.full.rows)
                    .into())
            }
            n => Ok(n),
        }
    }

    /// The first layer's input, sentences one after the other.
    pub fn input(&self, tokens: &[Tokens]) -> Result<Vec<f32>, Box<dyn Error>> {
        let mut x = Vec::new();
        for sentence in tokens {
            x.extend(self.embeddings.rows(&sentence.ids)?);
        }
        Ok(x)
    }

    /// The last layer's output for the input `x` of `tokens`, `[size.rows, WIDTH]`; what the others give goes to `hidden`,
    /// `[LAYERS − 1, size.rows, WIDTH]`.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn layers(
        &mut self,
        x: Vec<f32>,
        tokens: &[Tokens],
        size: BatchSize,
        hidden: Option<&wgpu::Buffer>,
    ) -> Result<Vec<f32>, Box<dyn Error>> {
        pollster::block_on(self.run(x, tokens, size, Between { hidden, weights: None }))
    }

    async fn run(
        &mut self,
        mut x: Vec<f32>,
        tokens: &[Tokens],
        size: BatchSize,
        between: Between<'_>,
    ) -> Result<Vec<f32>, Box<dyn Error>> {
        // Rows past the last sentence, which sees none of them, and sentences without rows.
        x.resize(size.rows * WIDTH, 0.0);
        let mut starts = vec![0u32];
        starts.extend(tokens.iter().scan(0, |end, t| {
            *end += t.ids.len() as u32;
            Some(*end)
        }));
        starts.resize(size.sentences + 1, starts[tokens.len()]);
        let queue = self.gpu.queue();
        queue.write_buffer(&self.x, 0, bytemuck::cast_slice(&x));
        queue.write_buffer(&self.starts, 0, bytemuck::cast_slice(&starts));

        let sequence = |buffer, batch| TensorView::sequence(buffer, DType::F32, [batch, size.rows, WIDTH]);
        let starts = TensorView::vector(&self.starts, DType::U32, starts.len());
        let mask: DeviceMask = Mask::none().packed(starts, starts);
        let call =
            EncoderForward::new(sequence(&self.x, 1), sequence(&self.out, 1))
                .mask(mask)
                .hidden(between.hidden.map(|hidden| sequence(hidden, LAYERS - 1)))
                .weights(between.weights.map(|weights| {
                    TensorView::new(weights, DType::F32, [LAYERS, HEADS, size.rows, size.rows])
                }));
        let needed = self.scratch.size().max(self.encoder.scratch_size(&call)?);
        if needed != self.scratch.size() {
            self.scratch = Scratch::new(self.gpu.device(), needed)?;
        }
        self.gpu.submit(|encoder| self.encoder.forward(encoder, &call, &mut self.scratch))?;
        Ok(self.gpu.download_async(&self.out, x.len()).await?)
    }
}

/// The mean of every sentence's rows over its length.
fn pooled(hidden: &[f32], tokens: &[Tokens]) -> Vec<f32> {
    let mut vectors = Vec::with_capacity(tokens.len() * WIDTH);
    let mut rows = hidden.chunks_exact(WIDTH);
    for sentence in tokens {
        let mut sum = [0f64; WIDTH];
        for row in rows.by_ref().take(sentence.ids.len()) {
            sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        // The number of rows falls out.
        let norm = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        vectors.extend(sum.map(|x| (x / norm) as f32));
    }
    vectors
}

/// The cosine of the angle between unit vectors.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}
