//! A decoder of the llama architecture from a GGUF file. The weights stay in the file's quantised
//! blocks. A step records this crate's operators, one after the other, in one compute pass.

use std::error::Error;

use wgpu_attention::cache::{Append, CacheLayout, CacheRead, Tokens};
use wgpu_attention::matmul::{
    Activation, QuantizedFormat, QuantizedForward, QuantizedMatrix, QuantizedProjection, QuantizedRows,
};
use wgpu_attention::position::{Positions, Rope, RopeConfig, RopeOrder, Rotate, RowPositions};
use wgpu_attention::rows::{Elementwise, ElementwiseForward, Norm, NormConfig, NormForward};
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Forward, Gpu, KernelOptions, Mask, Scratch, ScratchSize,
    TensorView,
};
use wgpu_attention_models::{Gguf, Storage, TensorData};

use crate::caches::CacheKind;

type Fallible<T> = Result<T, Box<dyn Error>>;

/// Tokens of a page in the cache.
const PAGE: usize = 64;

/// The sizes of a model.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub layers: usize,
    /// Channels of the residual stream.
    pub width: usize,
    /// Channels of the feed-forward layers.
    pub inner: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub vocabulary: usize,
    /// Positions that the model was trained with.
    pub context: usize,
}

/// A quantised matrix in a buffer.
struct Matrix {
    buffer: wgpu::Buffer,
    format: QuantizedFormat,
    shape: [usize; 2],
}

