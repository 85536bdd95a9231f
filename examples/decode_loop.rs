//! Generates text token by token with a cache, as an application would.
//!
//! Four prompts of different lengths share a paged 8-bit cache, with rotary positions. Each step
//! reads the logits back and chooses the next tokens. The model is one attention layer between an
//! embedding and its transpose. Its weights are random, so the text has no meaning.
//!
//! `scripts/gpu cargo run --release --example decode_loop`

use std::time::Instant;

use wgpu_attention::cache::{Append, CacheLayout, CacheStorage, ScaleGroup, Tokens};
use wgpu_attention::matmul::ProjectionForward;
use wgpu_attention::position::{Positions, Rope, RopeConfig, Rotate, Rotation, RowPositions};
use wgpu_attention::reference;
use wgpu_attention::reference::compare::max_error;
use wgpu_attention::reference::widen;
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Error, Forward, Gpu, Linear, Mask, Projection, Scratch,
    ScratchSize, Shape, TensorView, wgpu,
};

const TOKENS: usize = 512;
const PROMPTS: [usize; 4] = [5, 64, 17, 1];
const BATCH: usize = PROMPTS.len();
const VOCABULARY: usize = 256;
const WIDTH: usize = 256;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const STORAGE: CacheStorage = CacheStorage::Q8(ScaleGroup::Of(32));
const PAGE: usize = 64;

fn noise(n: usize, seed: usize, size: f32) -> Vec<f32> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(seed as u64 + 1) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| size * next()).collect()
}

/// The weights and the operators.
struct Model {
    gpu: Gpu,
    embedding: Vec<f32>,
    weights: [wgpu::Buffer; 5],
    rope: Rope,
    projection: Projection,
    positions: Positions,
    attention: Attention,
}

/// The tensors of a step with up to `rows` tokens of every sequence.
struct Step {
    rows: usize,
    x: wgpu::Buffer,
    q: wgpu::Buffer,
    k: wgpu::Buffer,
    v: wgpu::Buffer,
    attended: wgpu::Buffer,
    joined: wgpu::Buffer,
    logits: wgpu::Buffer,
}

impl Model {
    fn new(gpu: &Gpu) -> Result<Self, Error> {
        let pipelines = gpu.pipelines();
        let embedding = noise(VOCABULARY * WIDTH, 1, 1.0);
        let scale = (3.0 / WIDTH as f32).sqrt();
        let weight = |rows: usize, columns: usize, seed| gpu.upload(&noise(rows * columns, seed, scale));
        Ok(Model {
            gpu: gpu.clone(),
            weights: [
                weight(HEADS * DIM, WIDTH, 2)?,
                weight(KV_HEADS * DIM, WIDTH, 3)?,
                weight(KV_HEADS * DIM, WIDTH, 4)?,
                weight(WIDTH, HEADS * DIM, 5)?,
                gpu.upload(&embedding)?,
            ],
            embedding,
            rope: Rope::new(gpu.device(), RopeConfig::new(DIM))?,
            projection: Projection::with_pipelines(pipelines),
            positions: Positions::with_pipelines(pipelines),
            attention: Attention::with_pipelines(pipelines, Config::new(HEADS, DIM).kv_heads(KV_HEADS))?,
        })
    }

    /// Records one step: from the embeddings in `step.x` to the logits after each token.
    fn step(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        step: &Step,
        cache: &mut Cache,
        rows: Tokens,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let heads = |buffer, heads| TensorView::new(buffer, DType::F32, [BATCH, heads, step.rows, DIM]);
        let sequence = |buffer, width| TensorView::sequence(buffer, DType::F32, [BATCH, step.rows, width]);
        let linear = |n: usize, shape| Linear {
            weight: TensorView::matrix(&self.weights[n], DType::F32, shape),
            bias: None,
        };
        let product = |x, n, shape, out| ProjectionForward::new(x, linear(n, shape), out);
        let (x, q, k, v) = (
            sequence(&step.x, WIDTH),
            heads(&step.q, HEADS),
            heads(&step.k, KV_HEADS),
            heads(&step.v, KV_HEADS),
        );

        cache.advance(encoder, rows)?;
        let kv = KV_HEADS * DIM;
        let products = [
            product(x, 0, [HEADS * DIM, WIDTH], q),
            product(x, 1, [kv, WIDTH], k),
            product(x, 2, [kv, WIDTH], v),
        ];
        self.projection.forward(encoder, &products)?;
        let at = RowPositions::Tensor(cache.starts());
        self.positions.rotate(encoder, &Rotate::new(q, Rotation::Rope(&self.rope), at))?;
        cache.append(encoder, 0, &Append::new(k, v).rope(&self.rope))?;
        // The heads of a token are contiguous, as the next product reads them.
        let joined = TensorView::blhd(&step.attended, DType::F32, [BATCH, HEADS, step.rows, DIM]);
        let call = Forward::with_cache(q, cache, joined).mask(Mask::causal());
        self.attention.forward(encoder, &call, scratch)?;
        let attended = sequence(&step.attended, HEADS * DIM);
        let out = product(attended, 3, [WIDTH, HEADS * DIM], sequence(&step.joined, WIDTH));
        self.projection.forward(encoder, &[out])?;
        let logits = product(
            sequence(&step.joined, WIDTH),
            4,
            [VOCABULARY, WIDTH],
            sequence(&step.logits, VOCABULARY),
        );
        self.projection.forward(encoder, &[logits])
    }

