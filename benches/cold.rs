//! `MESA_SHADER_CACHE_DISABLE=true scripts/gpu cargo bench -p benches --bench cold`, with the
//! options `--only TEXT` and `--as-gpu`.
//!
//! The cold start of two small models. It prints each step's new pipelines, the host's time to
//! record it, and the time of its first submission. Some drivers compile in that submission. Times
//! are of one run each, because nothing can be cold twice. The last line is
//! the least time of a warm token. With `--as-gpu` plans are those of a GPU, also on a software
//! driver. The models have random weights, and nothing is compared: tests do that.

use std::time::Instant;

use common::device::{self, Opened};
use common::settings;
use common::timer::noise;
use wgpu_attention::cache::Tokens;
use wgpu_attention::layers::{
    EncoderForward, EncoderLayerWeights, FeedForwardWeights, MultiHeadConfig, MultiHeadWeights, NormOrder,
    TransformerLayerConfig,
};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::matmul::{Activation, ProjectionForward};
use wgpu_attention::position::{Rope, RopeConfig, RowPositions};
use wgpu_attention::rows::{Embedding, EmbeddingForward, NormConfig, NormWeights, TopK, TopKForward};
use wgpu_attention::{
    Cache, CacheConfig, DType, Error, Gpu, Linear, Projection, Recorder, Scratch, ScratchSize, TensorView,
    TransformerEncoder, WarmUp, inspect, wgpu,
};

const WIDTH: usize = 256;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const LAYERS: usize = 4;
const VOCABULARY: usize = 512;
const PROMPT: usize = 64;
const CAPACITY: usize = 1024;
const WARM_TOKENS: usize = 200;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// GPT-2: layer norms, learned positions, biases, GELU.
    Gpt,
    /// Llama: RMS norms, rotation, grouped heads, a gate with SiLU.
    Llama,
}

/// Uploads random weights, different ones each time.
struct Weights<'a> {
    gpu: &'a Gpu,
    seed: u32,
}

impl Weights<'_> {
    fn of(&mut self, n: usize) -> Result<wgpu::Buffer, Error> {
        self.seed += 1;
        let data: Vec<f32> = noise(n, self.seed).iter().map(|x| 0.05 * x).collect();
        self.gpu.upload(&data)
    }
}

struct Model {
    kind: Kind,
    gpu: Gpu,
    /// The embeddings of tokens, then of positions.
    tables: [wgpu::Buffer; 2],
    rope: Rope,
    stack: TransformerEncoder,
    embedding: Embedding,
    projection: Projection,
    top: TopK,
    cache: Cache,
    scratch: Scratch,
}

impl Model {
    fn new(gpu: Gpu, kind: Kind) -> Result<Self, Error> {
        let llama = kind == Kind::Llama;
        let (kv_width, hidden) = (if llama { KV_HEADS * WIDTH / HEADS } else { WIDTH }, 4 * WIDTH);
        let mut weights = Weights { gpu: &gpu, seed: 0 };
        let tables = [weights.of(VOCABULARY * WIDTH)?, weights.of(CAPACITY * WIDTH)?];
        // Rows and columns of the matrices of query, key, value and output. Then those of the
        // feed-forward layer: up, down and gate.
        let shapes = [
            [WIDTH, WIDTH],
            [kv_width, WIDTH],
            [kv_width, WIDTH],
            [WIDTH, WIDTH],
            [hidden, WIDTH],
            [WIDTH, hidden],
            [hidden, WIDTH],
        ];
        let mut matrix = |[rows, columns]: [usize; 2]| Ok([weights.of(rows * columns)?, weights.of(rows)?]);
        let all = (0..LAYERS).map(|_| shapes.into_iter().map(&mut matrix).collect());
        let all = all.collect::<Result<Vec<Vec<[wgpu::Buffer; 2]>>, Error>>()?;
        let [scale, shift] = [weights.of(WIDTH)?, weights.of(WIDTH)?];

        let vector = |buffer, n| Some(TensorView::vector(buffer, DType::F32, n));
        let bias = (!llama).then_some(&shift).and_then(|shift| vector(shift, WIDTH));
        let norm = NormWeights { weight: vector(&scale, WIDTH), bias };
        let layers: Vec<_> = all
            .iter()
            .map(|layer| {
                let linear = |n: usize| Linear {
                    weight: TensorView::matrix(&layer[n][0], DType::F32, shapes[n]),
                    bias: if llama { None } else { vector(&layer[n][1], shapes[n][0]) },
                };
                let [query, key, value, out, up, down, gate] = std::array::from_fn(linear);
                let attention =
                    MultiHeadWeights { query, key, value, out, bias_kv: None, qk_norm: None, gate: None };
                let feed_forward = FeedForwardWeights { up, gate: llama.then_some(gate), down };
                EncoderLayerWeights { attention, feed_forward, norms: [norm; 2] }
            })
            .collect();
        let attention = MultiHeadConfig::new(WIDTH, HEADS).kv_heads(if llama { KV_HEADS } else { HEADS });
        let config = TransformerLayerConfig::new(attention, hidden)
            .activation(if llama { Activation::Silu } else { Activation::GeluTanh })
            .gated(llama)
            .norm(if llama { NormConfig::rms() } else { NormConfig::layer() })
            .order(NormOrder::Pre);
        let pipelines = gpu.pipelines();
        let stack = TransformerEncoder::with_pipelines(pipelines, config, &layers, Some(norm))?;
        let kv_heads = if llama { KV_HEADS } else { HEADS };
        let config = CacheConfig::new(kv_heads, WIDTH / HEADS, CAPACITY).layers(LAYERS);
        Ok(Model {
            kind,
            tables,
            rope: Rope::new(gpu.device(), RopeConfig::new(WIDTH / HEADS))?,
            stack,
            embedding: Embedding::with_pipelines(pipelines),
            projection: Projection::with_pipelines(pipelines),
            top: TopK::with_pipelines(pipelines),
            cache: Cache::with_pipelines(pipelines, config)?,
            scratch: Scratch::new(gpu.device(), ScratchSize::default())?,
            gpu,
        })
    }