impl Matrix {
    /// Concatenates tensors `[rows, columns]` of a file along the rows, so that one product
    /// computes all.
    fn new(gpu: &Gpu, file: &Gguf, parts: &[(String, usize)], columns: usize) -> Fallible<Self> {
        let mut bytes = Vec::new();
        let mut format = None;
        for (name, rows) in parts {
            let tensor = file.tensor(name)?.expect_shape(&[*rows, columns])?;
            let own = match tensor.storage() {
                Storage::Q4_1 => QuantizedFormat::Q4_1,
                Storage::Q8_0 => QuantizedFormat::Q8_0,
                other => return Err(format!("`{name}` is stored as {other}, not as Q4_1 or Q8_0").into()),
            };
            if *format.get_or_insert(own) != own {
                return Err(format!("`{name}` is stored in another way than its neighbours").into());
            }
            bytes.extend(tensor.bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let rows = parts.iter().map(|(_, rows)| rows).sum();
        let format = format.ok_or("a matrix of no tensors")?;
        Ok(Matrix { buffer: gpu.upload(&bytes)?, format, shape: [rows, columns] })
    }

    fn view(&self) -> QuantizedMatrix<'_> {
        QuantizedMatrix::new(&self.buffer, self.format, self.shape)
    }
}

struct Layer {
    attention_norm: wgpu::Buffer,
    /// Queries, keys and values.
    qkv: Matrix,
    out: Matrix,
    feed_forward_norm: wgpu::Buffer,
    /// Gate and up.
    gate_up: Matrix,
    down: Matrix,
}

/// The weights and the operators.
pub struct Model {
    pub sizes: Sizes,
    /// Bytes of all weights.
    pub weight_bytes: u64,
    gpu: Gpu,
    /// `[vocabulary, width]`: the embeddings, which are also the output matrix for logits.
    table: Matrix,
    layers: Vec<Layer>,
    last_norm: wgpu::Buffer,
    rope: Rope,
    projection: QuantizedProjection,
    positions: Positions,
    norm: Norm,
    elementwise: Elementwise,
    /// Attention for any number of keys, and for few keys. The second never splits the keys, which
    /// saves a dispatch.
    attention: [Attention; 2],
}

/// The largest number of keys for attention without splits.
const FEW_KEYS: usize = 256;

impl Model {
    /// Uploads the weights of a file.
    pub fn new(gpu: &Gpu, file: &Gguf) -> Fallible<Self> {
        let architecture = file.str("general.architecture")?;
        if architecture != "llama" {
            return Err(format!("the file's architecture is {architecture}, not llama").into());
        }
        let size = |key: &str| Ok::<_, Box<dyn Error>>(usize::try_from(file.u64(&format!("llama.{key}"))?)?);
        let (width, heads) = (size("embedding_length")?, size("attention.head_count")?);
        let dim = width.checked_div(heads).filter(|dim| dim * heads == width);
        let table = file.tensor("token_embd.weight")?;
        let sizes = Sizes {
            layers: size("block_count")?,
            width,
            inner: size("feed_forward_length")?,
            heads,
            kv_heads: size("attention.head_count_kv")?,
            dim: dim.ok_or_else(|| format!("{heads} heads do not share {width} channels"))?,
            vocabulary: table.shape().first().copied().unwrap_or(0),
            context: size("context_length")?,
        };
        if file.tensor("output.weight").is_ok() {
            return Err("the file has an output matrix besides its embeddings, which is not read".into());
        }
        // Only a base is read, so scaled frequencies are an error.
        if file.metadata("llama.rope.scaling.type").is_some_and(|kind| kind.as_str() != Some("none")) {
            return Err("the file scales its rotary positions, which is not done".into());
        }
        let Sizes { inner, kv_heads, dim, vocabulary, .. } = sizes;
        if sizes.layers == 0 {
            return Err("the file's model has no layers".into());
        }
        let vector = |name: String| -> Fallible<wgpu::Buffer> {
            Ok(gpu.upload(&TensorData::to_f32(&file.tensor(&name)?.expect_shape(&[width])?))?)
        };
        let layer = |n: usize| -> Fallible<Layer> {
            let named = |part: &str| format!("blk.{n}.{part}.weight");
            let matrix = |parts: &[(&str, usize)], columns| {
                let parts: Vec<_> = parts.iter().map(|(part, rows)| (named(part), *rows)).collect();
                Matrix::new(gpu, file, &parts, columns)
            };
            let [q, kv] = [heads, kv_heads].map(|heads| heads.saturating_mul(dim));
            Ok(Layer {
                attention_norm: vector(named("attn_norm"))?,
                qkv: matrix(&[("attn_q", q), ("attn_k", kv), ("attn_v", kv)], width)?,
                out: matrix(&[("attn_output", width)], q)?,
                feed_forward_norm: vector(named("ffn_norm"))?,
                gate_up: matrix(&[("ffn_gate", inner), ("ffn_up", inner)], width)?,
                down: matrix(&[("ffn_down", width)], inner)?,
            })
        };
        // GGUF orders query and key rows so that adjacent channels are pairs.
        let base = file.f64("llama.rope.freq_base")?;
        let rotary = size("rope.dimension_count")?;
        if rotary > dim {
            return Err(format!("the file has {rotary} rotary channels for heads of {dim}").into());
        }
        let rope = RopeConfig::new(rotary).base(base).order(RopeOrder::Interleaved);
        let norm = NormConfig::rms().eps(file.f64("llama.attention.layer_norm_rms_epsilon")?);
        let pipelines = gpu.pipelines();
        let attention = |kernel_options| {
            let config = Config::new(heads, dim).kv_heads(kv_heads).kernel_options(kernel_options);
            Attention::with_pipelines(pipelines, config)
        };
        Ok(Model {
            sizes,
            weight_bytes: file
                .tensors()
                .iter()
                .map(|t| file.tensor(&t.name).map_or(0, |t| t.bytes().len() as u64))
                .sum(),
            table: Matrix::new(gpu, file, &[("token_embd.weight".into(), vocabulary)], width)?,
            layers: (0..sizes.layers).map(layer).collect::<Result<_, _>>()?,
            last_norm: vector("output_norm.weight".into())?,
            rope: Rope::new(gpu.device(), rope)?,
            projection: QuantizedProjection::with_pipelines(pipelines),
            positions: Positions::with_pipelines(pipelines),
            norm: Norm::with_pipelines(pipelines, norm)?,
            elementwise: Elementwise::with_pipelines(pipelines),
            attention: [attention(KernelOptions::new())?, attention(KernelOptions::new().splits(1))?],
            gpu: gpu.clone(),
        })
    }
}

/// The logits that a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    None,
    /// Logits after the last new token of each sequence.
    Last,
    /// Logits after every new token.
    All,
}

