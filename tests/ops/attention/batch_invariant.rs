//! With `KernelOptions::batch_invariant`, a row's bits do not depend on the other rows of a call.
//! They do not depend on other sequences, or on the lengths of steps.

use wgpu_attention::additive::{AdditiveAttention, AdditiveConfig, AdditiveForward};
use wgpu_attention::cache::{Append, CacheLayout, CacheStorage, ScaleGroup, Tokens};
use wgpu_attention::layers::{MultiHeadConfig, MultiHeadForward, MultiHeadWeights};
use wgpu_attention::linear_attention::{LinearAttention, LinearConfig};
use wgpu_attention::linformer::Linformer;
use wgpu_attention::lsh::{LshAttention, LshConfig};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::matmul::{
    ProjectionForward, QuantizedFormat, QuantizedForward, QuantizedMatrix, QuantizedProjection,
};
use wgpu_attention::recurrent::{RecurrentAttention, RecurrentConfig};
use wgpu_attention::rows::{Norm, NormConfig, NormForward};
use wgpu_attention::selected::{
    NativeSparseAttention, NativeSparseConfig, SelectedAttention, SelectedConfig,
};
use wgpu_attention::tuning::{Algorithm, MatrixUnits, Target};
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Error, Forward, Gpu, KernelOptions, Linear,
    MultiHeadAttention, Projection, Scratch, ScratchSize, TensorView,
};

use crate::harness::device::{full, with_registers};
use crate::harness::random::noise;
use crate::harness::{due, rest, say};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 20;
const ON: KernelOptions = KernelOptions::new().batch_invariant(true);

/// The tokens of a sequence: `[heads, tokens, DIM]` each.
struct Text {
    tokens: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Text {
    /// `size` is the size of the queries: large ones move the maxima of rows.
    fn new(tokens: usize, seed: f32, size: f32) -> Self {
        let of = |heads: usize, seed| noise(heads * tokens * DIM, seed);
        let q = of(HEADS, seed).iter().map(|x| x * size).collect();
        Text { tokens, q, k: of(KV_HEADS, seed + 0.3), v: of(KV_HEADS, seed + 0.7) }
    }
}

/// The rules of a call besides its cache.
#[derive(Clone, Copy, Debug)]
struct Rules {
    window: Option<usize>,
    sinks: bool,
    softcap: Option<f64>,
}

const CAUSAL: Rules = Rules { window: None, sinks: false, softcap: None };

/// Rows `first ..` of some texts, as `[batch, heads, rows, DIM]`. Rows past a text's new tokens
/// hold large numbers.
fn rows_of(
    texts: &[&Text],
    heads: usize,
    part: impl Fn(&Text) -> &[f32],
    firsts: &[usize],
    counts: &[usize],
) -> Vec<f32> {
    let rows = counts.iter().copied().max().unwrap_or(0);
    let mut out = Vec::with_capacity(texts.len() * heads * rows * DIM);
    for (n, text) in texts.iter().enumerate() {
        for head in 0..heads {
            let from = (head * text.tokens + firsts[n]) * DIM;
            out.extend_from_slice(&part(text)[from..from + counts[n] * DIM]);
            out.extend(std::iter::repeat_n(40.0, (rows - counts[n]) * DIM));
        }
    }
    out
}

/// Generates `texts` in `steps` of so many tokens of each. Returns the bits of the outputs of each
/// text, `[heads, tokens, DIM]`.
fn generated(
    gpu: &Gpu,
    options: KernelOptions,
    rules: Rules,
    config: CacheConfig,
    texts: &[&Text],
    steps: &[Vec<usize>],
) -> Vec<Vec<u32>> {
    let attention = Config::new(HEADS, DIM).kv_heads(KV_HEADS).softcap(rules.softcap).kernel_options(options);
    let attention = Attention::with_pipelines(gpu.pipelines(), attention).expect("an operator");
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config.batch(texts.len())).expect("a cache");
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    let sinks = gpu.upload(&[0.5f32, -0.5, 1.5, 0.0]).expect("an upload");
    let sinks = TensorView::new(&sinks, DType::F32, [1, HEADS, 1, 1]);
    let mut firsts = vec![0; texts.len()];
    let mut outs: Vec<Vec<u32>> = texts.iter().map(|text| vec![0; HEADS * text.tokens * DIM]).collect();
    for counts in steps {
        let rows = counts.iter().copied().max().expect("a sequence");
        let tensor = |heads, part: fn(&Text) -> &[f32]| {
            gpu.upload(&rows_of(texts, heads, part, &firsts, counts)).expect("an upload")
        };
        let q = tensor(HEADS, |text| &text.q);
        let [k, v] = [tensor(KV_HEADS, |text| &text.k), tensor(KV_HEADS, |text| &text.v)];
        let out = gpu.buffer(4 * texts.len() * HEADS * rows * DIM).expect("a buffer");
        let view = |buffer, heads| TensorView::new(buffer, DType::F32, [texts.len(), heads, rows, DIM]);
        gpu.submit(|encoder| {
            cache.advance(encoder, Tokens::Each(counts))?;
            cache.append(encoder, 0, &Append::new(view(&k, KV_HEADS), view(&v, KV_HEADS)))?;
            let mask = DeviceMask::causal();
            let mask = rules.window.map_or(mask, |left| mask.window(left, 0));
            let mask = if rules.sinks { mask.sink_logits(sinks) } else { mask };
            let call = Forward::with_cache(view(&q, HEADS), &cache, view(&out, HEADS)).mask(mask);
            scratch.ensure(gpu.device(), attention.scratch_size(&call)?)?;
            attention.forward(encoder, &call, &mut scratch)
        })
        .expect("a step");
        let got: Vec<u32> = gpu.download(&out, texts.len() * HEADS * rows * DIM).expect("a read-back");
        for (n, text) in texts.iter().enumerate() {
            for head in 0..HEADS {
                let from = (n * HEADS + head) * rows * DIM;
                let to = (head * text.tokens + firsts[n]) * DIM;
                outs[n][to..to + counts[n] * DIM].copy_from_slice(&got[from..from + counts[n] * DIM]);
            }
            firsts[n] += counts[n];
        }
    }
    assert!(firsts.iter().zip(texts).all(|(first, text)| *first == text.tokens), "whole texts");
    outs
}