    /// Writes the embeddings of the next tokens. Sequences with fewer tokens than the step's rows
    /// are filled with zeros.
    fn embed(&self, step: &Step, tokens: [&[usize]; BATCH]) {
        let mut x = vec![0.0; BATCH * step.rows * WIDTH];
        for (sequence, tokens) in x.chunks_mut(step.rows * WIDTH).zip(tokens) {
            for (row, token) in sequence.chunks_mut(WIDTH).zip(tokens) {
                row.copy_from_slice(&self.embedding[token * WIDTH..][..WIDTH]);
            }
        }
        self.gpu.queue().write_buffer(&step.x, 0, bytemuck::cast_slice(&x));
    }

    /// Returns the likeliest token after row `rows[s] − 1` of every sequence.
    fn choose(&self, step: &Step, rows: [usize; BATCH]) -> Result<[usize; BATCH], Error> {
        let logits: Vec<f32> = self.gpu.download(&step.logits, BATCH * step.rows * VOCABULARY)?;
        Ok(std::array::from_fn(|s| {
            let row = &logits[(s * step.rows + rows[s] - 1) * VOCABULARY..][..VOCABULARY];
            (0..VOCABULARY).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap_or(0)
        }))
    }
}

impl Step {
    fn new(gpu: &Gpu, rows: usize) -> Result<Self, Error> {
        let buffer = |width: usize| gpu.buffer(4 * BATCH * rows * width);
        Ok(Step {
            rows,
            x: buffer(WIDTH)?,
            q: buffer(HEADS * DIM)?,
            k: buffer(KV_HEADS * DIM)?,
            v: buffer(KV_HEADS * DIM)?,
            attended: buffer(HEADS * DIM)?,
            joined: buffer(WIDTH)?,
            logits: buffer(VOCABULARY)?,
        })
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = Gpu::new()?;
    println!("{}", gpu.device().adapter_info().name);
    let model = Model::new(&gpu)?;

    // Reserve all pages before the loop, so that no step allocates pages on the host.
    let capacity = PROMPTS.into_iter().max().unwrap_or(0) + TOKENS;
    let lengths = PROMPTS.map(|prompt| prompt + TOKENS);
    let pages = lengths.iter().map(|n| n.div_ceil(PAGE)).sum();
    let config = CacheConfig::new(KV_HEADS, DIM, capacity)
        .batch(BATCH)
        .storage(STORAGE)
        .layout(CacheLayout::Paged { page: PAGE, pages });
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config)?;
    for (sequence, tokens) in lengths.into_iter().enumerate() {
        cache.reserve(sequence, tokens)?;
    }

    // Process all prompts in one step, each with its length.
    let mut texts: [Vec<usize>; BATCH] =
        std::array::from_fn(|s| (0..PROMPTS[s]).map(|i| (i * 31 + s * 57) % VOCABULARY).collect());
    let prefill = Step::new(&gpu, PROMPTS.into_iter().max().unwrap_or(1))?;
    let one = Step::new(&gpu, 1)?;
    let size = |rows| {
        let q = TensorView::new(&prefill.q, DType::F32, [BATCH, HEADS, rows, DIM]);
        let out = TensorView::new(&prefill.attended, DType::F32, [BATCH, HEADS, rows, DIM]);
        let call = Forward::with_cache(q, &cache, out).at_end();
        model.attention.scratch_size(&call)
    };
    let largest = [prefill.rows, 1]
        .into_iter()
        .map(size)
        .try_fold(ScratchSize::default(), |a, b| Ok::<_, Error>(a.max(b?)))?;
    let mut scratch = Scratch::new(gpu.device(), largest)?;
    model.embed(&prefill, texts.each_ref().map(Vec::as_slice));
    gpu.submit(|encoder| model.step(encoder, &prefill, &mut cache, Tokens::Each(&PROMPTS), &mut scratch))?;
    let mut next = model.choose(&prefill, PROMPTS)?;