/// Activations of a step with up to `rows` tokens of each sequence.
struct Activations {
    ids: wgpu::Buffer,
    /// The residual stream; each sum reads one buffer and writes the other.
    streams: [wgpu::Buffer; 2],
    normed: wgpu::Buffer,
    qkv: wgpu::Buffer,
    attended: wgpu::Buffer,
    /// The output of attention or of the feed-forward layer, to add to the stream.
    added: wgpu::Buffer,
    gate_up: wgpu::Buffer,
    inner: wgpu::Buffer,
    /// The last row of each sequence, and its logits.
    last: wgpu::Buffer,
    logits: wgpu::Buffer,
}

/// The sizes of a session.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// The number of sequences.
    pub batch: usize,
    /// The largest number of tokens of a sequence.
    pub capacity: usize,
    /// The length of the prefix that all sequences share.
    pub shared: usize,
    /// The largest number of a sequence's tokens in one step.
    pub rows: usize,
    /// The format of keys and values.
    pub kind: CacheKind,
}

/// Sequences of tokens with their keys and values.
pub struct Session<'m> {
    model: &'m Model,
    layout: Layout,
    cache: Cache,
    /// Bytes of keys and values of a token, and of all pages.
    pub token_bytes: usize,
    cache_bytes: u64,
    activations: Activations,
    scratch: Scratch,
}

impl<'m> Session<'m> {
    pub fn new(model: &'m Model, layout: Layout) -> Fallible<Self> {
        let Layout { batch, capacity, shared, rows, kind } = layout;
        let Sizes { layers, width, inner, heads, kv_heads, dim, vocabulary, .. } = model.sizes;
        let gpu = &model.gpu;
        // The whole pages of the shared prefix exist once. Each sequence copies the partial page at
        // its end.
        let own = capacity.div_ceil(PAGE) - shared / PAGE;
        let pages = shared.div_ceil(PAGE) + batch * own;
        let config = CacheConfig::new(kv_heads, dim, capacity)
            .batch(batch)
            .layers(layers)
            .storage(kind.storages[0])
            .value_storage(kind.storages[1])
            .hadamard(kind.block(dim))
            .layout(CacheLayout::Paged { page: PAGE, pages });
        let cache = Cache::with_pipelines(gpu.pipelines(), config)?;
        let buffer = |channels: usize| gpu.buffer(4 * batch * rows * channels);
        let activations = Activations {
            ids: buffer(1)?,
            streams: [buffer(width)?, buffer(width)?],
            normed: buffer(width)?,
            qkv: buffer((heads + 2 * kv_heads) * dim)?,
            attended: buffer(heads * dim)?,
            added: buffer(width)?,
            gate_up: buffer(2 * inner)?,
            inner: buffer(inner)?,
            last: gpu.buffer(4 * batch * width)?,
            logits: gpu.buffer(4 * batch * vocabulary)?,
        };
        let mut size = ScratchSize::default();
        // Calls with few rows may need more memory, because they split the keys among workgroups.
        for rows in 1..=rows {
            let heads = |buffer| TensorView::blhd(buffer, DType::F32, [batch, heads, rows, dim]);
            let call = Forward::with_cache(heads(&activations.qkv), &cache, heads(&activations.attended));
            size = size.max(model.attention[0].scratch_size(&call.at_end().mask(Mask::causal()))?);
        }
        let token_bytes = config.token_bytes() * layers;
        let cache_bytes = (token_bytes * pages * PAGE) as u64;
        let scratch = Scratch::new(gpu.device(), size)?;
        Ok(Session { model, layout, cache, token_bytes, cache_bytes, activations, scratch })
    }