/// Steps of a batch: the first texts' tokens come in the given pieces, in turn. All other tokens
/// come in the last step.
fn in_pieces(texts: &[&Text], pieces: &[&[usize]]) -> Vec<Vec<usize>> {
    let most = pieces.iter().map(|pieces| pieces.len()).max().unwrap_or(0);
    let mut left: Vec<usize> = texts.iter().map(|text| text.tokens).collect();
    let mut steps: Vec<Vec<usize>> = (0..most)
        .map(|step| {
            let of = |n: usize| pieces.get(n).and_then(|pieces| pieces.get(step)).copied().unwrap_or(0);
            let counts: Vec<usize> = (0..texts.len()).map(of).collect();
            left.iter_mut().zip(&counts).for_each(|(left, count)| *left -= count);
            counts
        })
        .collect();
    steps.push(left);
    steps
}

/// Counts the rows of a text whose bits differ.
fn differing(one: &[u32], other: &[u32]) -> usize {
    one.chunks(DIM).zip(other.chunks(DIM)).filter(|(a, b)| a != b).count()
}

/// Compares one text alone, in one step, with the same text in steps, and in a batch with others.
/// Returns the number of rows whose bits differ.
fn rows_that_differ(gpu: &Gpu, options: KernelOptions, rules: Rules, config: CacheConfig) -> usize {
    let (text, other, large) =
        (Text::new(1100, 0.4, 3.0), Text::new(300, 1.3, 2.0), Text::new(1090, 2.1, 60.0));
    let alone = [&text];
    let one = generated(gpu, options, rules, config, &alone, &in_pieces(&alone, &[]));
    // Rows of decode, of every tile, and past the first split.
    let pieces: [usize; 11] = [1, 1, 2, 3, 9, 17, 33, 65, 300, 591, 1];
    let steps = in_pieces(&alone, &[&pieces]);
    // With more capacity, a call has more splits.
    let longer = config.capacity(3000);
    let in_steps = generated(gpu, options, rules, longer, &alone, &steps);
    let batch = [&large, &text, &other];
    let steps = in_pieces(&batch, &[&[40, 1, 1, 500], &[3, 1, 5, 1000, 1], &[0, 1, 0, 30]]);
    let in_batch = generated(gpu, options, rules, longer, &batch, &steps);
    // A capacity below a split: results are not merged.
    let short = generated(gpu, options, rules, config.capacity(300), &[&other], &[vec![300]]);
    differing(&one[0], &in_steps[0]) + differing(&one[0], &in_batch[1]) + differing(&short[0], &in_batch[2])
}

fn storages() -> [CacheConfig; 4] {
    let config = CacheConfig::new(KV_HEADS, DIM, 1100);
    [
        config,
        config.storage(CacheStorage::F16),
        config.storage(CacheStorage::Q8(ScaleGroup::Row)),
        config.layout(CacheLayout::Paged { page: 16, pages: 160 }),
    ]
}

