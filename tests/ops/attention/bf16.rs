//! Tests of bf16 bit by bit: loads, stores and rounding agree with `half`, for scalar and vec4
//! accesses. Further tests run attention to PyTorch's vectors, and kernels that only bf16 has.
//! Other tests draw bf16 as often as f16.

use half::{bf16, f16};
use wgpu_attention::cache::{Append, CacheRead, CacheStorage, Tokens};
use wgpu_attention::inspect::compiled;
use wgpu_attention::matmul::ProjectionForward;
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{
    Cache, CacheConfig, DType, Gpu, KernelOptions, Linear, Pipelines, Projection, Shape, TensorView,
};

use crate::harness::report::judge_outputs;
use crate::harness::{
    Case, FORMS, HostData, Layout, Profile, Report, Setup, Weights, defaults, profiles, run,
};
use crate::peers::sdpa;

/// Returns every upper 16 bits with lower 16 bits around the middle: exact numbers, ties, and their
/// neighbours. They have every exponent, with subnormal numbers, infinities, NaNs and numbers that
/// round to them.
fn every_rounding() -> Vec<f32> {
    let lower = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
    (0..=0xffffu32).flat_map(|upper| lower.map(|lower| f32::from_bits(upper << 16 | lower))).collect()
}

/// The rows and channels of [`every_rounding`].
const ROWS: usize = 768;
const DIM: usize = 512;

fn upload(gpu: &Gpu, x: &[f32], dtype: DType) -> wgpu::Buffer {
    let uploaded = match dtype {
        DType::BF16 => gpu.upload(&x.iter().map(|x| bf16::from_f32(*x).to_bits()).collect::<Vec<_>>()),
        DType::F16 => gpu.upload(&x.iter().map(|x| f16::from_f32(*x).to_bits()).collect::<Vec<_>>()),
        _ => gpu.upload(x),
    };
    uploaded.expect("an upload")
}

/// Appends `given` as `from` to a cache of `storage`, and reads it back as `to`. The read starts at
/// an element in the middle of a word.
fn through_cache(
    profile: &Profile,
    given: &[f32],
    [from, to]: [DType; 2],
    storage: CacheStorage,
) -> Vec<u32> {
    let gpu = &profile.gpu;
    let mut cache = Cache::with_pipelines(gpu.pipelines(), CacheConfig::new(1, DIM, ROWS).storage(storage))
        .expect("a cache");
    let shape = [1, 1, ROWS, DIM];
    let x = upload(gpu, given, from);
    let outs = [0, 1].map(|_| gpu.buffer(4 * (given.len() + 2)).expect("a buffer"));
    let [k, v] = outs.each_ref().map(|out| TensorView::new(out, to, shape).with_offset(1));
    let x = TensorView::new(&x, from, shape);
    gpu.submit(|e| {
        cache.advance(e, Tokens::All(ROWS))?;
        cache.append(e, 0, &Append::new(x, x))?;
        cache.read(e, 0, &CacheRead::new(k, v))
    })
    .expect("a step");
    let [k, v] = outs.map(|out| bits(gpu, &out, 1, given.len(), to));
    assert!(k == v, "keys and values are stored alike");
    k
}

/// Returns the bits of `n` elements from `start` on.
fn bits(gpu: &Gpu, buffer: &wgpu::Buffer, start: usize, n: usize, dtype: DType) -> Vec<u32> {
    let all = match dtype {
        DType::BF16 | DType::F16 => {
            let all: Vec<u16> = gpu.download(buffer, start + n).expect("a read-back");
            all.into_iter().map(u32::from).collect()
        }
        _ => gpu.download::<u32>(buffer, start + n).expect("a read-back"),
    };
    all[start..].to_vec()
}

/// Compares numbers. The bits of a NaN may differ.
fn same(got: f32, want: f32) -> bool {
    got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan()
}

