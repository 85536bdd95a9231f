//! The programs of docs/guide run, and agree with the reference. The pages show the files of this
//! folder: `WGPU_ATTENTION_WRITE=1` writes them into the pages.

mod beams;
mod gpt2;
mod gradients;
mod left_padded;
mod left_padded_steps;
mod llama;
mod one_pass;
mod own_encoder;
mod own_function;
mod threads;
mod warm_up;
mod without_f16;

use std::collections::BTreeSet;

use wgpu_attention::cache::{Append, CacheLayout, Tokens};
use wgpu_attention::layers::{NormOrder, TransformerLayerConfig};
use wgpu_attention::mask::At;
use wgpu_attention::matmul::Activation;
use wgpu_attention::position::{Positions, Rope, RopeConfig, RowPositions};
use wgpu_attention::reference::compare::{EPSILON_F16, EPSILON_F32, Tolerance, compare};
use wgpu_attention::reference::{self, Options, Real, widen};
use wgpu_attention::rows::{Embedding, NormConfig};
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Forward, Gpu, Linear, Mask, Projection, Scratch,
    ScratchSize, Shape, TensorView, TransformerEncoder, wgpu,
};

use crate::harness::case::largest;
use crate::harness::device::device;
use crate::harness::random::noise;
use crate::harness::{Profile, Rng, Rules, defaults, root};
use crate::ops::layers::stacks::data::Stack;

const PROGRAMS: [(&str, &str, &str); 12] = [
    ("start", "own_encoder", include_str!("own_encoder.rs")),
    ("masks", "left_padded", include_str!("left_padded.rs")),
    ("caches", "gpt2", include_str!("gpt2.rs")),
    ("caches", "llama", include_str!("llama.rs")),
    ("caches", "left_padded_steps", include_str!("left_padded_steps.rs")),
    ("caches", "beams", include_str!("beams.rs")),
    ("caches", "warm_up", include_str!("warm_up.rs")),
    ("training", "gradients", include_str!("gradients.rs")),
    ("own-functions", "own_function", include_str!("own_function.rs")),
    ("devices", "without_f16", include_str!("without_f16.rs")),
    ("embedding", "threads", include_str!("threads.rs")),
    ("embedding", "one_pass", include_str!("one_pass.rs")),
];

/// The block of code behind a program's mark.
fn block(program: &str) -> String {
    format!("```rust\n{program}```\n")
}

#[test]
fn guide_shows_tested_programs() {
    let pages: BTreeSet<&str> = PROGRAMS.iter().map(|(page, ..)| *page).collect();
    for page in pages {
        let path = root().join(format!("docs/guide/{page}.md"));
        let mut text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let before = text.clone();
        for (_, name, program) in PROGRAMS.iter().filter(|(of, ..)| *of == page) {
            let mark = format!("<!-- tests/laws/guide/{name}.rs -->\n");
            let start = text.find(&mark).unwrap_or_else(|| panic!("{page}.md: no {mark}")) + mark.len();
            let end = text[start..].find("\n```\n").unwrap_or_else(|| panic!("{page}.md: no end of {mark}"));
            text.replace_range(start..start + end + 5, &block(program));
        }
        if std::env::var_os("WGPU_ATTENTION_WRITE").is_some() {
            std::fs::write(&path, &text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            continue;
        }
        let again = "WGPU_ATTENTION_WRITE=1 cargo test -p tests --test tests -- guide";
        assert!(text == before, "{page}.md shows another program: {again}");
    }
}

/// Compares with the truth. The tolerance is twice the error of the same computation in f32.
fn agree(got: &[f32], truth: &[f64], naive: &[f32], magnitude: f64) {
    let tolerance = Tolerance::from_naive(&widen(naive), truth, magnitude, EPSILON_F32);
    compare(got, truth, tolerance).unwrap_or_else(|e| panic!("{e}"));
}

/// As [`agree`], of what `f` and `g` compute.
fn agree_of(got: &[f32], truth: impl Fn() -> Vec<f64>, naive: impl Fn() -> Vec<f32>) {
    let truth = truth();
    agree(got, &truth, &naive(), largest(truth.iter().copied()).max(1.0));
}

fn attention<R: Real>([q, k, v]: [&[f32]; 3], shape: Shape, options: &Options) -> Vec<R> {
    let [q, k, v] = [q, k, v].map(|x| widen::<R>(x));
    reference::attention(&q, &k, &v, shape, options).expect("a truth").out
}

/// Compares attention with the reference.
fn attends(got: &[f32], inputs: [&[f32]; 3], shape: Shape, options: &Options) {
    agree_of(got, || attention(inputs, shape, options), || attention(inputs, shape, options));
}

fn elements(shape: [usize; 4]) -> usize {
    shape.iter().product()
}

fn f32_view(buffer: &wgpu::Buffer, shape: [usize; 4]) -> TensorView<'_> {
    TensorView::new(buffer, DType::F32, shape)
}

