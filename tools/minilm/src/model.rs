//! The whole model on the GPU: embeddings, six layers over packed sentences, and means of unit
//! length.

use std::error::Error;

use wgpu_attention::layers::{
    EncoderForward, EncoderLayerWeights, FeedForwardWeights, MultiHeadConfig, TransformerLayerConfig,
};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::matmul::Activation;
use wgpu_attention::rows::{MeanPool, MeanPoolForward, NormConfig, PoolMask};
use wgpu_attention::{DType, Gpu, Mask, Scratch, ScratchSize, TensorView, TransformerEncoder};
use wgpu_attention_models::{AttentionTensors, LinearTensors, Naming, Safetensors};

use crate::{EPSILON, Embeddings, HEADS, HIDDEN, LAYERS, NormBuffers, Tokens, WIDTH};

/// The longest sentence that the model supports, in tokens, with `[CLS]` and `[SEP]`.
pub const LONGEST: usize = 256;
/// Tokens of a batch, if no single sentence has more.
const TOGETHER: usize = 4096;

/// The model's weights on the device, and memory for one batch. The functions that end in `_async`
/// also work in browsers; the others block.
pub struct Model {
    gpu: Gpu,
    embeddings: Embeddings,
    encoder: TransformerEncoder,
    pool: MeanPool,
    scratch: Scratch,
    words: wgpu::Buffer,
    positions: wgpu::Buffer,
    starts: wgpu::Buffer,
    x: wgpu::Buffer,
    out: wgpu::Buffer,
    vectors: wgpu::Buffer,
    full: BatchSize,
}

/// The size of a batch. All full batches have one size, so that the second and later ones create no
/// binding.
#[derive(Clone, Copy, Debug)]
struct BatchSize {
    /// Tokens.
    rows: usize,
    sentences: usize,
}

impl BatchSize {
    /// Returns the size of a batch that holds exactly `tokens`.
    fn of(tokens: &[Tokens]) -> Self {
        BatchSize { rows: tokens.iter().map(|t| t.ids.len()).sum(), sentences: tokens.len() }
    }
}

/// The attention weights of every layer's heads, for one sentence.
#[derive(Clone, Debug, PartialEq)]
pub struct Maps {
    /// `[LAYERS, HEADS, n, n]` for n tokens: rows are queries, columns are keys.
    pub weights: Vec<f32>,
    /// The sentence's unit vector, with `WIDTH` numbers.
    pub vector: Vec<f32>,
}

/// Buffers for the outputs of layers before the last one, and the queries that time all layers.
#[derive(Clone, Default)]
struct Between<'a> {
    /// `[LAYERS − 1, size.rows, WIDTH]`.
    hidden: Option<&'a wgpu::Buffer>,
    /// `[LAYERS, HEADS, size.rows, size.rows]`.
    weights: Option<&'a wgpu::Buffer>,
    timestamps: Option<wgpu::ComputePassTimestampWrites<'a>>,
}

impl Model {
    /// Uploads the file's weights, and allocates memory for the batches of `tokens`.
    pub fn new(gpu: &Gpu, weights: &Safetensors, tokens: &[Tokens]) -> Result<Self, Box<dyn Error>> {
        let longest = tokens.iter().map(|t| t.ids.len()).max().unwrap_or(0);
        Self::with_room(gpu, weights, longest.max(TOGETHER.min(BatchSize::of(tokens).rows)))
    }