fn check(what: &str, given: &[f32], got: &[u32], dtype: DType, want: impl Fn(f32) -> f32) {
    assert_eq!(given.len(), got.len(), "{what}");
    for (x, bits) in given.iter().zip(got) {
        let bits = match dtype {
            DType::BF16 => bits << 16,
            DType::F16 => f16::from_bits(*bits as u16).to_f32().to_bits(),
            _ => *bits,
        };
        let (got, want) = (f32::from_bits(bits), want(*x));
        assert!(same(got, want), "{what}: {:#x} became {bits:#x}, not {:#x}", x.to_bits(), want.to_bits());
    }
}

/// Returns six numbers for every f16 number, which round to it or to the next. They are exact
/// numbers, ties and their neighbours, with subnormal numbers, overflow, infinities and NaNs.
fn every_f16_rounding() -> Vec<f32> {
    let near = [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff];
    let of = |half| near.map(|n| f32::from_bits(f16::from_bits(half).to_f32().to_bits() + n));
    (0..=u16::MAX).flat_map(of).collect()
}

/// Without `SHADER_F16`, kernels round f16 by bit operations.
#[test]
fn f16_rounds_to_even_without_feature() {
    let given = every_f16_rounding();
    let profile = defaults();
    assert!(!profile.gpu.device().features().contains(wgpu::Features::SHADER_F16));
    for dtypes in [[DType::F32, DType::F16], [DType::F16, DType::F32], [DType::F16, DType::F16]] {
        let got = through_cache(profile, &given, dtypes, CacheStorage::F32);
        let what = format!("{dtypes:?}");
        check(&what, &given, &got, dtypes[1], |x| f16::from_f32(x).to_f32());
    }
}