    /// Computes the next token after `rows` tokens. Returns the seconds of recording, and of
    /// waiting for the device.
    fn step(&mut self, first: usize, rows: usize) -> Result<[f64; 2], Error> {
        let start = Instant::now();
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        self.record(&mut encoder, first, rows)?;
        let recorded = start.elapsed().as_secs_f64();
        let start = Instant::now();
        self.gpu.queue().submit([encoder.finish()]);
        self.gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("the device is there");
        Ok([recorded, start.elapsed().as_secs_f64()])
    }

    fn record(&mut self, into: &mut impl Recorder, first: usize, rows: usize) -> Result<(), Error> {
        let Model { kind, gpu, tables, rope, stack, embedding, projection, top, cache, scratch } = self;
        let ids: Vec<u32> = (0..rows).map(|n| (n * 7 % VOCABULARY) as u32).collect();
        let places: Vec<u32> = (first..first + rows).map(|n| n as u32).collect();
        let (ids, places) = (gpu.upload(&ids)?, gpu.upload(&places)?);
        let [x, y] = [gpu.buffer(4 * rows * WIDTH)?, gpu.buffer(4 * rows * WIDTH)?];
        let [logits, chosen] = [gpu.buffer(4 * VOCABULARY)?, gpu.buffer(4)?];
        let [token_table, position_table] = [(0, VOCABULARY), (1, CAPACITY)]
            .map(|(n, rows)| TensorView::matrix(&tables[n], DType::F32, [rows, WIDTH]));
        let sequence = |buffer, rows, width| TensorView::sequence(buffer, DType::F32, [1, rows, width]);
        let numbers = |buffer, rows| TensorView::sequence(buffer, DType::U32, [1, rows, 1]);
        let (x, y) = (sequence(&x, rows, WIDTH), sequence(&y, rows, WIDTH));
        let (logits, tied) = (sequence(&logits, 1, VOCABULARY), Linear { weight: token_table, bias: None });

        embedding.forward(into, &EmbeddingForward::new(numbers(&ids, rows), token_table, x))?;
        if *kind == Kind::Gpt {
            let at = EmbeddingForward::new(numbers(&places, rows), position_table, x);
            embedding.forward(into, &at.accumulate(true))?;
        }
        cache.advance(into, Tokens::All(rows))?;
        let call = EncoderForward::new(x, y).mask(DeviceMask::causal()).cache(&*cache);
        let call = match kind {
            Kind::Gpt => call,
            Kind::Llama => call.rotary(&*rope, RowPositions::Tensor(cache.starts())),
        };
        scratch.ensure(gpu.device(), stack.scratch_size(&call)?)?;
        stack.forward(into, &call, scratch)?;
        projection.forward(into, &[ProjectionForward::new(y.slice(2, rows - 1, 1), tied, logits)])?;
        top.forward(into, &TopKForward::new(logits, numbers(&chosen, 1)))
    }

    /// Compiles what a step of `rows` tokens needs. Returns the seconds.
    fn warm_up(&mut self, rows: usize) -> Result<f64, Error> {
        let start = Instant::now();
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        self.record(&mut WarmUp(&mut encoder), 0, rows)?;
        self.gpu.queue().submit([encoder.finish()]);
        self.gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("the device is there");
        self.cache.clear(0)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

fn main() -> Result<(), Error> {
    let only = settings::argument("--only").unwrap_or_default();
    for (name, kind, warms) in [
        ("GPT-2", Kind::Gpt, false),
        ("Llama", Kind::Llama, false),
        ("GPT-2 after a warm-up", Kind::Gpt, true),
        ("Llama after a warm-up", Kind::Llama, true),
    ] {
        if !name.contains(&only) {
            continue;
        }
        let Opened { mut gpu, .. } = device::open();
        if std::env::args().any(|argument| argument == "--as-gpu") {
            gpu = Gpu::with_pipelines(gpu.queue().clone(), inspect::as_gpu(gpu.device(), None));
        }
        println!("\n{name} on {}: {LAYERS} layers, {WIDTH} wide", gpu.device().adapter_info().name);
        println!("step                      pipelines  recording, s  first run, s");
        let pipelines = gpu.pipelines().clone();
        let mut model = Model::new(gpu, kind)?;
        if warms {
            let took = model.warm_up(PROMPT)? + model.warm_up(1)?;
            println!("{:24} {:10} {took:13.3}", "the warm-up", pipelines.compiled());
        }
        let mut length = 0;
        for (step, rows) in [
            ("the prompt", PROMPT),
            ("a token", 1),
            ("another token", 1),
            ("a short prompt", PROMPT / 4),
            ("a long prompt", 6 * PROMPT),
            ("a token", 1),
        ] {
            let before = pipelines.compiled();
            let [recorded, ran] = model.step(length, rows)?;
            length += rows;
            println!("{step:24} {:10} {recorded:13.3} {ran:13.3}", pipelines.compiled() - before);
        }
        println!("{:24} {:10}", "in all", pipelines.compiled());
        let times = (length..length + WARM_TOKENS).map(|first| model.step(first, 1).map(|[_, ran]| ran));
        let least = times.collect::<Result<Vec<_>, _>>()?.into_iter().fold(f64::INFINITY, f64::min);
        println!("{:24} {least:38.6}", "a warm token");
    }
    Ok(())
}