#[test]
fn rows_have_same_bits_in_steps_and_batches() {
    let gpu = &full().gpu;
    for (n, config) in storages().into_iter().enumerate() {
        let rules = [
            CAUSAL,
            Rules { window: Some(333), ..CAUSAL },
            Rules { sinks: true, ..CAUSAL },
            Rules { softcap: Some(5.0), window: Some(1030), sinks: true },
        ];
        for (m, rules) in rules.into_iter().enumerate() {
            // Every storage with some rules, and f32 with all of them.
            let name = format!("batch-invariant rows {n} {m}");
            if [n, m] == [0, 3] || (n == 0 || n == m) && due(&name) || rest(&name) {
                let differ = rows_that_differ(gpu, ON, rules, config);
                assert_eq!(differ, 0, "rows of {rules:?} in {config:?}");
            }
        }
    }
    for count in [64, 128, 256] {
        if due(&format!("batch-invariant rows with {count} registers")) {
            let differ = rows_that_differ(&with_registers(full(), count).gpu, ON, CAUSAL, storages()[0]);
            assert_eq!(differ, 0, "rows with {count} registers");
        }
    }
}

/// Without the option, bits depend on the call: otherwise the test above could not fail.
#[test]
fn rows_differ_without_the_option() {
    let differ = rows_that_differ(&full().gpu, KernelOptions::new(), CAUSAL, storages()[0]);
    assert!(differ > 0, "all rows have the same bits");
}

#[test]
fn results_match_those_without_the_option() {
    let gpu = &full().gpu;
    let text = Text::new(1100, 0.4, 3.0);
    let rules = Rules { sinks: true, ..CAUSAL };
    let run = |options| {
        let steps = in_pieces(&[&text], &[&[1000, 1]]);
        generated(gpu, options, rules, storages()[0], &[&text], &steps).swap_remove(0)
    };
    let floats = |bits: Vec<u32>| bits.into_iter().map(f32::from_bits).collect::<Vec<_>>();
    let (on, off) = (floats(run(ON)), floats(run(KernelOptions::new())));
    let worst = on.iter().zip(&off).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
    say(&format!("batch-invariant attention: at most {worst:e} from other plans"));
    // Both are means of values below 1, with an error of some roundings.
    assert!(worst < 4e-6, "{worst}");
}

/// Runs `record` on the first rows of x, for several numbers of rows, and compares each row's bits.
/// Rows of x have 64 elements, rows of the output `cols`.
fn same_rows(what: &str, cols: usize, record: impl Fn(&Gpu, TensorView, TensorView) -> Result<(), Error>) {
    const ROWS: usize = 140;
    let gpu = &full().gpu;
    let x = gpu.upload(&noise(ROWS * 64, 0.3)).expect("an upload");
    let run = |rows: usize| {
        let out = gpu.buffer(4 * rows * cols).expect("a buffer");
        let view = |buffer, width| TensorView::sequence(buffer, DType::F32, [1, rows, width]);
        record(gpu, view(&x, 64), view(&out, cols)).expect(what);
        gpu.download::<u32>(&out, rows * cols).expect("a read-back")
    };
    let all = run(ROWS);
    for rows in [1, 2, 3, 5, 8, 9, 16, 17, 33, 65, 139] {
        assert!(run(rows) == all[..rows * cols], "{what}: other bits in {rows} rows");
    }
}

#[test]
fn products_and_norms_have_same_bits() {
    let gpu = &full().gpu;
    let pipelines = gpu.pipelines();
    let weight = gpu.upload(&noise(64 * 64, 0.9)).expect("an upload");
    for target in [Target::Gpu, Target::Software] {
        let on = ON.target(target);
        for cols in [20, 64] {
            let product = Projection::with_pipelines(pipelines).kernel_options(on);
            let weight = Linear { weight: TensorView::matrix(&weight, DType::F32, [cols, 64]), bias: None };
            same_rows(&format!("product, {target:?}"), cols, |gpu, x, y| {
                gpu.submit(|e| product.forward(e, &[ProjectionForward::new(x, weight, y)]))
            });
        }
        for format in QuantizedFormat::ALL {
            let product = QuantizedProjection::with_pipelines(pipelines).kernel_options(on);
            // Blocks of finite numbers: a scale of about 1, and any bytes.
            let blocks = vec![0x3c00_3c00u32; 64 * 64];
            let blocks = gpu.upload(&blocks).expect("an upload");
            let matrix = QuantizedMatrix::new(&blocks, format, [20, 64]);
            same_rows(&format!("{format:?}, {target:?}"), 20, |gpu, x, y| {
                gpu.submit(|e| product.forward(e, &[QuantizedForward::new(x, matrix, y)]))
            });
        }
        let norm = Norm::with_pipelines(pipelines, NormConfig::layer()).expect("a norm").kernel_options(on);
        same_rows(&format!("norm, {target:?}"), 64, |gpu, x, y| {
            gpu.submit(|e| norm.forward(e, &NormForward::new(x, y)))
        });
    }
}