fn rounded(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

#[test]
fn bf16_rounds_to_nearest_even() {
    let given = every_rounding();
    assert_eq!(given.len(), ROWS * DIM);
    for profile in profiles() {
        for (dtypes, storage) in [
            ([DType::F32, DType::F32], CacheStorage::BF16),
            ([DType::F32, DType::BF16], CacheStorage::F32),
            ([DType::BF16, DType::F32], CacheStorage::F32),
            ([DType::BF16, DType::BF16], CacheStorage::BF16),
        ] {
            let got = through_cache(profile, &given, dtypes, storage);
            let what = format!("{}, {dtypes:?}, {storage:?}", profile.name);
            check(&what, &given, &got, dtypes[1], rounded);
        }
    }
}

/// Vec4 of normal numbers and of overflow, multiplied by the unit matrix. The outputs are a tensor
/// with vec4 stores, and one at an odd element.
#[test]
fn products_round_to_nearest_even() {
    let given: Vec<f32> = every_rounding().into_iter().filter(|x| x.is_normal()).collect();
    let given = &given[..given.len() / 4 * 4];
    let rows = given.len() / 4;
    let unit: Vec<f32> = (0..16).map(|n| f32::from(n % 5 == 0)).collect();
    for profile in profiles() {
        let gpu = &profile.gpu;
        let weight = upload(gpu, &unit, DType::BF16);
        let x = upload(gpu, given, DType::F32);
        for offset in [0, 1] {
            let out = gpu.buffer(2 * (given.len() + 2)).expect("a buffer");
            let linear = Linear { weight: TensorView::matrix(&weight, DType::BF16, [4, 4]), bias: None };
            let call = ProjectionForward::new(
                TensorView::sequence(&x, DType::F32, [1, rows, 4]),
                linear,
                TensorView::sequence(&out, DType::BF16, [1, rows, 4]).with_offset(offset),
            );
            project(gpu, call);
            let got = bits(gpu, &out, offset, given.len(), DType::BF16);
            check(&format!("{}, from {offset}", profile.name), given, &got, DType::BF16, rounded);
        }
    }
}

fn project(gpu: &Gpu, call: ProjectionForward) {
    let kernel_options = KernelOptions::new().target(Target::Software);
    let projection = Projection::with_pipelines(gpu.pipelines()).kernel_options(kernel_options);
    gpu.submit(|e| projection.forward(e, &[call])).expect("a product");
}

/// A tensor with every second element of a buffer. Its stores leave the other half of each word
/// unchanged.
#[test]
fn stores_leave_neighbours_unchanged() {
    let n = 4099;
    let given: Vec<f32> = (0..n).map(|n| n as f32).collect();
    for profile in profiles() {
        let gpu = &profile.gpu;
        let x = upload(gpu, &given, DType::F32);
        let unit = upload(gpu, &[1.0], DType::F32);
        let poison: Vec<u16> = (0..2 * n as u16 + 2).map(|n| 0x4000 | (n % 0x3fff)).collect();
        for odd in [0, 1] {
            let out = gpu.upload(&poison).expect("an upload");
            let linear = Linear { weight: TensorView::matrix(&unit, DType::F32, [1, 1]), bias: None };
            let y = TensorView::sequence(&out, DType::BF16, [1, n, 1])
                .with_strides([0, 0, 2, 1])
                .with_offset(odd);
            project(gpu, ProjectionForward::new(TensorView::sequence(&x, DType::F32, [1, n, 1]), linear, y));
            let got: Vec<u16> = gpu.download(&out, poison.len()).expect("a read-back");
            for (at, got) in got.iter().enumerate() {
                let inside = at % 2 == odd && at / 2 < n;
                let want = if inside { bf16::from_f32(given[at / 2]).to_bits() } else { poison[at] };
                assert_eq!(*got, want, "{}, from {odd}, element {at}", profile.name);
            }
        }
    }
}

fn setup(path: Algorithm, form: Target, layout: Layout) -> Setup {
    let (dtype, bias, weights) = (DType::BF16, DType::BF16, Weights::None);
    Setup { profile: defaults(), form, path, dtype, bias, layout, lse: true, weights }
}

/// A device without features runs every vector. The vector's number chooses path and target.
#[test]
fn sdpa_vectors_match_in_bf16() {
    crate::harness::in_turn!();
    let mut report = Report::new("bf16, sdpa");
    for (n, name) in sdpa::NAMES.iter().enumerate() {
        let path = if n % 3 == 0 { Algorithm::Staged } else { Algorithm::Fused };
        let layout = [Layout::Dense, Layout::Window(n as u64 | 1)][n % 2];
        let setup = setup(path, FORMS[n % 4 / 2], layout);
        report.check_in(&sdpa::case(name), &setup, &mut Default::default());
    }
    report.finish();
}

/// For few queries of aligned keys, kernels load words of two bf16. For other keys, kernels load
/// single elements.
#[test]
fn decoding_loads_words() {
    let mut report = Report::new("bf16, decode");
    for (dim, words, asks_pairs) in [(128, true, false), (128, true, true), (132, false, false)] {
        let shape =
            Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 1, kv_len: 530, ..Shape::new(1, 4, 1, dim) };
        let case = Case::random(format!("bf16 decode {dim}, asks {asks_pairs}"), shape).with(|c| {
            let keep = |[_, h, _, j]: [usize; 4]| (h + j) % 3 != 0;
            c.rules.causal = true;
            c.rules.attn_mask = asks_pairs.then(|| HostData::of(shape.weights(), keep));
        });
        for form in FORMS {
            let setup = Setup { profile: alone(), ..setup(Algorithm::Fused, form, Layout::Dense) };
            let outcome = attended(&case, &setup, words);
            report.record(&case.name, &setup, outcome);
        }
    }
    report.finish();
}

/// Returns the device without features, with pipelines that no other test compiles.
fn alone() -> &'static Profile {
    let Profile { gpu, matrix, .. } = defaults();
    let gpu = Gpu::with_pipelines(gpu.queue().clone(), Pipelines::new(gpu.device()));
    Box::leak(Box::new(Profile { name: "alone", gpu, matrix: *matrix }))
}

/// Returns the error over tolerance, and checks that a kernel with or without word loads ran.
fn attended(case: &Case, setup: &Setup, words: bool) -> Result<f64, String> {
    let (stored, pipelines) = (case.stored(setup.dtype, setup.bias), setup.profile.gpu.pipelines());
    let got = run(&stored, setup)?;
    let names = compiled(pipelines);
    let takes = |name: &&String| name.starts_with("attention.fused") && name.contains(" words");
    if words != names.iter().any(|name| takes(&name)) {
        return Err(format!("words {words}: {names:?}"));
    }
    judge_outputs(&case.expected, case.shape, &stored.truth(setup.dtype, Weights::None), &got, false)
}
