//! Positions, keys rotated into caches, merges, block maps from the device, stages around
//! attention, stacks of layers.

use std::time::Duration;

use wgpu_attention::cache::CacheLayout;
use wgpu_attention::layers::NormOrder;
use wgpu_attention::linear_attention::{FeatureMap, RandomFeatures, UpdateRule};
use wgpu_attention::mask::Pattern;
use wgpu_attention::matmul::{Activation, QuantizedFormat};
use wgpu_attention::position::{
    MAX_POSITION, RopeConfig, RopeOrder, RopeScaling, RopeSections, RowPositions,
};
use wgpu_attention::recurrent::Decay;
use wgpu_attention::reference::{LshShape, classify};
use wgpu_attention::rows::NormConfig;
use wgpu_attention::tuning::{
    Algorithm, Family, Measured, Target, TuningBudget, TuningCache, Verdict, Workload,
};
use wgpu_attention::{DType, Gpu, Pipelines, Shape};

use super::attention::SHAPE;
use super::{Work, one_buffer};
use crate::harness::cached::rotation::{DIM, rotated_steps};
use crate::harness::classify::classified;
use crate::harness::faults::{Fault, faulty};
use crate::harness::indexer::{IndexerCase, IndexerSetup, indexer_shape};
use crate::harness::linear::LinearCase;
use crate::harness::merge::{Cut, merged};
use crate::harness::native::{NativeCase, Numbers};
use crate::harness::positions::axes_places;
use crate::harness::positions::{Setup, normals};
use crate::harness::recurrent::RecurrentCase;
use crate::harness::selected::SelectedCase;
use crate::harness::{
    Case, HostData, Layout, OperatorSetup, Profile, Rules, attentional, linformer, local, lsh, row_stages,
    stacks,
};

pub enum Other {
    /// Rows rotated in place or into another tensor, of one type.
    Rotate(RopeOrder, DType, bool),
    /// Rows rotated on three axes, of one type.
    RotateOnAxes(RopeSections, DType),
    /// Rotation by tables of cosines and sines of a dtype.
    RotateBy(RopeOrder, DType),
    /// A sum with sinusoids.
    Sinusoid,
    /// A sum with a learned table of a type.
    Learned(DType),
    /// Steps of a cache whose keys are rotated.
    RotatedCache(RopeConfig, CacheLayout),
    /// Attention to parts of the keys, with outputs of one type, merged into another type.
    Merge([DType; 2], Algorithm),
    /// Keys and values projected along the length, and gradients, of one type.
    Linformer(DType),
    /// Attention within buckets of a hash, and gradients, of one type.
    Lsh(DType),
    /// Linear attention and its gradients, causal or not.
    Linear(Box<LinearCase>, DType, Target),
    /// Linear attention in steps, with a state.
    LinearSteps(Box<LinearCase>),
    /// Recurrent attention and its gradients.
    Recurrent(Box<RecurrentCase>, DType, Target),
    /// Scores, best keys and gradients of an indexer, of one type of queries and keys.
    Indexer(Box<IndexerCase>, DType, Target),
    /// Attention to selected keys and its gradients.
    Selected(Box<SelectedCase>, DType, Target),
    /// Native sparse attention and its gradients.
    Native(Box<NativeCase>, DType, Target),
    /// An attentional vector and its gradients, of one type.
    Attentional(DType),
    /// Attention around positions, and its gradients, of one type.
    Local(DType),
    /// Positions that hidden states predict, and gradients.
    Predicted(DType),
    /// Rows of a table by their ids, and the table's gradient, of one type.
    Embedding(DType),
    /// Means of masked rows, scaled to length 1, and their gradient, of one type.
    MeanPool(DType),
    /// A causal convolution with states, and its gradients, of one type.
    CausalConv(DType),
    /// A norm with a gate before or after it, and its gradients, of one type.
    GatedNorm(bool, DType),
    /// Log-softmax, its gradient and the top k of rows, of one type.
    Logits(DType),
    /// A top-k with the numbers of columns and results.
    TopK([usize; 2], DType),
    /// The norm of a sum, and its gradients, of one type.
    Norm(NormConfig, DType),
    /// An activation times another tensor, gradients, and a sum.
    Elementwise(Activation, DType),
    /// A number of rows of a product with quantised weights, and rows of a table.
    Quantized(QuantizedFormat, usize, DType),
    /// Rows sorted by some bits of their keys.
    RadixSort,
    /// Vectors as direction and length, and gradients, of one type.
    WeightNorm(DType),
    /// Attention and its gradients with all tensors in one buffer.
    OneBuffer(Algorithm, DType),
    /// A stack of encoder layers, and gradients.
    Encoder(stacks::Kind),
    /// A stack of decoder layers, at once or in steps.
    Decoder(stacks::Kind, Option<&'static [usize]>),
    /// A block map that the device makes.
    Classify(Box<Rules>),
    /// The check of the device, with its real kernels and with faulty ones.
    Check,
    /// A tuning of small calls. The built-in plan wins, because the budget leaves no time for
    /// candidates.
    Tune,
}

impl Other {
    /// True for stages around attention in models, and for stacks of their layers.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn is_of_models(&self) -> bool {
        matches!(
            self,
            Other::Embedding(_)
                | Other::MeanPool(_)
                | Other::CausalConv(_)
                | Other::GatedNorm(..)
                | Other::Logits(_)
                | Other::TopK(..)
                | Other::Norm(..)
                | Other::Elementwise(..)
                | Other::Quantized(..)
                | Other::RadixSort
                | Other::WeightNorm(_)
                | Other::Encoder(_)
                | Other::Decoder(..)
        )
    }