    /// Bytes of keys and values, and of activations with scratch memory.
    pub fn memory(&self) -> [u64; 2] {
        let a = &self.activations;
        let buffers = [
            &a.ids,
            &a.streams[0],
            &a.streams[1],
            &a.normed,
            &a.qkv,
            &a.attended,
            &a.added,
            &a.gate_up,
            &a.inner,
            &a.last,
            &a.logits,
        ];
        let activations: u64 = buffers.iter().map(|b| b.size()).sum();
        [self.cache_bytes, activations + self.scratch.size().total()]
    }

    /// Returns the keys and the values of the first sequence in a layer, head after head.
    pub fn keys_and_values(&self, layer: usize) -> Fallible<[Vec<f32>; 2]> {
        let Sizes { kv_heads, dim, .. } = self.model.sizes;
        let gpu = &self.model.gpu;
        let shape = [self.layout.batch, kv_heads, self.len(0), dim];
        let count = kv_heads * self.len(0) * dim;
        let buffer = || gpu.buffer(4 * self.layout.batch * count);
        let (k, v) = (buffer()?, buffer()?);
        let view = |buffer| TensorView::new(buffer, DType::F32, shape);
        gpu.submit(|encoder| self.cache.read(encoder, layer, &CacheRead::new(view(&k), view(&v))))?;
        Ok([gpu.download(&k, count)?, gpu.download(&v, count)?])
    }