    /// Uploads the file's weights, and allocates memory for batches of `rows` tokens.
    pub fn with_room(gpu: &Gpu, weights: &Safetensors, rows: usize) -> Result<Self, Box<dyn Error>> {
        // Sentences of this model have at least two tokens. More sentences of one token take more
        // batches.
        let full = BatchSize { rows, sentences: (rows / 2).max(1) };
        // The views below borrow the buffers of all layers.
        let mut attentions = Vec::new();
        let mut linears = Vec::new();
        let mut norms = Vec::new();
        for n in 0..LAYERS {
            let layer = format!("encoder.layer.{n}");
            let attention = AttentionTensors::new(weights, Naming::Bert, n)?;
            attention.query.expect([WIDTH, WIDTH])?;
            attentions.push(attention.upload_f32(gpu)?);
            for (name, size) in [("intermediate.dense", [HIDDEN, WIDTH]), ("output.dense", [WIDTH, HIDDEN])] {
                let linear = LinearTensors::new(weights, &format!("{layer}.{name}"))?.expect(size)?;
                linears.push(linear.upload_f32(gpu)?);
            }
            for name in ["attention.output", "output"] {
                norms.push(NormBuffers::new(gpu, weights, &format!("{layer}.{name}.LayerNorm"))?);
            }
        }
        let mut layers = Vec::new();
        for ((attention, linears), norms) in attentions.iter().zip(linears.chunks(2)).zip(norms.chunks(2)) {
            let [up, down] = [linears[0].view()?, linears[1].view()?];
            layers.push(EncoderLayerWeights {
                attention: attention.view()?,
                feed_forward: FeedForwardWeights { up, gate: None, down },
                norms: [norms[0].view(), norms[1].view()],
            });
        }
        let config = TransformerLayerConfig::new(MultiHeadConfig::new(WIDTH, HEADS), HIDDEN)
            .activation(Activation::Gelu)
            .norm(NormConfig::layer().eps(EPSILON));
        let floats = |rows: usize| gpu.buffer(rows * WIDTH * size_of::<f32>());
        let numbers = |n: usize| gpu.buffer(n * size_of::<u32>());
        Ok(Model {
            embeddings: Embeddings::new(gpu, weights)?,
            encoder: TransformerEncoder::with_pipelines(gpu.pipelines(), config, &layers, None)?,
            pool: MeanPool::with_pipelines(gpu.pipelines()),
            scratch: Scratch::new(gpu.device(), ScratchSize::default())?,
            words: numbers(full.rows)?,
            positions: numbers(full.rows)?,
            starts: numbers(full.sentences + 1)?,
            x: floats(full.rows)?,
            out: floats(full.rows)?,
            vectors: floats(full.sentences)?,
            gpu: gpu.clone(),
            full,
        })
    }