    /// Returns the largest error over tolerance.
    pub async fn run(&self, profile: &'static Profile, name: &str) -> Result<f64, String> {
        let setup = |layout, x, out| Setup { profile, layout, x, out, back: false };
        let x = normals(name, [2, 3, 5, 14]);
        let places = HostData::new(vec![3, 0, 300, 65_536, 70_000, 16_777_215, 256, 1, 9, 511], [2, 1, 5, 1]);
        match self {
            Other::Rotate(order, dtype, in_place) => {
                let layout = if *in_place { Layout::Window(7) } else { Layout::Blhd };
                let setup = setup(layout, *dtype, (!in_place).then_some(*dtype));
                setup.rotate_async(&x, RopeConfig::new(6).order(*order), &RowPositions::Tensor(places)).await
            }
            Other::RotateOnAxes(sections, dtype) => {
                let config = RopeConfig::new(14).sections(*sections);
                let at = RowPositions::Tensor(axes_places([2, 3, 5, 1]));
                setup(Layout::Blhd, *dtype, Some(*dtype)).rotate_async(&x, config, &at).await
            }
            Other::RotateBy(order, dtype) => {
                let [cos, sin] = ["cos", "sin"].map(|name| normals(name, [2, 1, 9, 3]));
                let setup = setup(Layout::Blhd, DType::F32, Some(DType::F32));
                let at = RowPositions::Start(4);
                setup.rotate_by_async(&x, *order, ([&cos, &sin], *dtype), &at).await
            }
            Other::Sinusoid => {
                let setup = setup(Layout::Dense, DType::F32, Some(DType::F32));
                setup.add_sinusoid_async(&x, 10_000.0, &RowPositions::Start(MAX_POSITION - 4), 2.5).await
            }
            Other::Learned(dtype) => {
                let table = normals("a learned table", [1, 1, 9, 14]);
                let setup = setup(Layout::Window(7), DType::F32, None);
                setup.add_learned_async(&x, (&table, *dtype), &RowPositions::Start(4), -0.5).await
            }
            Other::RotatedCache(config, layout) => rotated_steps(profile, *config, *layout).await,
            Other::Merge(dtypes, path) => {
                let case = Case::random(name, SHAPE).stored(dtypes[0], DType::F32);
                merged(&case, &Cut { profile, path: *path, dtypes: *dtypes, at: &[1, 33] }).await
            }
            Other::Linformer(dtype) => {
                let case = linformer::Case::random(name, SHAPE, 12, true).masked(true);
                let setup = linformer::Setup::plain(profile, Target::Auto, Layout::Window(7));
                case.outcome_async(&linformer::Setup { dtype: *dtype, accumulates: true, ..setup }).await
            }
            Other::Lsh(dtype) => {
                let shape = LshShape { batch: 2, heads: 2, length: 40, head_dim: 8, value_dim: 8 };
                let case = lsh::Case::random(name, shape, [2, 18, 16]).causal().lengths(&[40, 21]);
                let setup = lsh::Setup::plain(profile, Target::Auto, Layout::Window(7));
                case.outcome_async(&lsh::Setup { dtype: *dtype, ..setup }).await
            }
            Other::Linear(case, dtype, form) => {
                let case = case.stored(*dtype);
                let setup = in_window(profile, *dtype, *form);
                let (forward, _) = case.forward_async(&setup).await?;
                Ok(forward.max(case.backward_async(&setup).await?))
            }
            Other::LinearSteps(case) => {
                let setup = in_window(profile, DType::F32, Target::Auto);
                case.in_steps_async(&setup, &[30, 1, case.shape.q_len - 31]).await
            }
            Other::Recurrent(case, dtype, form) => {
                let case = case.stored(*dtype, *dtype);
                let setup = in_window(profile, *dtype, *form);
                let ratio = case.forward_async(&setup).await?.ratio;
                Ok(ratio.max(case.backward_async(&setup).await?.0))
            }
            Other::Selected(case, dtype, form) => {
                let case = case.stored(*dtype);
                let setup = in_window(profile, *dtype, *form);
                let ratio = case.forward_async(&setup, *dtype == DType::F16).await?.ratio;
                Ok(ratio.max(case.backward_async(&setup).await?.0))
            }
            Other::Native(case, dtype, form) => {
                let setup = in_window(profile, *dtype, *form);
                let ratio = case.forward_async(&setup).await?.ratio;
                Ok(ratio.max(case.backward_async(&setup).await?.0))
            }
            Other::Attentional(dtype) => {
                let (sizes, layout) = ([2, 5, 12, 8, 20], Layout::Window(7));
                attentional::outcome_async(sizes, *dtype, layout, Target::Auto, true, profile).await
            }
            Other::Indexer(case, dtype, form) => {
                let setup = IndexerSetup {
                    profile,
                    form: *form,
                    dtypes: [*dtype, DType::F32],
                    wide_gradients: true,
                    layout: Layout::Window(7),
                    group: None,
                };
                let ratio = case.forward_async(&setup).await?;
                let ratio = ratio.max(case.forward_async(&IndexerSetup { group: Some(4), ..setup }).await?);
                Ok(ratio.max(case.backward_async(&setup, true).await?.0))
            }
            Other::Local(dtype) => {
                let case = local::Case::random(name, SHAPE, 5, *dtype == DType::F32);
                let case = case.with(|c| c.lengths = Some(vec![70, 21]));
                let plain = local::Setup::plain(profile, Layout::Window(7));
                let setup = local::Setup {
                    dtype: *dtype,
                    gradient: *dtype,
                    weights: true,
                    accumulates: true,
                    ..plain
                };
                case.outcome_async(&setup).await
            }
            Other::Predicted(dtype) => {
                let (sizes, layout) = ([2, 5, 12, 20], Layout::Window(7));
                let lengths = Some(vec![9, 40]);
                local::predicted_async(sizes, lengths, *dtype, layout, Target::Auto, true, profile).await
            }
            Other::Embedding(dtype) => row_stages::embedding(profile, *dtype).await,
            Other::MeanPool(dtype) => row_stages::mean_pool(profile, *dtype).await,
            Other::CausalConv(dtype) => row_stages::causal_conv(profile, *dtype).await,
            Other::GatedNorm(first, dtype) => row_stages::gated_norm(profile, *first, *dtype).await,
            Other::Logits(dtype) => row_stages::logits(profile, *dtype).await,
            Other::TopK([columns, k], dtype) => row_stages::top_k(profile, *columns, *k, *dtype).await,
            Other::Norm(config, dtype) => row_stages::norm(profile, *config, *dtype).await,
            Other::Elementwise(activation, dtype) => {
                row_stages::elementwise(profile, *activation, *dtype).await
            }
            Other::Quantized(format, rows, dtype) => {
                row_stages::quantized(profile, *format, *rows, *dtype).await
            }
            Other::OneBuffer(path, dtype) => one_buffer::same_bits(profile, *path, *dtype).await,
            Other::RadixSort => row_stages::radix_sort(profile).await,
            Other::WeightNorm(dtype) => row_stages::weight_norm(profile, *dtype).await,
            Other::Encoder(kind) => stacks::encoder(name, *kind, profile).await,
            Other::Decoder(kind, steps) => stacks::decoder(name, *kind, *steps, profile).await,
            Other::Check => checked(&profile.gpu).await,
            Other::Tune => tuned(&profile.gpu).await,
            Other::Classify(rules) => {
                let (size, heads) = ([16, 16], [2, 4]);
                let want = classify(&rules.host(), SHAPE, size, heads).map_err(|e| e.to_string())?;
                let got = classified(profile, rules, &SHAPE, size, heads).await.map_err(|e| e.to_string())?;
                if got == want { Ok(0.0) } else { Err(format!("{got:?}, not {want:?}")) }
            }
        }
    }
}