fn room(gpu: &Gpu, shape: [usize; 4]) -> wgpu::Buffer {
    gpu.buffer(4 * elements(shape)).expect("memory")
}

fn upload(gpu: &Gpu, data: &[f32]) -> wgpu::Buffer {
    gpu.upload(data).expect("memory")
}

fn download(gpu: &Gpu, buffer: &wgpu::Buffer, shape: [usize; 4]) -> Vec<f32> {
    gpu.download(buffer, elements(shape)).expect("a result")
}

#[test]
fn own_encoder_matches_the_reference() {
    let gpu = &defaults().gpu;
    let shape = Shape::new(1, 8, 512, 64);
    let data = [0.1, 0.2, 0.3].map(|seed| noise(elements(shape.q()), seed));
    let [q, k, v] = data.each_ref().map(|x| upload(gpu, x));
    let out = room(gpu, shape.out());
    gpu.submit(|encoder| own_encoder::attend(gpu.device(), encoder, [&q, &k, &v, &out])).expect("a call");
    let [q, k, v] = data.each_ref().map(Vec::as_slice);
    attends(&download(gpu, &out, shape.out()), [q, k, v], shape, &Options::new().mask(Mask::causal()));
}

/// Each prompt gives the same as alone and without padding.
#[test]
fn left_padded_prompts_match_single_prompts() {
    let gpu = &defaults().gpu;
    let (shape, padding) = (Shape::new(3, 2, 12, 16), [0, 5, 11]);
    let data = [0.4, 0.5, 0.6].map(|seed| noise(elements(shape.q()), seed));
    let [q, k, v] = data.each_ref().map(|x| upload(gpu, x));
    let out = room(gpu, shape.out());
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::of(&shape)).expect("a configuration");
    let views = [&q, &k, &v, &out].map(|buffer| f32_view(buffer, shape.q()));
    left_padded::attend(gpu, &attention, views, &padding).expect("a call");
    let got = download(gpu, &out, shape.out());
    for (sequence, padding) in padding.into_iter().enumerate() {
        // The rows behind the padding of one prompt.
        let of = |x: &[f32]| -> Vec<f32> {
            let heads = x.chunks(shape.q_len * shape.head_dim).skip(sequence * shape.heads).take(shape.heads);
            heads.flat_map(|head| head[padding * shape.head_dim..].to_vec()).collect()
        };
        let alone = Shape::new(1, shape.heads, shape.q_len - padding, shape.head_dim);
        let [q, k, v] = data.each_ref().map(|x| of(x));
        attends(&of(&got), [&q, &k, &v], alone, &Options::new().mask(Mask::causal()));
    }
}

/// A stack of two layers with random weights.
fn stack(rng: &mut Rng, [batch, length]: [usize; 2], is_llama: bool) -> Stack {
    let stack = Stack {
        batch,
        length,
        heads: 4,
        kv_heads: if is_llama { 2 } else { 4 },
        features: 32,
        hidden: if is_llama { 48 } else { 128 },
        activation: if is_llama { Activation::Silu } else { Activation::GeluTanh },
        gated: is_llama,
        biased: !is_llama,
        order: NormOrder::Pre,
        qk_norm: None,
        output_gate: None,
        norm: if is_llama { NormConfig::rms().eps(1e-5) } else { NormConfig::layer() },
        rules: Rules { causal: true, ..Default::default() },
        rotary: None,
        each: Vec::new(),
        layers: Vec::new(),
        final_norm: None,
        transposed: false,
        x: Vec::new(),
    };
    Stack::random(rng, 2, true, stack)
}