    /// The number of tokens in a sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.cache.len(sequence).unwrap_or(0)
    }

    /// Makes every other sequence share the first one's tokens, without a copy.
    pub fn share_first(&mut self) -> Fallible<()> {
        (1..self.layout.batch).try_for_each(|to| self.cache.fork(0, to))?;
        Ok(())
    }

    /// Empties all sequences.
    pub fn clear(&mut self) -> Fallible<()> {
        (0..self.layout.batch).try_for_each(|sequence| self.cache.clear(sequence))?;
        Ok(())
    }

    /// Compiles the kernels that prompts and generation need.
    pub fn warm_up(&mut self) -> Fallible<()> {
        let rows = self.layout.rows.min(self.layout.capacity.saturating_sub(1)).min(64);
        let prompt = vec![0; rows.max(1)];
        for (tokens, sequences) in [(prompt.as_slice(), 1), (prompt.as_slice(), self.layout.batch)] {
            let of = |s: usize| if s < sequences { tokens } else { &[] };
            self.feed(&(0..self.layout.batch).map(of).collect::<Vec<_>>())?;
            self.feed(&vec![&[0][..]; self.layout.batch])?;
            self.clear()?;
        }
        Ok(())
    }

    /// Appends tokens to each sequence, in as many steps as necessary. Returns the logits after
    /// each sequence's last token, empty for sequences without new tokens.
    pub fn feed(&mut self, tokens: &[&[u32]]) -> Fallible<Vec<Vec<f32>>> {
        let (rows, vocabulary) = (self.layout.rows, self.model.sizes.vocabulary);
        let mut found = vec![Vec::new(); tokens.len()];
        let longest = tokens.iter().map(|tokens| tokens.len()).max().unwrap_or(0);
        for start in (0..longest).step_by(rows) {
            let part = |tokens: &&[u32]| start.min(tokens.len())..(start + rows).min(tokens.len());
            let parts: Vec<_> = tokens.iter().map(|tokens| &tokens[part(tokens)]).collect();
            // True if this part has the sequence's last token.
            let ends = |s: usize| !parts[s].is_empty() && start + rows >= tokens[s].len();
            let wanted = if (0..parts.len()).any(ends) { Logits::Last } else { Logits::None };
            let (logits, lanes) = self.step(&parts, wanted)?;
            for (lane, logits) in logits.chunks(vocabulary).enumerate() {
                let s = lanes.unwrap_or(lane);
                if ends(s) {
                    found[s] = logits.to_vec();
                }
            }
        }
        Ok(found)
    }

    /// Runs one step with up to `rows` new tokens of each sequence.
    ///
    /// If only one sequence has new tokens, the step computes everything except attention for it
    /// alone, and returns its index. Logits are `[sequences, vocabulary]`, or
    /// `[sequences, rows, vocabulary]` for [`Logits::All`].
    pub fn step(&mut self, tokens: &[&[u32]], wanted: Logits) -> Fallible<(Vec<f32>, Option<usize>)> {
        let Sizes { width, heads, kv_heads, dim, inner, vocabulary, .. } = self.model.sizes;
        let Session { model, layout, cache, activations: a, scratch, .. } = self;
        let (model, batch) = (*model, layout.batch);
        let counts: Vec<usize> = tokens.iter().map(|tokens| tokens.len()).collect();
        let rows = counts.iter().copied().max().unwrap_or(0);
        if tokens.len() != batch || rows == 0 || rows > layout.rows {
            return Err(format!(
                "{} sequences of up to {rows} new tokens in a step for {batch} of {}",
                tokens.len(),
                layout.rows
            )
            .into());
        }
        if let Some(id) = tokens.iter().copied().flatten().find(|id| **id as usize >= vocabulary) {
            return Err(format!("there is no token {id}, only {vocabulary}").into());
        }
        let busy: Vec<usize> = (0..batch).filter(|s| counts[*s] > 0).collect();
        let alone = if let [one] = busy[..] { Some(one) } else { None };
        // The number of sequences in the products.
        let lanes = if alone.is_some() { 1 } else { batch };

        // Rows after a sequence's new tokens hold token 0, and no query attends to them.
        let mut ids = vec![0u32; lanes * rows];
        let of_lanes = tokens.iter().enumerate().filter(|(s, _)| alone.is_none_or(|one| one == *s));
        for (row, (_, tokens)) in ids.chunks_mut(rows).zip(of_lanes) {
            row[..tokens.len()].copy_from_slice(tokens);
        }
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        model.gpu.queue().write_buffer(&a.ids, 0, &bytes);
        let all_logits = match wanted {
            Logits::All => Some(model.gpu.buffer(4 * lanes * rows * vocabulary)?),
            _ => None,
        };

        let sequence = |buffer, channels| TensorView::sequence(buffer, DType::F32, [lanes, rows, channels]);
        let vector = |buffer| TensorView::vector(buffer, DType::F32, width);
        let together = TensorView::blhd(&a.qkv, DType::F32, [lanes, heads + 2 * kv_heads, rows, dim]);
        let part = |first, count| together.slice(1, first, count);
        // Attention takes all sequences. If only one has new tokens, the others alias its rows and
        // have length 0.
        let times = alone.map(|_| batch);
        let (q, k, v) = (part(0, heads), part(heads, kv_heads), part(heads + kv_heads, kv_heads));
        let attended = TensorView::blhd(&a.attended, DType::F32, [batch, heads, rows, dim]);
        let joined = TensorView::sequence(&a.attended, DType::F32, [batch, rows, heads * dim]);
        let joined = alone.map_or(joined, |one| joined.slice(0, one, 1));
        let pair = TensorView::blhd(&a.gate_up, DType::F32, [lanes, 2, rows, inner]);
        let (normed, added) = (sequence(&a.normed, width), sequence(&a.added, width));
        let streams = [sequence(&a.streams[0], width), sequence(&a.streams[1], width)];

        let longest = (0..batch).map(|s| cache.len(s).unwrap_or(0) + counts[s]).max().unwrap_or(0);
        let attention = &model.attention[usize::from(longest <= FEW_KEYS)];

        let mut encoder = model.gpu.device().create_command_encoder(&Default::default());
        let moves = if counts.iter().all(|n| *n == rows) { Tokens::All(rows) } else { Tokens::Each(&counts) };
        cache.advance(&mut encoder, moves)?;
        let starts = alone.map_or(cache.starts(), |one| cache.starts().slice(0, one, 1));
        let mut pass = encoder.begin_compute_pass(&Default::default());
        let pass_of = &mut pass;

        let ids = TensorView::new(&a.ids, DType::U32, [lanes, 1, rows, 1]);
        model.projection.rows(pass_of, &QuantizedRows::new(model.table.view(), ids, streams[0]))?;
        for (n, layer) in model.layers.iter().enumerate() {
            // This norm also adds the previous layer's output to the stream.
            let norm =
                NormForward::new(streams[usize::from(n > 0)], normed).weight(vector(&layer.attention_norm));
            let norm = if n > 0 { norm.residual(added).sum(streams[0]) } else { norm };
            model.norm.forward(pass_of, &norm)?;
            model.projection.forward(pass_of, &product_of(normed, &layer.qkv, together))?;
            let rotate = Rotate::new(q, &model.rope, RowPositions::Tensor(starts));
            model.positions.rotate(pass_of, &rotate)?;
            cache.append(pass_of, n, &Append::new(shown(k, times), shown(v, times)).rope(&model.rope))?;
            let call = Forward::with_cache(shown(q, times), &*cache, attended).layer(n).mask(Mask::causal());
            attention.forward(pass_of, &call, scratch)?;
            model.projection.forward(pass_of, &product_of(joined, &layer.out, added))?;
            let norm = NormForward::new(streams[0], normed).weight(vector(&layer.feed_forward_norm));
            model.norm.forward(pass_of, &norm.residual(added).sum(streams[1]))?;
            model.projection.forward(pass_of, &product_of(normed, &layer.gate_up, pair))?;
            let gated = ElementwiseForward::new(pair.slice(1, 0, 1), sequence(&a.inner, inner))
                .activation(Activation::Silu)
                .multiply(pair.slice(1, 1, 1));
            model.elementwise.forward(pass_of, &gated)?;
            model.projection.forward(pass_of, &product_of(sequence(&a.inner, inner), &layer.down, added))?;
        }
        let norm = NormForward::new(streams[1], normed).weight(vector(&model.last_norm));
        model.norm.forward(pass_of, &norm.residual(added).sum(streams[0]))?;
        if let Some(logits) = &all_logits {
            let product = QuantizedForward::new(normed, model.table.view(), sequence(logits, vocabulary));
            model.projection.forward(pass_of, &[product])?;
        }
        drop(pass);
        if wanted == Logits::Last {
            let row_bytes = 4 * width as u64;
            for lane in 0..lanes {
                let row = counts[alone.unwrap_or(lane)].max(1) - 1;
                let from = (lane * rows + row) as u64 * row_bytes;
                encoder.copy_buffer_to_buffer(&a.normed, from, &a.last, lane as u64 * row_bytes, row_bytes);
            }
            let one = |buffer, channels| TensorView::sequence(buffer, DType::F32, [lanes, 1, channels]);
            let product =
                QuantizedForward::new(one(&a.last, width), model.table.view(), one(&a.logits, vocabulary));
            model.projection.forward(&mut encoder, &[product])?;
        }
        model.gpu.queue().submit([encoder.finish()]);
        let logits = match (wanted, &all_logits) {
            (Logits::None, _) => Vec::new(),
            (_, Some(logits)) => model.gpu.download(logits, lanes * rows * vocabulary)?,
            _ => model.gpu.download(&a.logits, lanes * vocabulary)?,
        };
        Ok((logits, alone))
    }

    /// Returns the residual stream after the last layer, and its norm's output. Reads the first
    /// `rows` rows of the last step.
    #[cfg(test)]
    pub fn last_rows(&self, rows: usize) -> Fallible<[Vec<f32>; 2]> {
        let read = |buffer| self.model.gpu.download(buffer, rows * self.model.sizes.width);
        Ok([read(&self.activations.streams[0])?, read(&self.activations.normed)?])
    }
}

/// Repeats one sequence's rows `times` times, with stride 0.
fn shown(t: TensorView<'_>, times: Option<usize>) -> TensorView<'_> {
    let Some(times) = times else { return t };
    let ([_, heads, length, dim], [_, stride, row, column]) = (t.shape(), t.strides());
    TensorView::new(t.buffer(), t.dtype(), [times, heads, length, dim])
        .with_strides([0, stride, row, column])
        .with_offset(t.offset())
}

fn product_of<'a>(x: TensorView<'a>, matrix: &'a Matrix, out: TensorView<'a>) -> [QuantizedForward<'a>; 1] {
    [QuantizedForward::new(x, matrix.view(), out)]
}