fn in_window(profile: &'static Profile, dtype: DType, form: Target) -> OperatorSetup {
    let layout = Layout::Window(7);
    OperatorSetup { profile, form, dtype, gradient: dtype, layout, accumulates: dtype == DType::F32 }
}

/// Feature maps, masks of keys, packed sequences, random features, the rules of a state.
fn linear_cases() -> Vec<(&'static str, Other)> {
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 70, kv_len: 70, head_dim: 8, value_dim: 12 };
    let one = Shape { batch: 1, ..shape };
    let of = |name: &str, shape, map, causal| LinearCase::random(name, shape, map, causal);
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    let [gpu, cpu] = [Target::Gpu, Target::Software];
    let favor = FeatureMap::Random { kind: RandomFeatures::Positive, directions: 16 };
    let rfa = FeatureMap::Random { kind: RandomFeatures::Fourier, directions: 8 };
    let masked = of("linear, key mask", shape, FeatureMap::Elu, false)
        .with(|c| c.key_mask = Some(HostData::of([2, 1, 1, 70], |[b, _, _, j]| (b + j) % 3 != 0)));
    let packed = |map| of("linear, packed", one, map, true).with(|c| c.starts = Some(vec![0, 3, 40, 66]));
    let gated = of("linear, gated", shape, FeatureMap::Elu, true).with(|c| {
        c.rule = UpdateRule::Averaged;
        c.decay = (0..2 * 2 * 70).map(|n| 0.5 + (n % 9) as f32 / 20.0).collect();
    });
    let linear = |case: LinearCase, dtype, form| Other::Linear(Box::new(case), dtype, form);
    vec![
        ("linear attention, causal", linear(of("linear", shape, FeatureMap::Elu, true), f32, gpu)),
        ("linear attention, causal, cpu", linear(of("linear", shape, FeatureMap::Elu, true), f16, cpu)),
        ("linear attention, key mask", linear(masked.clone(), f32, cpu)),
        ("linear attention, key mask, bf16", linear(masked, bf16, gpu)),
        ("linear attention, packed sequences", linear(packed(FeatureMap::Elu), f32, gpu)),
        ("linear attention, packed random features", linear(packed(favor), f32, cpu)),
        ("linear attention, random features", linear(of("favor", one, favor, true), f32, gpu)),
        ("linear attention, Fourier features", linear(of("rfa", one, rfa, false), f32, cpu)),
        ("linear attention, steps", Other::LinearSteps(Box::new(of("steps", one, FeatureMap::Elu, true)))),
        ("linear attention, gated steps", Other::LinearSteps(Box::new(gated))),
    ]
}