/// The output of a stack for `x`.
fn encoded<R: Real>(stack: &Stack, config: &TransformerLayerConfig, x: &[R], options: &Options) -> Vec<R> {
    let rows = [stack.batch, stack.length];
    stack.on_host(|_, layers, last| {
        reference::encoder(x, rows, config, layers, last, options).expect("a truth").out
    })
}

fn cache_config(stack: &Stack, capacity: usize) -> CacheConfig {
    let head_dim = stack.features / stack.heads;
    CacheConfig::new(stack.kv_heads, head_dim, capacity).batch(stack.batch).layers(stack.layers.len())
}

fn scratch(gpu: &Gpu) -> Scratch {
    Scratch::new(gpu.device(), ScratchSize::default()).expect("no memory")
}

/// The rows `from..from + rows` of every sequence of `[batch, length, width]`.
fn rows_of<T: Copy>(x: &[T], [length, width]: [usize; 2], from: usize, rows: usize) -> Vec<T> {
    x.chunks(length * width).flat_map(|x| x[from * width..(from + rows) * width].to_vec()).collect()
}

/// Logits of a prompt and of single tokens, with a cache, against all tokens at once.
#[test]
fn gpt2_steps_match_the_reference() {
    const VOCABULARY: usize = 24;
    let profile = defaults();
    let gpu = &profile.gpu;
    let stack = stack(&mut Rng::named("gpt2"), [2, 9], false);
    let (batch, length, width) = (stack.batch, stack.length, stack.features);
    let config = gpt2::layers(width, stack.heads);
    let placed = stack.place(profile, DType::F32);
    let tables = [(VOCABULARY, 0.7), (length, 1.3)].map(|(rows, seed)| noise(rows * width, seed));
    let buffers = tables.each_ref().map(|table| upload(gpu, table));
    let pipelines = gpu.pipelines();
    let model = gpt2::Gpt2 {
        gpu: gpu.clone(),
        embedding: Embedding::with_pipelines(pipelines),
        positions: Positions::with_pipelines(pipelines),
        stack: placed.encoder(profile, config).expect("a stack"),
        projection: Projection::with_pipelines(pipelines),
        tables: [
            TensorView::matrix(&buffers[0], DType::F32, [VOCABULARY, width]),
            TensorView::matrix(&buffers[1], DType::F32, [length, width]),
        ],
    };
    let ids: Vec<u32> = (0..batch * length).map(|n| (n * 7 % VOCABULARY) as u32).collect();

    fn logits<R: Real>(
        stack: &Stack,
        config: &TransformerLayerConfig,
        ids: &[u32],
        tables: &[Vec<f32>; 2],
    ) -> Vec<R> {
        let [tokens, learned] = tables.each_ref().map(|table| widen::<R>(table));
        let width = stack.features;
        let x = reference::embedding(ids, &tokens, width, 1.0).expect("ids");
        let x: Vec<R> = x.iter().zip(learned.iter().cycle()).map(|(x, p)| *x + *p).collect();
        let y = encoded(stack, config, &x, &Options::new().mask(Mask::causal()));
        reference::project(&y, &tokens, None, width, tokens.len() / width).expect("logits")
    }
    let exact = logits::<f64>(&stack, &config, &ids, &tables);
    let naive = logits::<f32>(&stack, &config, &ids, &tables);

    let mut cache = Cache::with_pipelines(pipelines, cache_config(&stack, length)).expect("a cache");
    let mut scratch = scratch(gpu);
    let mut first = 0;
    for rows in [6, 1, 1, 1] {
        let ids = gpu.upload(&rows_of(&ids, [length, 1], first, rows)).expect("memory");
        let [x, y] = [(); 2].map(|()| room(gpu, [batch, 1, rows, width]));
        let out = room(gpu, [batch, 1, 1, VOCABULARY]);
        let sequence = |buffer, width| TensorView::sequence(buffer, DType::F32, [batch, rows, width]);
        let ids = TensorView::sequence(&ids, DType::U32, [batch, rows, 1]);
        let last = TensorView::sequence(&out, DType::F32, [batch, 1, VOCABULARY]);
        model
            .step(&mut cache, &mut scratch, ids, [sequence(&x, width), sequence(&y, width)], last)
            .expect("a step");
        first += rows;
        let got = download(gpu, &out, [batch, 1, 1, VOCABULARY]);
        let of = [length, VOCABULARY];
        let truth = rows_of(&exact, of, first - 1, 1);
        agree(&got, &truth, &rows_of(&naive, of, first - 1, 1), largest(exact.iter().copied()));
    }
}

