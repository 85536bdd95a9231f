//! Tuned plans. The fastest right candidate is used and stored, and not used where it does not fit.

use std::time::{Duration, Instant};

use support::allocations::allocations;
use wgpu_attention::cache::{CacheStorage, ScaleGroup};
use wgpu_attention::layers::MultiHeadConfig;
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, compare};
use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::tuning::{Algorithm, Family, Measured, TuningBudget, TuningCache, Workload};
use wgpu_attention::{
    Attention, Config, DType, Error, Forward, Gpu, KernelOptions, Mask, Pipelines, Scratch, Shape,
    TensorView, inspect,
};

use crate::harness::faults::Fault;
use crate::harness::{full, say};

const FUSED: [Family; 2] = [Family::FusedGpu, Family::FusedCpu];
const STAGED: [Family; 2] = [Family::StagedGpu, Family::StagedCpu];
const SHAPE: Shape = Shape::new(1, 2, 96, 32);

/// Makes pipelines of a driver with these faults.
fn driver(faults: &'static [([Family; 2], Fault)]) -> Pipelines {
    inspect::rewritten(&Pipelines::new(full().gpu.device()), move |families, text| {
        let hit = faults.iter().find(|(wrong, _)| families.iter().any(|family| wrong.contains(family)));
        hit.map_or_else(|| text.to_string(), |(_, fault)| fault.in_text(text))
    })
}

fn tune(pipelines: &Pipelines, workloads: &[Workload]) -> Result<Vec<Measured>, Error> {
    pipelines.tune(full().gpu.queue(), workloads, TuningBudget::new().time(Duration::from_secs(30)))
}

fn one(pipelines: &Pipelines, workload: Workload) -> Measured {
    let mut all = tune(pipelines, &[workload]).expect("a plan");
    assert_eq!(all.len(), 1);
    all.remove(0)
}

/// The tensors q, k, v and a place for out on the device.
struct Call {
    buffers: [wgpu::Buffer; 3],
    out: wgpu::Buffer,
    x: Vec<f32>,
}

impl Call {
    fn new() -> Self {
        let gpu = &full().gpu;
        let x: Vec<f32> = (0..2 * 96 * 32).map(|i| (i * 7919 % 1009) as f32 / 504.5 - 1.0).collect();
        let buffers = [(); 3].map(|()| gpu.upload(&x).expect("a buffer"));
        Call { buffers, out: gpu.buffer(4 * x.len()).expect("a buffer"), x }
    }

    fn forward(&self) -> Forward<'_> {
        let view = |buffer| TensorView::new(buffer, DType::F32, SHAPE.q());
        let [q, k, v] = &self.buffers;
        Forward::new(view(q), view(k), view(v), view(&self.out))
    }

    /// Returns the result, with a scratch of the size for `attention` or for `other`.
    fn run(&self, attention: &Attention, other: Option<&Attention>) -> Vec<f32> {
        let gpu = &full().gpu;
        let size = other.unwrap_or(attention).scratch_size(&self.forward()).expect("a size");
        let mut scratch = Scratch::new(gpu.device(), size).expect("memory");
        gpu.submit(|encoder| {
            encoder.clear_buffer(&self.out, 0, None);
            attention.forward(encoder, &self.forward(), &mut scratch)
        })
        .expect("a call");
        gpu.download(&self.out, self.x.len()).expect("a result")
    }

    fn judge(&self, got: &[f32]) {
        let options = Options::new();
        let x = &self.x;
        let wide = widen::<f64>(x);
        let want = reference::attention::<f64>(&wide, &wide, &wide, SHAPE, &options).expect("the truth").out;
        let naive = reference::attention::<f32>(x, x, x, SHAPE, &options).expect("the same").out;
        let tolerance = Tolerance::from_naive(&widen::<f64>(&naive), &want, 1.0, EPSILON_F32);
        compare(got, &want, tolerance).expect("the truth");
    }
}

fn operator(pipelines: &Pipelines, kernel_options: KernelOptions) -> Attention {
    Attention::with_pipelines(pipelines, Config::new(2, 32).kernel_options(kernel_options))
        .expect("an operator")
}