/// The rules of recurrent attention, packed sequences and few tokens.
fn recurrent_cases() -> Vec<(&'static str, Other)> {
    let shape = Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 70, kv_len: 70, head_dim: 8, value_dim: 12 };
    let few = Shape { q_len: 3, kv_len: 3, ..shape };
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    let [gpu, cpu] = [Target::Gpu, Target::Software];
    let of = |name: &str, shape, decay, delta| RecurrentCase::random(name, shape, decay, delta).with_states();
    let packed = of("recurrent, packed", shape, Decay::PerHead, true);
    let packed = packed.with(|c| c.starts = Some(vec![0, 3, 3, 66])).with_states();
    let recurrent = |case: RecurrentCase, dtype, form| Other::Recurrent(Box::new(case), dtype, form);
    let named = |shape, decay, delta| of("recurrent", shape, decay, delta);
    vec![
        ("recurrent, gated delta", recurrent(named(shape, Decay::PerHead, true), f32, gpu)),
        ("recurrent, gated delta, cpu", recurrent(named(shape, Decay::PerHead, true), f16, cpu)),
        ("recurrent, KDA", recurrent(named(shape, Decay::PerChannel, true), bf16, gpu)),
        ("recurrent, GLA, cpu", recurrent(named(shape, Decay::PerChannel, false), f32, cpu)),
        ("recurrent, packed sequences", recurrent(packed, f32, gpu)),
        ("recurrent, few tokens", recurrent(named(few, Decay::PerHead, true), f32, gpu)),
    ]
}