/// A Llama on a device, its data and its positions.
struct Llama {
    profile: &'static Profile,
    stack: Stack,
    config: TransformerLayerConfig,
    encoder: TransformerEncoder,
    rope: Rope,
}

fn rope() -> RopeConfig {
    RopeConfig::new(8)
}

impl Llama {
    fn new(profile: &'static Profile, rows: [usize; 2]) -> Self {
        let stack = stack(&mut Rng::named("llama"), rows, true);
        let config = llama::layers(stack.features, stack.heads, stack.kv_heads, stack.hidden);
        let encoder = stack.place(profile, DType::F32).encoder(profile, config).expect("a stack");
        let rope = Rope::new(profile.gpu.device(), rope()).expect("a rope");
        Llama { profile, stack, config, encoder, rope }
    }

    /// Runs `rows` rows from row `first` on. Returns their outputs.
    fn step(&self, cache: &mut Cache, scratch: &mut Scratch, first: usize, rows: usize) -> Vec<f32> {
        let Llama { profile: Profile { gpu, .. }, stack, encoder, rope, .. } = self;
        let shape = [stack.batch, 1, rows, stack.features];
        let x = upload(gpu, &rows_of(&stack.x, [stack.length, stack.features], first, rows));
        let y = room(gpu, shape);
        let views = [&x, &y].map(|buffer| f32_view(buffer, shape));
        llama::step(gpu, encoder, rope, cache, scratch, views).expect("a step");
        download(gpu, &y, shape)
    }

    /// Compares the outputs of rows from row `first` on.
    fn check(&self, got: &[f32], first: usize) {
        let Llama { stack, config, .. } = self;
        let options = Options::new().mask(Mask::causal()).rotary(rope(), RowPositions::Start(0));
        let exact = encoded::<f64>(stack, config, &widen(&stack.x), &options);
        let naive = encoded::<f32>(stack, config, &stack.x, &options);
        let (of, rows) = ([stack.length, stack.features], got.len() / stack.batch / stack.features);
        let truth = rows_of(&exact, of, first, rows);
        agree(got, &truth, &rows_of(&naive, of, first, rows), largest(exact.iter().copied()));
    }
}

#[test]
fn llama_steps_match_the_reference() {
    let profile = defaults();
    let llama = Llama::new(profile, [2, 9]);
    let config = cache_config(&llama.stack, llama.stack.length);
    let mut cache = Cache::with_pipelines(profile.gpu.pipelines(), config).expect("a cache");
    let mut scratch = scratch(&profile.gpu);
    let mut first = 0;
    for rows in [6, 1, 2] {
        llama.check(&llama.step(&mut cache, &mut scratch, first, rows), first);
        first += rows;
    }
}

/// With a cache, the outputs of each left-padded prompt are those of the prompt alone.
#[test]
fn left_padded_steps_match_single_prompts() {
    let profile = defaults();
    let gpu = &profile.gpu;
    let llama = Llama::new(profile, [2, 9]);
    let Llama { stack, config, encoder, rope: turns, .. } = &llama;
    let (padding, capacity, width) = ([0, 3], stack.length + 2, stack.features);
    let seen: Vec<bool> = padding.iter().flat_map(|n| (0..capacity).map(move |key| key >= *n)).collect();
    let seen = gpu.upload_bools(&seen).expect("memory");
    let seen = TensorView::new(&seen, DType::Bool, [2, 1, 1, capacity]);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), cache_config(stack, capacity)).expect("a cache");
    let mut scratch = scratch(gpu);
    let mut got = [Vec::new(), Vec::new()];
    for (first, rows) in [(0, 7), (7, 1), (8, 1)] {
        let positions = padding.iter().flat_map(|n| (first..first + rows).map(move |row| row.max(*n) - n));
        let positions = gpu.upload(&positions.map(|n| n as u32).collect::<Vec<_>>()).expect("memory");
        let positions = TensorView::sequence(&positions, DType::U32, [2, rows, 1]);
        let shape = [2, 1, rows, width];
        let x = upload(gpu, &rows_of(&stack.x, [stack.length, width], first, rows));
        let y = room(gpu, shape);
        let views = [&x, &y].map(|buffer| f32_view(buffer, shape));
        left_padded_steps::step(gpu, (encoder, turns), &mut cache, &mut scratch, views, [seen, positions])
            .expect("a step");
        let out = download(gpu, &y, shape);
        out.chunks(rows * width).zip(&mut got).for_each(|(rows, got)| got.extend(rows));
    }
    for (sequence, padding) in padding.into_iter().enumerate() {
        let rows = |x: &[f32]| x[padding * width..].to_vec();
        let x = rows(&stack.x[sequence * stack.length * width..][..stack.length * width]);
        let alone = Stack { batch: 1, length: stack.length - padding, ..stack.clone() };
        let options = Options::new().mask(Mask::causal()).rotary(rope(), RowPositions::Start(0));
        let truth = || encoded::<f64>(&alone, config, &widen(&x), &options);
        agree_of(&rows(&got[sequence]), truth, || encoded::<f32>(&alone, config, &x, &options));
    }
}