/// Returns the only line of `tuned` with other words. The words are the device, nine of the class
/// and five of the plan. The last is the number of doublings of the splits, plus 8.
fn edited(tuned: &TuningCache, edit: impl FnOnce(&mut Vec<String>)) -> TuningCache {
    let text = String::from_utf8(tuned.to_bytes()).expect("text");
    let (head, line) = text.trim_end().split_once('\n').expect("two lines");
    let (line, _) = line.rsplit_once(' ').expect("a hash");
    let mut words: Vec<String> = line.split(' ').map(str::to_string).collect();
    edit(&mut words);
    let line = words.join(" ");
    // FNV-1a, starting with the length.
    let bytes = (line.len() as u64).to_le_bytes().into_iter().chain(line.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    TuningCache::from_bytes(format!("{head}\n{line} {hash:016x}\n").as_bytes())
}

/// Recording a call by a tuned plan costs as much as by the same plan named explicitly.
fn records_as_cheaply(call: &Call, tuned: &Attention, named: &Attention) {
    let gpu = &full().gpu;
    let cost = |attention: &Attention| {
        let forward = call.forward();
        let size = attention.scratch_size(&forward).expect("a size");
        let mut scratch = Scratch::new(gpu.device(), size).expect("memory");
        attention.prepare(&forward, &mut scratch).expect("a preparation");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        let mut record = || {
            let start = Instant::now();
            attention.forward(&mut pass, &forward, &mut scratch).expect("a recording");
            start.elapsed()
        };
        let time = (0..1000).map(|_| record()).min().expect("many");
        (allocations(|| _ = record()), time)
    };
    let [tuned, named] = [tuned, named].map(cost);
    say(&format!(
        "recording by a measured plan: {} allocations, {:?}; named: {}, {:?}",
        tuned.0, tuned.1, named.0, named.1
    ));
    assert!(tuned.0 <= named.0 + 2, "{tuned:?}, named {named:?}");
    // A table look-up. Timing, planning or compiling would take many times as long.
    assert!(tuned.1 < 3 * named.1, "{tuned:?}, named {named:?}");
}

/// If the fused kernels are slow, calls use the staged path. Their temporary memory shows it.
#[test]
fn fastest_plan_is_used_and_stored() {
    crate::harness::in_turn!();
    let slow = || driver(&[(FUSED, Fault::Slow)]);
    let pipelines = slow();
    let call = Call::new();
    let [open, fixed] = [KernelOptions::new(), KernelOptions::fixed()]
        .map(|kernel_options| operator(&pipelines, kernel_options));
    let bytes = |attention: &Attention| attention.scratch_size(&call.forward()).expect("a size").total();
    let before = call.run(&open, None);
    assert_eq!([bytes(&open), bytes(&fixed)], [0, 0]);

    let workload = Workload::attention(SHAPE, DType::F32);
    let measured = one(&pipelines, workload);
    assert!(measured.changed && measured.to_string().contains("staged"), "{measured}");
    assert_eq!(measured.failed, [""; 0]);
    assert!(measured.by_rules.is_some_and(|ruled| ruled > measured.tuned), "{measured}");
    let matrix = 4 * 2 * 96 * 96;
    assert_eq!([bytes(&open), bytes(&fixed)], [matrix, 0]);
    call.judge(&call.run(&open, None));
    assert_eq!(call.run(&fixed, None), before);
    // An earlier scratch has no room for it. Then the call uses the built-in plan, bit by bit.
    assert_eq!(call.run(&open, Some(&fixed)), before);

    records_as_cheaply(
        &call,
        &open,
        &operator(&pipelines, KernelOptions::new().algorithm(Algorithm::Staged)),
    );

    // A second tuning has nothing to do, here and where the file is read.
    assert_eq!(tune(&pipelines, &[workload, workload]).expect("nothing"), []);
    let kept = TuningCache::from_bytes(&pipelines.tuned().to_bytes());
    assert_eq!((&kept, kept.len()), (&pipelines.tuned(), 1));
    let other = slow();
    assert_eq!(other.use_tuned(&kept), 1);
    assert_eq!(bytes(&operator(&other, KernelOptions::new())), matrix);
    assert_eq!(tune(&other, &[workload]).expect("nothing"), []);
    // Entries of another device are stored and not used. An empty cache removes the entries.
    let foreign = edited(&kept, |words| words[0] = "0123456789abcdef".into());
    assert_eq!((foreign.len(), slow().use_tuned(&foreign)), (1, 0));
    assert_eq!(other.use_tuned(&TuningCache::new()), 0);
    assert_eq!(bytes(&operator(&other, KernelOptions::new())), 0);
    assert!(other.tuned().is_empty());
}

/// A layer uses the tuned plan of its attention, and may use an older scratch.
#[test]
fn layers_use_tuned_plans() {
    crate::harness::in_turn!();
    use wgpu_attention::layers::{MultiHeadForward, MultiHeadWeights};
    use wgpu_attention::{Linear, MultiHeadAttention};
    let gpu = &full().gpu;
    let pipelines = driver(&[(FUSED, Fault::Slow)]);
    let config = MultiHeadConfig::new(64, 2);
    let weight = gpu.upload(&vec![0.125f32; 64 * 64]).expect("a buffer");
    let x =
        gpu.upload(&(0..96 * 64).map(|i| (i % 13) as f32 / 6.0 - 1.0).collect::<Vec<_>>()).expect("a buffer");
    let y = gpu.buffer(4 * 96 * 64).expect("a buffer");
    let part = || Linear { weight: TensorView::matrix(&weight, DType::F32, [64, 64]), bias: None };
    let weights = MultiHeadWeights {
        query: part(),
        key: part(),
        value: part(),
        out: part(),
        bias_kv: None,
        qk_norm: None,
        gate: None,
    };
    let layer = MultiHeadAttention::with_pipelines(&pipelines, config, &weights).expect("a layer");
    let sequence = |buffer| TensorView::sequence(buffer, DType::F32, [1, 96, 64]);
    let call = MultiHeadForward::self_attention(sequence(&x), sequence(&y));
    let run = |scratch: &mut Scratch| {
        gpu.submit(|encoder| layer.forward(encoder, &call, scratch)).expect("a call");
        gpu.download::<f32>(&y, 96 * 64).expect("a result")
    };
    let ruled = layer.scratch_size(&call).expect("a size");
    let mut small = Scratch::new(gpu.device(), ruled).expect("memory");
    let before = run(&mut small);
    let measured = tune(&pipelines, &Workload::layer(&config, 1, 96)).expect("plans");
    assert_eq!(measured.len(), 3);
    assert!(measured[1].to_string().contains("staged"), "{}", measured[1]);
    let tuned = layer.scratch_size(&call).expect("a size");
    assert_eq!(tuned.total() - ruled.total(), 4 * 2 * 96 * 96);
    let mut large = Scratch::new(gpu.device(), tuned).expect("memory");
    let [after, again] = [run(&mut large), run(&mut small)];
    // Tuned projections change only the order of sums.
    for got in [after, again] {
        let worst = got.iter().zip(&before).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let largest = before.iter().fold(1.0f32, |m, x| m.max(x.abs()));
        // 64 products of a row, twice, in another order.
        assert!(worst <= 128.0 * f32::EPSILON * largest, "{worst} of {largest}");
    }
}

/// The plan of a long call has fewer splits. Its scratch is too small for the built-in plan of a
/// shorter call, which then runs without splits.
#[test]
fn scratch_of_longer_calls_serves_shorter_ones() {
    let gpu = &full().gpu;
    let pipelines = Pipelines::new(gpu.device());
    let attention = Attention::with_pipelines(&pipelines, Config::new(1, 32)).expect("an operator");
    let shape = |kv_len| Shape { q_len: 1, kv_len, ..Shape::new(1, 1, 1, 32) };
    let at_once = TuningBudget::new().time(Duration::ZERO);
    let workload = Workload::attention(shape(8192), DType::F32);
    pipelines.tune(gpu.queue(), &[workload], at_once).expect("the rules' plan");
    // Halved twice.
    let fewer = edited(&pipelines.tuned(), |words| words[14] = "6".into());
    assert_eq!(pipelines.use_tuned(&fewer), 1);

    let x: Vec<f32> = (0..8192 * 32).map(|i| (i * 7919 % 1009) as f32 / 504.5 - 1.0).collect();
    let [q, k, v] = [(); 3].map(|()| gpu.upload(&x).expect("a buffer"));
    let out = gpu.buffer(4 * 32).expect("a buffer");
    let call = |kv_len| {
        let shape: Shape = shape(kv_len);
        let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
        Forward::new(view(&q, shape.q()), view(&k, shape.k()), view(&v, shape.v()), view(&out, shape.out()))
    };
    let [long, short] = [8192, 4096].map(|n| attention.scratch_size(&call(n)).expect("a size"));
    assert!(long.total() < short.total(), "{long:?} {short:?}");
    let mut scratch = Scratch::new(gpu.device(), long).expect("memory");
    gpu.submit(|encoder| attention.forward(encoder, &call(4096), &mut scratch)).expect("a call");
    let got: Vec<f32> = gpu.download(&out, 32).expect("a result");
    let wide = widen::<f64>(&x[..4096 * 32]);
    let options = Options::new();
    let want =
        reference::attention::<f64>(&wide[..32], &wide, &wide, shape(4096), &options).expect("the truth");
    let naive =
        reference::attention::<f32>(&x[..32], &x[..4096 * 32], &x[..4096 * 32], shape(4096), &options);
    let naive = widen::<f64>(&naive.expect("the same").out);
    compare(&got, &want.out, Tolerance::from_naive(&naive, &want.out, 1.0, EPSILON_F32)).expect("the truth");
    // Without tuning, the caller must make the scratch large enough.
    assert_eq!(pipelines.use_tuned(&TuningCache::new()), 0);
    let refused = gpu.submit(|encoder| attention.forward(encoder, &call(4096), &mut scratch));
    assert!(matches!(refused, Err(Error::ScratchTooSmall { slot: "partials", .. })), "{refused:?}");
}

/// Tiles of 128 rows with slices of 64 and of 128 channels. Only tuning chooses them.
#[test]
fn tiles_of_128_rows_match_reference() {
    crate::harness::in_turn!();
    let queue = full().gpu.queue();
    if full().gpu.device().limits().max_compute_workgroup_storage_size < 32768 {
        return say("tiles of 128 rows: skipped, the device has less than 32 KiB of workgroup memory");
    }
    for value_dim in [8, 70] {
        let gpu = Gpu::with_pipelines(queue.clone(), inspect::as_gpu(full().gpu.device(), None));
        let shape = Shape { q_len: 392, kv_len: 70, value_dim, ..Shape::new(1, 2, 1, 6) };
        let workload = Workload::attention(shape, DType::F32).masked();
        let at_once = TuningBudget::new().time(Duration::ZERO);
        gpu.pipelines().tune(queue, &[workload], at_once).expect("the rules' plan");
        let picked = edited(&gpu.pipelines().tuned(), |words| {
            words[10..14].clone_from_slice(&["0", "3", "128", "0"].map(String::from));
        });
        assert_eq!(gpu.pipelines().use_tuned(&picked), 1);
        gpu.pipelines().clear();
        let noise = |shape: [usize; 4], seed: usize| -> Vec<f32> {
            let count: usize = shape.iter().product();
            (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0).collect()
        };
        let (q, k, v) = (noise(shape.q(), 1), noise(shape.k(), 2), noise(shape.v(), 3));
        let options = Options::new().mask(Mask::causal());
        let got = gpu.attention(&q, &k, &v, shape, &options).expect("attention").out;
        let compiled = inspect::compiled(gpu.pipelines());
        assert!(compiled.iter().any(|name| name.contains("rows=128")), "{compiled:?}");
        let want = reference::attention::<f64>(&widen(&q), &widen(&k), &widen(&v), shape, &options);
        let want = want.expect("the truth").out;
        let naive = reference::attention::<f32>(&q, &k, &v, shape, &options).expect("the same").out;
        let tolerance = Tolerance::from_naive(&widen::<f64>(&naive), &want, 1.0, EPSILON_F32);
        compare(&got, &want, tolerance).expect("the truth");
    }
}

#[test]
fn wrong_candidates_are_not_used() {
    crate::harness::in_turn!();
    for fault in [Fault::Scaled, Fault::NaN, Fault::DoesNotCompile] {
        let pipelines = match fault {
            Fault::Scaled => driver(&[(FUSED, Fault::Slow), (STAGED, Fault::Scaled)]),
            Fault::NaN => driver(&[(FUSED, Fault::Slow), (STAGED, Fault::NaN)]),
            _ => driver(&[(FUSED, Fault::Slow), (STAGED, Fault::DoesNotCompile)]),
        };
        let measured = one(&pipelines, Workload::attention(SHAPE, DType::F32));
        let [failed] = &measured.failed[..] else { panic!("{measured:?}") };
        let says = if fault == Fault::DoesNotCompile { "refused" } else { "off by more than" };
        assert!(failed.starts_with("staged: ") && failed.contains(says), "{failed}");
        assert!(measured.by_rules.is_some());
        let call = Call::new();
        call.judge(&call.run(&operator(&pipelines, KernelOptions::new()), None));
    }
}

#[test]
fn wrong_built_in_plan_is_replaced() {
    crate::harness::in_turn!();
    let pipelines = driver(&[(FUSED, Fault::Scaled)]);
    let measured = one(&pipelines, Workload::attention(SHAPE, DType::F32));
    assert!(measured.changed && measured.by_rules.is_none(), "{measured}");
    assert!(measured.to_string().contains("staged, because the rules' plan failed"), "{measured}");
    let call = Call::new();
    call.judge(&call.run(&operator(&pipelines, KernelOptions::new()), None));

    let nothing = driver(&[(FUSED, Fault::Scaled), (STAGED, Fault::Scaled)]);
    let refused = tune(&nothing, &[Workload::attention(SHAPE, DType::F32)]);
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    assert!(nothing.tuned().is_empty());
}

/// Every kind of workload runs, and all classes differ.
#[test]
fn every_workload_kind_is_tuned() {
    crate::harness::in_turn!();
    let gpu: &Gpu = &full().gpu;
    let pipelines = Pipelines::new(gpu.device());
    let decode = Shape { q_len: 1, kv_heads: 1, ..SHAPE };
    let mut workloads = vec![
        Workload::attention(SHAPE, DType::F32),
        Workload::attention(SHAPE, DType::F32).masked(),
        Workload::attention(decode, DType::F32),
        Workload::cached(decode, DType::F32, CacheStorage::F32),
        Workload::cached(decode, DType::F32, CacheStorage::Q8(ScaleGroup::Row)).masked(),
        Workload::cached(Shape { batch: 3, q_len: 5, ..decode }, DType::F32, CacheStorage::F16),
        Workload::product([40, 36, 100], DType::F32),
        Workload::product([1, 36, 52], DType::F32),
        Workload::product([40, 35, 52], DType::F32).f16_operands(true),
        Workload::attention(Shape { head_dim: 13, value_dim: 7, ..SHAPE }, DType::BF16).masked(),
        Workload::attention(decode, DType::BF16),
        Workload::cached(decode, DType::BF16, CacheStorage::BF16),
        Workload::product([40, 36, 100], DType::BF16),
    ];
    workloads.extend(Workload::layer(&MultiHeadConfig::new(48, 3).kv_heads(1), 2, 20));
    workloads.push(Workload::attention(Shape { head_dim: 13, ..SHAPE }, DType::F16).masked());
    workloads.push(Workload::product([40, 36, 52], DType::F16));
    workloads.push(Workload::cached(decode, DType::F16, CacheStorage::F16));
    let at_once = TuningBudget::new().time(Duration::ZERO);
    let measured = pipelines.tune(gpu.queue(), &workloads, at_once).expect("plans");
    assert_eq!(measured.len(), workloads.len());
    for (measured, workload) in measured.iter().zip(&workloads) {
        assert_eq!(measured.workload, *workload);
        assert_eq!((measured.timed, measured.changed, measured.failed.len()), (1, false, 0), "{measured}");
        assert!(measured.to_string().contains("by the rules"));
    }
    assert_eq!(pipelines.tuned().len(), workloads.len());
}

#[test]
fn invalid_calls_are_errors() {
    let pipelines = Pipelines::new(full().gpu.device());
    let queue = full().gpu.queue();
    let small = TuningBudget::new().memory(1 << 16);
    let large = pipelines.tune(queue, &[Workload::attention(SHAPE, DType::F32)], small);
    assert!(matches!(large, Err(Error::Limit { name: "TuningBudget::memory", .. })), "{large:?}");
    let unbounded = TuningBudget::new().memory(u64::MAX);
    for huge in [
        Workload::attention(Shape { kv_len: 1 << 40, ..SHAPE }, DType::F32),
        Workload::cached(Shape { kv_len: 1 << 40, ..SHAPE }, DType::F32, CacheStorage::Q8(ScaleGroup::Row)),
        Workload::product([1 << 40, 64, 64], DType::F32),
    ] {
        let refused = pipelines.tune(queue, &[huge], unbounded);
        assert!(matches!(refused, Err(Error::BindingLimit { .. })), "{refused:?}");
    }
    for workload in [
        Workload::attention(Shape { heads: 3, kv_heads: 2, ..SHAPE }, DType::F32),
        Workload::attention(Shape { q_len: 0, ..SHAPE }, DType::F32),
        Workload::attention(Shape { head_dim: usize::MAX, ..SHAPE }, DType::F32),
        Workload::attention(SHAPE, DType::Bool),
        Workload::product([0, 4, 4], DType::F32),
        Workload::product([usize::MAX, 4, 4], DType::F32),
        Workload::product([4; 3], DType::U32),
    ] {
        assert!(tune(&pipelines, &[workload]).is_err(), "{workload}");
    }
}