/// Lists for all heads, key/value heads and query heads; blocks, a window, sinks, latent values.
fn selected_cases() -> Vec<(&'static str, Other)> {
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 5, kv_len: 90, head_dim: 12, value_dim: 8 };
    let latent_shape = Shape { batch: 1, kv_heads: 1, ..shape };
    let one = Shape { q_len: 1, ..shape };
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    let [gpu, cpu] = [Target::Gpu, Target::Software];
    let of = |name: &str, shape, lists, block| {
        SelectedCase::random(name, shape, lists, block).with(|c| c.case.rules.causal = true)
    };
    let with_sinks = |case: SelectedCase| {
        case.with(|c| {
            c.window = 3;
            c.case.rules.sinks = Some(HostData::new(vec![0.5, -1.0, 0.25, 1.5], [1, 4, 1, 1]));
        })
    };
    let latent = |case: SelectedCase| case.with(|c| c.latent = true);
    let shared = |shape| of("selected", shape, [1, 14], 1);
    let selected = |case: SelectedCase, dtype, form| Other::Selected(Box::new(case), dtype, form);
    vec![
        ("selected keys", selected(shared(shape), f32, gpu)),
        ("selected keys, cpu", selected(with_sinks(shared(shape)), f32, cpu)),
        ("selected keys of key/value heads", selected(of("kv heads", shape, [2, 9], 1), f16, gpu)),
        ("selected keys of query heads, cpu", selected(of("heads", shape, [4, 9], 1), bf16, cpu)),
        ("selected blocks", selected(with_sinks(of("blocks", shape, [2, 4], 8)), bf16, gpu)),
        ("selected keys, latent", selected(latent(of("latent", latent_shape, [1, 14], 1)), f32, gpu)),
        ("selected keys, latent, cpu", selected(latent(of("latent", latent_shape, [1, 14], 1)), f16, cpu)),
        ("selected keys, one query", selected(shared(one), f32, gpu)),
    ]
}