/// After the warm-up, a prompt and single tokens compile nothing.
#[test]
fn warm_up_compiles_all_kernels() {
    let gpu = device(|_| ());
    let profile = Box::leak(Box::new(Profile { name: "warm up", gpu, matrix: false }));
    let (gpu, llama) = (&profile.gpu, Llama::new(profile, [2, 9]));
    let config = cache_config(&llama.stack, llama.stack.length);
    let mut scratch = scratch(gpu);
    warm_up::warm_up(gpu, config, 6, |cache, rows| {
        llama.step(cache, &mut scratch, 0, rows);
        Ok(())
    })
    .expect("a warm-up");
    let compiled = gpu.pipelines().compiled();
    assert!(compiled > 0);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
    for (first, rows) in [(0, 6), (6, 1), (7, 1), (8, 1)] {
        llama.check(&llama.step(&mut cache, &mut scratch, first, rows), first);
    }
    assert_eq!(gpu.pipelines().compiled(), compiled);
}

/// Each beam attends to the keys of its parent and to its new key, in every layout.
#[test]
fn beams_attend_to_their_parents() {
    let gpu = &defaults().gpu;
    const BEAMS: usize = 3;
    let (prompt, dim) = (5, 16);
    let shape = Shape::new(BEAMS, 2, prompt, dim);
    let new = Shape { q_len: 1, kv_len: 1, ..shape };
    let parents = [2, 0, 0];
    let [k, v] = [0.8, 0.9].map(|seed| noise(elements(shape.k()), seed));
    let [q_new, k_new, v_new] = [1.1, 1.2, 1.3].map(|seed| noise(elements(new.q()), seed));
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::of(&shape)).expect("a configuration");
    for layout in [CacheLayout::Contiguous, CacheLayout::Paged { page: 16, pages: 6 }] {
        let config = CacheConfig::new(2, dim, 16).batch(BEAMS).layout(layout);
        let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
        let buffers = [&k, &v].map(|x| upload(gpu, x));
        let [prompt_k, prompt_v] = buffers.each_ref().map(|buffer| f32_view(buffer, shape.k()));
        gpu.submit(|encoder| {
            cache.advance(encoder, Tokens::All(prompt))?;
            cache.append(encoder, 0, &Append::new(prompt_k, prompt_v))
        })
        .expect("a prompt");
        let inputs = [&q_new, &k_new, &v_new].map(|x| upload(gpu, x));
        let out = room(gpu, new.out());
        let [q, k_step, v_step] = inputs.each_ref().map(|buffer| f32_view(buffer, new.q()));
        let views = [q, k_step, v_step, f32_view(&out, new.out())];
        beams::step(gpu, &attention, &mut cache, &mut scratch(gpu), &parents, views).expect("a step");

        // The keys of a beam's parent, then its own, head by head.
        let joined = |old: &[f32], new: &[f32]| -> Vec<f32> {
            let rows = parents.iter().enumerate().flat_map(|(beam, parent)| {
                (0..2).flat_map(move |head| {
                    let old = &old[(parent * 2 + head) * prompt * dim..][..prompt * dim];
                    [old, &new[(beam * 2 + head) * dim..][..dim]].concat()
                })
            });
            rows.collect()
        };
        let (keys, values) = (joined(&k, &k_new), joined(&v, &v_new));
        let whole = Shape { kv_len: prompt + 1, ..new };
        let got = download(gpu, &out, new.out());
        attends(&got, [&q_new, &keys, &values], whole, &Options::new().mask(Mask::causal()));
    }
}