/// A call that cannot have the option is refused, with the option's name.
#[test]
fn calls_that_depend_on_rows_are_refused() {
    let gpu = &full().gpu;
    let pipelines = gpu.pipelines();
    let buffer = gpu.buffer(1 << 16).expect("a buffer");
    let refused = |what: &str, result: Result<(), Error>| {
        let error = result.expect_err(what).to_string();
        assert!(error.contains("batch_invariant"), "{what}: {error}");
    };
    let view = |shape| TensorView::new(&buffer, DType::F32, shape);
    let [q, k, out] =
        [(0, 4), (1024, 9), (4096, 4)].map(|(first, rows)| view([1, 2, rows, 8]).with_offset(first));
    let size = |options: KernelOptions, weights: bool| {
        let config = Config::new(2, 8).kernel_options(options);
        let attention = Attention::with_pipelines(pipelines, config)?;
        let call = Forward::new(q, k, k, out);
        let call = if weights { call.weights(view([1, 2, 4, 9]).with_offset(8192)) } else { call };
        attention.scratch_size(&call).map(|_| ())
    };
    size(ON, false).expect("a plain call");
    refused("weights", size(ON, true));
    refused("the staged path", size(ON.algorithm(Algorithm::Staged), false));
    refused("software kernels", size(ON.target(Target::Software), false));
    refused("matrix units", size(ON.matrix_units(MatrixUnits::Always), false));
    refused("splits", size(ON.splits(2), false));
    let long = CacheConfig::new(2, 8, (1 << 17) + 1);
    let mut cache = Cache::with_pipelines(pipelines, long).expect("a cache");
    gpu.submit(|e| cache.advance(e, Tokens::All(4))).expect("an advance");
    let attention = Attention::with_pipelines(pipelines, Config::new(2, 8).kernel_options(ON));
    let attention = attention.expect("an operator");
    let size = attention.scratch_size(&Forward::with_cache(q, &cache, out).mask(DeviceMask::causal()));
    refused("too many keys", size.map(|_| ()));

    let additive = AdditiveAttention::with_pipelines(pipelines, AdditiveConfig::new(2, 8).kernel_options(ON));
    let vector = view([1, 2, 1, 8]).with_offset(8192);
    let call = AdditiveForward::new(q, k, k, vector, out);
    refused("additive attention", additive.and_then(|a| a.scratch_size(&call)).map(|_| ()));
    let linear = LinearAttention::with_pipelines(pipelines, LinearConfig::new(2, 8).kernel_options(ON));
    refused("linear attention", linear.map(|_| ()));
    let recurrent = RecurrentConfig::new(2, 8).kernel_options(ON);
    refused("recurrent attention", RecurrentAttention::with_pipelines(pipelines, recurrent).map(|_| ()));
    let lsh = LshConfig::new(2, 8, 1, 4, 8).kernel_options(ON);
    refused("LSH attention", LshAttention::with_pipelines(pipelines, lsh).map(|_| ()));
    let native = NativeSparseConfig::new(Config::new(2, 8).kernel_options(ON));
    refused("native sparse", NativeSparseAttention::with_pipelines(pipelines, native).map(|_| ()));
    let linear = Linear { weight: view([1, 1, 8, 8]), bias: None };
    let [query, key, value, projection] = [linear; 4];
    let weights =
        MultiHeadWeights { query, key, value, out: projection, bias_kv: None, qk_norm: None, gate: None };
    let config = MultiHeadConfig::new(8, 2).add_zero_attn(true);
    let layer = MultiHeadAttention::with_pipelines(pipelines, config, &weights).expect("a layer");
    let rows = |first| view([1, 1, 4, 8]).with_offset(first);
    let call = MultiHeadForward::self_attention(rows(1024), rows(2048));
    refused("appended keys", layer.kernel_options(ON).scratch_size(&call).map(|_| ()));
    let config = Config::new(2, 8).kernel_options(ON);
    refused("Linformer", Linformer::with_pipelines(pipelines, config, 4).map(|_| ()));
    let selected = SelectedConfig::new(Config::new(2, 8).kernel_options(ON));
    refused("selected attention", SelectedAttention::with_pipelines(pipelines, selected).map(|_| ()));
}