/// Native sparse attention, with means and with separate keys for each branch.
fn native_cases() -> Vec<(&'static str, Other)> {
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 21, kv_len: 90, head_dim: 12, value_dim: 8 };
    let one = Shape { q_len: 1, ..shape };
    let numbers = Numbers { compression: [8, 4], selection: [8, 4], always: [1, 1], window: 9 };
    let of = |name: &str, shape| Box::new(NativeCase::random(name, shape, numbers));
    let own = Box::new(NativeCase::random("own", shape, numbers).with_own([true; 2]));
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    let [gpu, cpu] = [Target::Gpu, Target::Software];
    vec![
        ("native sparse attention", Other::Native(of("means", shape), f32, gpu)),
        ("native sparse attention, f16", Other::Native(of("means", shape), f16, gpu)),
        ("native sparse attention, own keys, cpu", Other::Native(own, bf16, cpu)),
        ("native sparse attention, one query, cpu", Other::Native(of("one", one), f32, cpu)),
    ]
}

/// Indexers of every type, on both targets.
fn indexer_cases() -> Vec<(&'static str, Other)> {
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    let [gpu, cpu] = [Target::Gpu, Target::Software];
    let of = |name: &str, sizes, selected| {
        let rules = Rules { causal: true, ..Rules::default() };
        Box::new(IndexerCase::random(name, indexer_shape(sizes), rules, selected))
    };
    vec![
        ("indexer", Other::Indexer(of("indexer", [1, 4, 9, 70, 16], 12), f32, gpu)),
        ("indexer, thousands of keys", Other::Indexer(of("many keys", [1, 2, 3, 2200, 8], 2200), f32, gpu)),
        ("indexer, f16", Other::Indexer(of("indexer, f16", [2, 3, 5, 20, 8], 25), f16, gpu)),
        ("indexer, bf16, cpu", Other::Indexer(of("indexer, bf16", [1, 33, 3, 30, 12], 5), bf16, cpu)),
    ]
}

/// Stacks with pre- and post-norm, gated and not, of every type.
fn stacked() -> Vec<(&'static str, Other)> {
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    let [gpu, cpu] = [Target::Gpu, Target::Software];
    let bert = stacks::Kind {
        order: NormOrder::Post,
        gated: false,
        activation: Activation::Gelu,
        form: gpu,
        dtype: f32,
    };
    let llama = stacks::Kind {
        order: NormOrder::Pre,
        gated: true,
        activation: Activation::Silu,
        form: cpu,
        dtype: f32,
    };
    vec![
        ("encoder", Other::Encoder(bert)),
        ("encoder, gated, norms first, bf16", Other::Encoder(stacks::Kind { dtype: bf16, ..llama })),
        ("decoder", Other::Decoder(bert, None)),
        ("decoder, gated, norms first, f16", Other::Decoder(stacks::Kind { dtype: f16, ..llama }, None)),
        ("decoder in steps", Other::Decoder(llama, Some(&[1, 3, 2]))),
    ]
}

/// The check passes the driver's real kernels, and finds kernels that scale a result or do not
/// compile.
async fn checked(gpu: &Gpu) -> Result<f64, String> {
    let own = Pipelines::new(gpu.device());
    let check = async |pipelines: &Pipelines| {
        pipelines.check_async(gpu.queue()).await.map_err(|e| format!("no report: {e}"))
    };
    let report = check(&own).await?;
    if report.wrong().next().is_some() {
        return Err(report.to_string());
    }
    let share = |family| match report.verdict(family) {
        Verdict::Right { share } => Some(*share),
        _ => None,
    };
    let used = |families: [Family; 2]| families.into_iter().find(|family| share(*family).is_some());
    let faults = [
        (used([Family::StagedGpu, Family::StagedCpu]), Fault::Scaled),
        (used([Family::ProductsGpu, Family::ProductsCpu]), Fault::DoesNotCompile),
    ];
    for (family, fault) in faults {
        let family = family.ok_or_else(|| report.to_string())?;
        let (faulty, _) = faulty(gpu, &own, family, fault);
        let found = check(faulty.pipelines()).await?;
        if found.wrong().ne([family]) {
            return Err(format!("{fault:?} in {family}:\n{found}"));
        }
    }
    Ok(report.findings().filter_map(|(family, _)| share(family)).fold(0.0, f64::max))
}