#[test]
fn recorded_threads_match_the_reference() {
    let gpu = &defaults().gpu;
    let shape = Shape::new(1, 2, 40, 16);
    let data: Vec<Vec<f32>> = (0..4).map(|n| noise(elements(shape.q()), 0.3 + 0.1 * n as f32)).collect();
    let inputs: Vec<_> = data.iter().map(|x| upload(gpu, x)).collect();
    let outputs: Vec<_> = data.iter().map(|_| room(gpu, shape.out())).collect();
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::of(&shape)).expect("a configuration");
    let calls = inputs.iter().zip(&outputs).map(|(x, out)| {
        let x = f32_view(x, shape.q());
        Forward::new(x, x, x, f32_view(out, shape.out())).mask(Mask::causal())
    });
    let calls: Vec<_> = calls.collect();
    gpu.queue().submit(threads::record(&attention, &calls).expect("command buffers"));
    for (x, out) in data.iter().zip(&outputs) {
        let options = Options::new().mask(Mask::causal());
        attends(&download(gpu, out, shape.out()), [x, x, x], shape, &options);
    }
}

/// A device without features stores and reads f16.
#[test]
fn f16_without_the_feature_matches_the_reference() {
    let gpu = &defaults().gpu;
    assert!(!gpu.device().features().contains(wgpu::Features::SHADER_F16));
    let shape = Shape::new(1, 2, 21, 16);
    let bits = [0.2, 0.5, 0.8].map(|seed| {
        let data = noise(elements(shape.q()), seed);
        data.into_iter().map(|x| half::f16::from_f32(x).to_bits()).collect::<Vec<_>>()
    });
    let [q, k, v] = bits.each_ref().map(Vec::as_slice);
    let got = without_f16::attend(gpu, [q, k, v], shape).expect("a result");
    let floats = |bits: &[u16]| bits.iter().map(|b| half::f16::from_bits(*b).to_f32()).collect::<Vec<f32>>();
    let data = [q, k, v].map(floats);
    let [q, k, v] = data.each_ref().map(Vec::as_slice);
    let options = Options::new().mask(Mask::causal());
    let truth = attention::<f64>([q, k, v], shape, &options);
    let naive = attention::<f32>([q, k, v], shape, &options);
    let naive: Vec<f64> = naive.iter().map(|x| half::f16::from_f32(*x).to_f64()).collect();
    let tolerance = Tolerance::from_naive(&naive, &truth, largest(truth.iter().copied()), EPSILON_F16);
    compare(&floats(&got), &truth, tolerance).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn one_pass_matches_the_reference() {
    let gpu = &defaults().gpu;
    let (length, width, heads) = (19, 24, 3);
    let shape = Shape::new(1, heads, length, width / heads);
    let x = noise(length * width, 0.7);
    let weights = [0.2, 0.3, 0.4].map(|seed| noise(width * width, seed));
    let x_buffer = upload(gpu, &x);
    let buffers = weights.each_ref().map(|weight| upload(gpu, weight));
    let linears = buffers
        .each_ref()
        .map(|buffer| Linear { weight: TensorView::matrix(buffer, DType::F32, [width, width]), bias: None });
    let tensors = [(); 4].map(|()| room(gpu, shape.q()));
    let views = tensors.each_ref().map(|buffer| f32_view(buffer, shape.q()));
    let pipelines = gpu.pipelines();
    let projection = Projection::with_pipelines(pipelines);
    let attention = Attention::with_pipelines(pipelines, Config::of(&shape)).expect("a configuration");
    let [q, k, v, out] = views;
    let size = attention.scratch_size(&Forward::new(q, k, v, out).mask(Mask::causal())).expect("a size");
    let mut scratch = Scratch::new(gpu.device(), size).expect("memory");
    let x_view = TensorView::sequence(&x_buffer, DType::F32, [1, length, width]);
    gpu.submit(|encoder| {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        one_pass::record(&mut pass, (&projection, &attention, &mut scratch), x_view, linears, views)
    })
    .expect("a call");

    fn truth<R: Real>(x: &[f32], weights: &[Vec<f32>; 3], shape: Shape) -> Vec<R> {
        let width = shape.heads * shape.head_dim;
        let [q, k, v] = weights.each_ref().map(|weight| {
            let y =
                reference::project::<R>(&widen(x), &widen(weight), None, width, width).expect("a product");
            reference::split_heads(&y, shape.q_len, shape.heads, shape.head_dim).expect("heads")
        });
        let options = Options::new().mask(Mask::causal());
        reference::attention(&q, &k, &v, shape, &options).expect("a truth").out
    }
    let got = download(gpu, &tensors[3], shape.out());
    agree_of(&got, || truth(&x, &weights, shape), || truth(&x, &weights, shape));
}

#[test]
fn gradients_match_the_reference() {
    let gpu = &defaults().gpu;
    let shape = Shape::new(1, 2, 17, 16);
    let data = [0.3, 0.6, 0.9, 1.2].map(|seed| noise(elements(shape.q()), seed));
    let inputs = data.each_ref().map(|x| upload(gpu, x));
    let outputs = [(); 4].map(|()| room(gpu, shape.q()));
    let lse = room(gpu, shape.lse());
    let [q, k, v, d_out] = inputs.each_ref().map(|buffer| f32_view(buffer, shape.q()));
    let [out, d_q, d_k, d_v] = outputs.each_ref().map(|buffer| f32_view(buffer, shape.q()));
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::of(&shape)).expect("a configuration");
    let lse = f32_view(&lse, shape.lse());
    gradients::train(gpu, &attention, [q, k, v, out, lse], [d_out, d_q, d_k, d_v]).expect("a step");

    fn of<R: Real>(data: &[Vec<f32>; 4], shape: Shape) -> [Vec<R>; 3] {
        let [q, k, v, d_out] = data.each_ref().map(|x| widen::<R>(x));
        let options = Options::new().mask(Mask::causal());
        let got = reference::attention_backward(&q, &k, &v, &d_out, None, shape, &options).expect("a truth");
        [got.d_q, got.d_k, got.d_v]
    }
    let (exact, naive) = (of::<f64>(&data, shape), of::<f32>(&data, shape));
    for ((buffer, exact), naive) in outputs[1..].iter().zip(&exact).zip(&naive) {
        let magnitude = largest(exact.iter().copied()).max(1.0);
        let tolerance = Tolerance::gradient(&widen(naive), exact, magnitude, EPSILON_F32);
        compare(&download(gpu, buffer, shape.q()), exact, tolerance).unwrap_or_else(|e| panic!("{e}"));
    }
}