    // The loop. It saves outputs for the check below; an application would not.
    let mut outputs = Vec::new();
    let mut started = Instant::now();
    let mut steps = 0;
    for step in 0..TOKENS {
        if step == 8 {
            // Restart the clock: the first steps may include compilation.
            (started, steps) = (Instant::now(), 0);
        }
        (0..BATCH).for_each(|s| texts[s].push(next[s]));
        model.embed(&one, next.each_ref().map(std::slice::from_ref));
        gpu.submit(|encoder| model.step(encoder, &one, &mut cache, Tokens::All(1), &mut scratch))?;
        next = model.choose(&one, [1; BATCH])?;
        steps += 1;
        outputs.push(gpu.download::<f32>(&one.attended, BATCH * HEADS * DIM)?);
    }
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{TOKENS} tokens for {BATCH} sequences, {:.0} tokens/s with {:.2} ms a step",
        (BATCH * steps) as f64 / seconds,
        seconds * 1e3 / steps as f64
    );
    let tokens: usize = lengths.iter().sum();
    let read = config.token_bytes() * tokens / BATCH;
    let least = 2 * KV_HEADS * DIM * tokens / BATCH;
    println!(
        "a token of the last step reads {:.1} KB of keys and values: {:.2} of the floor, its bytes without their scales; in f32 it \
         would be {:.1} KB",
        read as f64 / 1e3,
        read as f64 / least as f64,
        4.0 * least as f64 / 1e3
    );
    println!(
        "lengths {:?}, {} of {pages} pages free, scratch {:.1} KB",
        (0..BATCH).map(|s| cache.len(s)).collect::<Vec<_>>(),
        cache.free_pages(),
        scratch.size().total() as f64 / 1e3
    );

    check(&model, &texts, &outputs)
}

/// Checks each sequence with the CPU reference: causal attention of all its tokens at once. The
/// keys and values are the device's, rounded to the cache's 8-bit storage.
fn check(
    model: &Model,
    texts: &[Vec<usize>; BATCH],
    outputs: &[Vec<f32>],
) -> Result<(), Box<dyn std::error::Error>> {
    for (s, text) in texts.iter().enumerate() {
        let rows = text.len();
        let x: Vec<f32> = text.iter().flat_map(|t| &model.embedding[t * WIDTH..][..WIDTH]).copied().collect();
        let x = model.gpu.upload(&x)?;
        let sizes = [HEADS, KV_HEADS, KV_HEADS];
        let buffers = sizes.map(|heads| model.gpu.buffer(4 * heads * rows * DIM));
        let mut rotated = Vec::new();
        for (n, (buffer, heads)) in buffers.into_iter().zip(sizes).enumerate() {
            let buffer = buffer?;
            let out = TensorView::new(&buffer, DType::F32, [1, heads, rows, DIM]);
            let weight = TensorView::matrix(&model.weights[n], DType::F32, [heads * DIM, WIDTH]);
            let x = TensorView::sequence(&x, DType::F32, [1, rows, WIDTH]);
            let product = ProjectionForward::new(x, Linear { weight, bias: None }, out);
            model.gpu.submit(|encoder| {
                model.projection.forward(encoder, &[product])?;
                if n == 2 {
                    return Ok(());
                }
                let rotate = Rotate::new(out, Rotation::Rope(&model.rope), RowPositions::Start(0));
                model.positions.rotate(encoder, &rotate)
            })?;
            rotated.push(model.gpu.download::<f32>(&buffer, heads * rows * DIM)?);
        }
        let kept = |x: &[f32]| -> Vec<f64> {
            x.chunks(DIM).flat_map(|row| widen::<f64>(&reference::cache::stored(STORAGE, row))).collect()
        };
        let shape = Shape { kv_heads: KV_HEADS, ..Shape::new(1, HEADS, rows, DIM) };
        let options = reference::Options::new().mask(Mask::causal());
        let (q, k, v) = (widen::<f64>(&rotated[0]), kept(&rotated[1]), kept(&rotated[2]));
        let want = reference::attention::<f64>(&q, &k, &v, shape, &options)?.out;
        let exact =
            reference::attention::<f64>(&q, &widen(&rotated[1]), &widen(&rotated[2]), shape, &options)?.out;
        let (mut error, mut cost) = (0.0f64, 0.0f64);
        for (step, out) in outputs.iter().enumerate() {
            let position = PROMPTS[s] + step;
            let at = |x: &[f64]| -> Vec<f64> {
                x.chunks(rows * DIM).flat_map(|head| head[position * DIM..][..DIM].to_vec()).collect()
            };
            let got: Vec<f64> = widen(&out[s * HEADS * DIM..][..HEADS * DIM]);
            error = error.max(max_error(&got, &at(&want)));
            cost = cost.max(max_error(&got, &at(&exact)));
        }
        println!(
            "sequence {s}, {rows} tokens: off by {error:.1e} from prefill over 8-bit keys and values, {cost:.1e} from exact ones"
        );
        // A value halfway between two levels may be rounded to either, which the limit allows.
        if error.is_nan() || error > 2e-3 {
            return Err(format!("sequence {s} is off by {error:e}").into());
        }
    }
    Ok(())
}