/// Tuning times the calls, finds them right and stores them.
async fn tuned(gpu: &Gpu) -> Result<f64, String> {
    let pipelines = Pipelines::new(gpu.device());
    let workloads = [
        Workload::attention(Shape::new(1, 2, 33, 20), DType::F32).masked(),
        Workload::product([33, 20, 24], DType::F32),
    ];
    let tune = async || {
        let found = pipelines.tune_async(gpu.queue(), &workloads, TuningBudget::new().time(Duration::ZERO));
        found.await.map_err(|e| e.to_string())
    };
    let measured = tune().await?;
    let as_expected = |m: &Measured| !m.changed && m.timed == 1 && m.failed.is_empty() && !m.tuned.is_zero();
    let again = tune().await?.len();
    let kept = TuningCache::from_bytes(&pipelines.tuned().to_bytes()).len();
    if measured.len() == 2 && measured.iter().all(as_expected) && (again, kept) == (0, 2) {
        return Ok(0.0);
    }
    Err(format!("{measured:?}, then {again}, {kept} kept"))
}

pub fn cases(profile: &'static Profile) -> Vec<(String, Work)> {
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    let [_, h, i, j] = SHAPE.weights();
    let scaling = RopeScaling::Yarn {
        factor: 8.0,
        original_len: 16,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
    };
    let yarn = RopeConfig::new(DIM).order(RopeOrder::Interleaved).scaling(scaling);
    let keep = HostData::of([1, h, i, j], |[_, h, i, j]| i / 16 != j / 16 && (h != 1 || j > 16));
    let masked = Rules { attn_mask: Some(keep), causal: true, ..Default::default() };
    let bias = |[.., i, j]: [usize; 4]| if i / 16 == j / 16 { f32::NEG_INFINITY } else { (i / 32) as f32 };
    let added = Rules {
        bias: Some(HostData::of([1, 1, i, j], bias)),
        pattern: Some(Pattern::Local { block: 32 }),
        ..Default::default()
    };
    let mut cases = vec![
        ("rotation by halves", Other::Rotate(RopeOrder::Half, f32, false)),
        ("rotation of neighbours in place, f16", Other::Rotate(RopeOrder::Interleaved, f16, true)),
        ("rotation of neighbours in place, bf16", Other::Rotate(RopeOrder::Interleaved, bf16, true)),
        ("rotation on three axes", Other::RotateOnAxes(RopeSections::Contiguous([2, 3, 2]), f32)),
        ("rotation on three axes, f16", Other::RotateOnAxes(RopeSections::Interleaved([3, 2, 2]), f16)),
        ("rotation by given cosines and sines", Other::RotateBy(RopeOrder::Half, f32)),
        ("rotation by given cosines and sines, f16", Other::RotateBy(RopeOrder::Interleaved, f16)),
        ("sinusoids added", Other::Sinusoid),
        ("a learned table added", Other::Learned(f32)),
        ("a learned table added, f16", Other::Learned(f16)),
        ("cache: rotated keys", Other::RotatedCache(RopeConfig::new(DIM), CacheLayout::Contiguous)),
        (
            "cache: rotated keys, YaRN, pages",
            Other::RotatedCache(yarn, CacheLayout::Paged { page: 16, pages: 8 }),
        ),
        ("merge", Other::Merge([f32, f32], Algorithm::Fused)),
        ("merge, f16 parts", Other::Merge([f16, f32], Algorithm::Staged)),
        ("linformer", Other::Linformer(f32)),
        ("linformer, bf16", Other::Linformer(bf16)),
        ("lsh attention", Other::Lsh(f32)),
        ("lsh attention, f16", Other::Lsh(f16)),
        ("attentional vector", Other::Attentional(f32)),
        ("attentional vector, f16", Other::Attentional(f16)),
        ("local attention", Other::Local(f32)),
        ("local attention, bf16", Other::Local(bf16)),
        ("predicted positions", Other::Predicted(f32)),
        ("predicted positions, f16", Other::Predicted(f16)),
        ("embeddings", Other::Embedding(f32)),
        ("embeddings, bf16", Other::Embedding(bf16)),
        ("means of rows", Other::MeanPool(f32)),
        ("means of rows, f16", Other::MeanPool(f16)),
        ("logits", Other::Logits(f32)),
        ("logits, bf16", Other::Logits(bf16)),
        ("few largest", Other::TopK([70, 5], f32)),
        ("few largest, bf16", Other::TopK([70, 5], bf16)),
        ("hundreds of largest, f16", Other::TopK([700, 600], f16)),
        ("thousands of largest", Other::TopK([5_000, 4_500], f32)),
        ("block map of a mask", Other::Classify(Box::new(masked))),
        ("block map of a bias", Other::Classify(Box::new(added))),
    ];
    let [q4, q8] = QuantizedFormat::ALL;
    cases.extend([
        ("layer norm", Other::Norm(NormConfig::layer(), f32)),
        ("layer norm, f16", Other::Norm(NormConfig::layer(), f16)),
        ("RMS norm", Other::Norm(NormConfig::rms(), f32)),
        ("RMS norm, bf16", Other::Norm(NormConfig::rms(), bf16)),
        ("gate after an RMS norm", Other::GatedNorm(false, f32)),
        ("gate before an RMS norm, bf16", Other::GatedNorm(true, bf16)),
        ("causal convolution", Other::CausalConv(f32)),
        ("causal convolution, f16", Other::CausalConv(f16)),
        ("GELU times", Other::Elementwise(Activation::Gelu, f32)),
        ("GELU by tanh times, f16", Other::Elementwise(Activation::GeluTanh, f16)),
        ("SiLU times, bf16", Other::Elementwise(Activation::Silu, bf16)),
        ("sigmoid times", Other::Elementwise(Activation::Sigmoid, f32)),
        ("quantised products, few rows", Other::Quantized(q4, 3, f32)),
        ("quantised products, many rows", Other::Quantized(q8, 33, f32)),
        ("quantised products, few rows, f16", Other::Quantized(q8, 5, f16)),
        ("quantised products, many rows, bf16", Other::Quantized(q4, 19, bf16)),
        ("one buffer", Other::OneBuffer(Algorithm::Fused, f32)),
        ("one buffer, staged", Other::OneBuffer(Algorithm::Staged, f32)),
        ("one buffer, bf16", Other::OneBuffer(Algorithm::Fused, bf16)),
        ("radix sort", Other::RadixSort),
        ("weight norm", Other::WeightNorm(f32)),
        ("weight norm, f16", Other::WeightNorm(f16)),
    ]);
    cases.extend(stacked());
    cases.extend(linear_cases());
    cases.extend(recurrent_cases());
    cases.extend(indexer_cases());
    cases.extend(selected_cases());
    cases.extend(native_cases());
    // A slow compiler takes half a minute for its kernels, so the check runs once per driver.
    if profile.name != "defaults" {
        cases.push(("check of the kernels", Other::Check));
        cases.push(("measured plans", Other::Tune));
    }
    cases.into_iter().map(|(name, other)| (name.to_string(), Work::Other(other))).collect()
}