#[test]
fn own_functions_match_the_closures() {
    let gpu = &defaults().gpu;
    // A block is longer than the table.
    let (shape, block) = (Shape::new(1, 2, 80, 16), 40);
    let table = noise(2 * 32, 0.4);
    let buffer = upload(gpu, &table);
    let own = own_function::mask(f32_view(&buffer, [1, 2, 1, 32]), block).expect("functions");
    let score = |score: f64, at: &At| {
        let distance = (i64::from(at.position) - i64::from(at.key)).unsigned_abs().min(31);
        score + f64::from(table[at.head as usize * 32 + distance as usize])
    };
    let sees = |at: &At| at.key / block == at.query / block;
    let host = Mask::none().score_fn(&score).mask_fn(&sees);
    gpu.compare_masks(&own, &host, shape, 1e-5).expect("equal masks");

    let data = [0.5, 0.7, 0.9].map(|seed| noise(elements(shape.q()), seed));
    let inputs = data.each_ref().map(|x| upload(gpu, x));
    let out = room(gpu, shape.out());
    let [q, k, v] = inputs.each_ref().map(|buffer| f32_view(buffer, shape.q()));
    let call = Forward::new(q, k, v, f32_view(&out, shape.out())).mask(own);
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::of(&shape)).expect("a configuration");
    let size = attention.scratch_size(&call).expect("a size");
    let mut scratch = Scratch::new(gpu.device(), size).expect("memory");
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch)).expect("a call");
    let [q, k, v] = data.each_ref().map(Vec::as_slice);
    attends(&download(gpu, &out, shape.out()), [q, k, v], shape, &Options::new().mask(host));
}