    /// Returns the unit vectors of sentences, with `WIDTH` numbers each. After every batch it calls
    /// `done` with the number of finished sentences.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn embed(&mut self, tokens: &[Tokens], done: impl FnMut(usize)) -> Result<Vec<f32>, Box<dyn Error>> {
        pollster::block_on(self.embed_async(tokens, done))
    }

    /// The async variant of [`embed`](Self::embed).
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
            let size = if rest.is_empty() { BatchSize::of(now) } else { self.full };
            self.run(now, size, Between::default())?;
            vectors.extend(self.gpu.download_async::<f32>(&self.vectors, now.len() * WIDTH).await?);
            done(tokens.len() - rest.len());
        }
        Ok(vectors)
    }

    /// Returns the attention weights and the vector of one sentence.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn maps(&mut self, tokens: &Tokens) -> Result<Maps, Box<dyn Error>> {
        pollster::block_on(self.maps_async(tokens))
    }

    /// The async variant of [`maps`](Self::maps).
    pub async fn maps_async(&mut self, tokens: &Tokens) -> Result<Maps, Box<dyn Error>> {
        let sentence = std::slice::from_ref(tokens);
        self.batch(sentence)?;
        let n = LAYERS * HEADS * tokens.ids.len().pow(2);
        let buffer = self.gpu.buffer(n * size_of::<f32>())?;
        let between = Between { weights: Some(&buffer), ..Between::default() };
        self.run(sentence, BatchSize::of(sentence), between)?;
        let weights = self.gpu.download_async(&buffer, n).await?;
        Ok(Maps { weights, vector: self.gpu.download_async(&self.vectors, WIDTH).await? })
    }

    /// Submits the model for one sentence of n tokens, and does not wait. It writes the attention
    /// weights `[LAYERS, HEADS, n, n]` to `weights`. `timestamps` time the compute pass.
    pub fn attend(
        &mut self,
        tokens: &Tokens,
        weights: &wgpu::Buffer,
        timestamps: Option<wgpu::ComputePassTimestampWrites>,
    ) -> Result<(), Box<dyn Error>> {
        let sentence = std::slice::from_ref(tokens);
        self.batch(sentence)?;
        let between = Between { weights: Some(weights), hidden: None, timestamps };
        self.run(sentence, BatchSize::of(sentence), between)
    }

    /// Returns the first layer's input and every layer's output, `[LAYERS + 1, rows, WIDTH]`. The
    /// sentences form one batch, one after the other.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn hidden(&mut self, tokens: &[Tokens]) -> Result<Vec<f32>, Box<dyn Error>> {
        let size = BatchSize::of(tokens);
        if self.batch(tokens)? < tokens.len() {
            return Err(format!("{} tokens: room for {}", size.rows, self.full.rows).into());
        }
        let n = size.rows * WIDTH;
        let between = self.gpu.buffer((LAYERS - 1) * n * size_of::<f32>())?;
        self.run(tokens, size, Between { hidden: Some(&between), ..Between::default() })?;
        let mut all: Vec<f32> = self.gpu.download(&self.x, n)?;
        all.extend(self.gpu.download::<f32>(&between, (LAYERS - 1) * n)?);
        all.extend(self.gpu.download::<f32>(&self.out, n)?);
        Ok(all)
    }

    /// Returns the number of sentences, from the first on, that fit in a batch.
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

    /// Submits all work from tokens to unit vectors.
    fn run(
        &mut self,
        tokens: &[Tokens],
        size: BatchSize,
        between: Between<'_>,
    ) -> Result<(), Box<dyn Error>> {
        self.embeddings.check(tokens)?;
        // Fills the batch with rows that no sentence sees, and with sentences without rows.
        let mut words: Vec<u32> = tokens.iter().flat_map(|t| &t.ids).copied().collect();
        words.resize(size.rows, 0);
        let mut positions: Vec<u32> = tokens.iter().flat_map(|t| 0..t.ids.len() as u32).collect();
        positions.resize(size.rows, 0);
        let mut starts = vec![0u32];
        starts.extend(tokens.iter().scan(0, |end, t| {
            *end += t.ids.len() as u32;
            Some(*end)
        }));
        starts.resize(size.sentences + 1, starts[tokens.len()]);
        let queue = self.gpu.queue();
        queue.write_buffer(&self.words, 0, bytemuck::cast_slice(&words));
        queue.write_buffer(&self.positions, 0, bytemuck::cast_slice(&positions));
        queue.write_buffer(&self.starts, 0, bytemuck::cast_slice(&starts));

        let sequence = |buffer, batch| TensorView::sequence(buffer, DType::F32, [batch, size.rows, WIDTH]);
        let numbers = |buffer| TensorView::sequence(buffer, DType::U32, [1, size.rows, 1]);
        let ids = [&self.words, &self.positions].map(numbers);
        let [x, out] = [&self.x, &self.out].map(|buffer| sequence(buffer, 1));
        let starts = TensorView::vector(&self.starts, DType::U32, starts.len());
        let mask: DeviceMask = Mask::none().packed(starts, starts);
        let layers =
            EncoderForward::new(x, out)
                .mask(mask)
                .hidden(between.hidden.map(|hidden| sequence(hidden, LAYERS - 1)))
                .weights(between.weights.map(|weights| {
                    TensorView::new(weights, DType::F32, [LAYERS, HEADS, size.rows, size.rows])
                }));
        let vectors = TensorView::new(&self.vectors, DType::F32, [size.sentences, 1, 1, WIDTH]);
        let pool = MeanPoolForward::new(out, PoolMask::Packed(starts), vectors).normalize(true);
        let needed = self.scratch.size().max(self.encoder.scratch_size(&layers)?);
        if needed != self.scratch.size() {
            self.scratch = Scratch::new(self.gpu.device(), needed)?;
        }
        let timestamp_writes = between.timestamps;
        self.gpu.submit(|encoder| {
            let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes };
            let mut pass = encoder.begin_compute_pass(&descriptor);
            // The sum before the norm shares memory with the last layer's output.
            self.embeddings.forward(&mut pass, ids, [out, x])?;
            self.encoder.forward(&mut pass, &layers, &mut self.scratch)?;
            self.pool.forward(&mut pass, &pool)
        })?;
        Ok(())
    }
}

/// The cosine of the angle between unit vectors.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}
