//! More sequences, heads and rows than the workgroups of a device along an axis: 65535 by WebGPU's
//! limits.

use wgpu_attention::attention::{Merge, MergeForward, Partial};
use wgpu_attention::cache::{CacheLayout, CacheStorage, ScaleGroup};
use wgpu_attention::linear_attention::FeatureMap;
use wgpu_attention::matmul::Activation;
use wgpu_attention::position::{RopeConfig, RowPositions};
use wgpu_attention::reference::{self, LshShape, widen};
use wgpu_attention::rows::{Elementwise, ElementwiseForward, WeightNorm, WeightNormForward};
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{DType, Shape, TensorView};

use crate::harness::classify::classified;
use crate::harness::indexer::{IndexerCase, IndexerSetup};
use crate::harness::linear::LinearCase;
use crate::harness::native::{NativeCase, Numbers};
use crate::harness::positions::{self, normals};
use crate::harness::selected::SelectedCase;
use crate::harness::{
    Ask, Bed, Case, Count, Data, FORMS, HostData, Kind, Layout, OperatorSetup, Report, Rules, Setup, Weights,
    attentional, defaults, linformer, local, lsh,
};

const MANY: usize = 70_000;

/// One head, one row, two keys: the reference takes long with more.
const SHAPE: Shape =
    Shape { batch: MANY, heads: 1, kv_heads: 1, q_len: 1, kv_len: 2, head_dim: 4, value_dim: 4 };

/// Checks that one axis of the device's grid cannot hold them.
fn assert_many() {
    let limits = defaults().gpu.device().limits();
    assert!(MANY > limits.max_compute_workgroups_per_dimension as usize, "{limits:?}");
}

#[test]
fn positions_of_many() {
    assert_many();
    let mut report = Report::new("positions of many sequences");
    let at = RowPositions::Tensor(HostData::of([1, 1, 2, 1], |[_, _, i, _]| [9, 4][i]));
    for shape in [[MANY, 1, 2, 4], [1, MANY, 2, 4]] {
        let x = normals("many", shape);
        for back in [false, true] {
            let setup = positions::Setup { back, ..positions::Setup::plain(defaults()) };
            let outcome = setup.rotate(&x, RopeConfig::new(4), &at);
            report.record(&format!("{shape:?}, back {back}"), &setup.named(), outcome);
        }
        let setup = positions::Setup::plain(defaults());
        report.record(&format!("{shape:?}"), &setup.named(), setup.add_sinusoid(&x, 100.0, &at, 1.0));
    }
    report.finish();
}

#[test]
fn many_are_merged() {
    assert_many();
    let gpu = &defaults().gpu;
    let upload = |data: &[f32]| gpu.upload(data).expect("an upload");
    let part = |name: &str| {
        let [out, lse] = [4, 1].map(|dim| normals(&format!("{name} {dim}"), [MANY, 1, 1, dim]).data);
        let buffers = [upload(&out), upload(&lse)];
        (widen::<f64>(&out), widen::<f64>(&lse), buffers)
    };
    let parts = [part("one"), part("other")];
    let want =
        reference::merge(&parts.each_ref().map(|(out, lse, _)| (&out[..], &lse[..])), 4).expect("equal rows");
    fn view([out, lse]: &[wgpu::Buffer; 2], [batch, heads]: [usize; 2]) -> Partial<'_> {
        let of = |buffer, dim| TensorView::new(buffer, DType::F32, [batch, heads, 1, dim]);
        Partial { out: of(out, 4), lse: of(lse, 1) }
    }
    let merge = Merge::with_pipelines(gpu.pipelines());
    for sizes in [[MANY, 1], [1, MANY]] {
        let results = [4, 1].map(|dim| gpu.buffer(4 * MANY * dim).expect("a buffer"));
        let views = [view(&parts[0].2, sizes), view(&parts[1].2, sizes)];
        let call = MergeForward::new(&views, view(&results, sizes));
        gpu.submit(|e| merge.forward(e, &call)).expect("a merge");
        for (buffer, want) in results.iter().zip([&want.0, &want.1]) {
            let got = gpu.download::<f32>(buffer, want.len()).expect("a read-back");
            let near = |(got, want): (&f32, &f64)| (f64::from(*got) - want).abs() < 1e-5;
            assert!(got.iter().zip(want).all(near), "{sizes:?}");
        }
    }
}

/// On the staged path, which computes weights and scores.
#[test]
fn weights_of_many() {
    assert_many();
    crate::harness::in_turn!();
    let mut report = Report::new("weights of many sequences");
    let grouped = Shape { batch: MANY / 2, heads: 4, kv_heads: 2, ..SHAPE };
    for (shape, weights) in
        [(SHAPE, Weights::PerHead(DType::F32)), (grouped, Weights::Mean(DType::F32)), (SHAPE, Weights::None)]
    {
        let case = Case::random(format!("weights {shape:?}"), shape).with(|c| c.rules.causal = true);
        for form in FORMS {
            let setup = Setup {
                profile: defaults(),
                form,
                path: Algorithm::Staged,
                dtype: DType::F32,
                bias: DType::F32,
                layout: Layout::Dense,
                lse: true,
                weights,
            };
            report.check_in(&case, &setup, &mut Default::default());
        }
    }
    report.finish();
}

/// Rows and sequences of caches: appended, read, overwritten, rewound, copied, attended to.
#[test]
fn caches_of_many() {
    assert_many();
    crate::harness::in_turn!();
    let mut report = Report::new("caches of many sequences");
    let start = RowPositions::Start(0);
    let rules = Rules { causal: true, ..Default::default() };
    for (storage, layout) in [
        (CacheStorage::F32, CacheLayout::Contiguous),
        (CacheStorage::Q8(ScaleGroup::Row), CacheLayout::Ring { sink_tokens: 1 }),
        (CacheStorage::F16, CacheLayout::Paged { page: 16, pages: MANY + 8 }),
    ] {
        let kind = Kind {
            batch: MANY,
            heads: 1,
            kv_heads: 1,
            head_dim: 4,
            value_dim: 4,
            ..Kind::new(storage, layout, 8)
        };
        let mut bed = Bed::new(defaults(), kind, Data::Lossless, 5);
        let mut check = |bed: &mut Bed, what: &str, rows| {
            let outcome = bed
                .check_sequence_table()
                .and_then(|()| bed.read(0, &start, rows, DType::F32, Layout::Dense))
                .and_then(|_| bed.ask(&Ask { rows: Some(1), ..Ask::new(Target::Software, &rules) }));
            report.record(&format!("{storage:?}, {layout:?}, {what}"), &"", outcome);
        };
        bed.grow(&Count::All(2)).expect("room");
        bed.grow(&Count::Each((0..MANY).map(|s| s % 3).collect())).expect("room");
        check(&mut bed, "appended", 4);
        if bed.overwrite(0, &start, 2).is_ok() {
            check(&mut bed, "written over", 4);
        } else {
            report.record(&format!("{kind:?}"), &"", Err("not written over".into()));
        }
        let mut check = |bed: &mut Bed, what: &str, rows| {
            let outcome = bed
                .check_sequence_table()
                .and_then(|()| bed.read(0, &start, rows, DType::F32, Layout::Dense));
            report.record(&format!("{storage:?}, {layout:?}, {what}"), &"", outcome);
        };
        bed.rewind(&Count::All(1)).expect("tokens");
        check(&mut bed, "moved back", 4);
        bed.reorder(&(0..MANY).rev().collect::<Vec<_>>()).expect("a reorder");
        check(&mut bed, "reordered", 4);
    }
    report.finish();
}

/// Local, projected, hashed, selected, linear and additive attention, and the indexer, with
/// gradients.
#[test]
fn other_attentions_of_many() {
    assert_many();
    crate::harness::in_turn!();
    let mut report = Report::new("other attentions of many sequences");
    let (form, layout, profile) = (Target::Software, Layout::Dense, defaults());
    let around = local::Case::random("many", SHAPE, 1, true);
    report.record("local", &"", around.outcome(&local::Setup::plain(profile, layout)));
    for (name, per_head) in [("linformer", false), ("linformer, projections of heads", true)] {
        let low = linformer::Case::random("many", SHAPE, 2, per_head);
        report.record(name, &"", low.outcome(&linformer::Setup::plain(profile, form, layout)));
    }
    let hashed = LshShape { batch: MANY, heads: 1, length: 3, head_dim: 4, value_dim: 4 };
    let hashed = lsh::Case::random("many", hashed, [1, 2, 2]);
    report.record("lsh", &"", hashed.outcome(&lsh::Setup::plain(profile, form, layout)));
    for q_len in [1, MANY] {
        let shape = Shape { batch: MANY / q_len, q_len, ..SHAPE };
        let case = SelectedCase::random(format!("selected, {q_len} queries"), shape, [1, 1], 1);
        let setup = OperatorSetup::plain(profile, form);
        report.record(&case.case.name, &setup, case.forward(&setup, false).map(|ran| ran.ratio));
        report.record(&case.case.name, &setup, case.backward(&setup).map(|(ratio, _)| ratio));
    }
    let numbers = Numbers { compression: [1, 1], selection: [1, 1], always: [0, 1], window: 1 };
    let native = NativeCase::random("native sparse", SHAPE, numbers);
    let setup = OperatorSetup::plain(profile, form);
    report.record("native sparse", &setup, native.forward(&setup).map(|ran| ran.ratio));
    report.record("native sparse, backward", &setup, native.backward(&setup).map(|(ratio, _)| ratio));
    for q_len in [1, MANY] {
        let shape = Shape { batch: MANY / q_len, q_len, ..SHAPE };
        let case = IndexerCase::random(format!("indexer, {q_len} queries"), shape, Rules::default(), 1);
        for form in FORMS {
            let (dtypes, wide_gradients, group) = ([DType::F32; 2], true, None);
            let setup = IndexerSetup { profile, form, dtypes, wide_gradients, layout, group };
            report.record(&case.name, &setup, case.forward(&setup));
            for listed in [false, true] {
                report.record(&case.name, &setup, case.backward(&setup, listed).map(|(ratio, _)| ratio));
            }
        }
    }
    let linear = LinearCase::random("linear", SHAPE, FeatureMap::Elu, false);
    report.record("linear", &setup, linear.forward(&setup).map(|(ratio, _)| ratio));
    report.record("linear, backward", &setup, linear.backward(&setup));
    let joined = attentional::outcome_async([MANY, 1, 4, 4, 4], DType::F32, layout, form, false, profile);
    report.record("attentional vector", &"", pollster::block_on(joined));
    report.finish();
}

/// Block maps of masks, normalised score vectors, activations.
#[test]
fn other_operators_of_many() {
    assert_many();
    let profile = defaults();
    let gpu = &profile.gpu;
    let shape = Shape { q_len: 3, ..SHAPE };
    let rules = Rules { causal: true, ..Default::default() };
    let map = pollster::block_on(classified(profile, &rules, &shape, [2, 2], [MANY, 1])).expect("a map");
    let one = Shape { batch: 1, ..shape };
    let want = reference::classify(&rules.host(), one, [2, 2], [1, 1]).expect("it fits");
    assert!(map.chunks_exact(want.len()).all(|of_one| of_one == want), "{want:?}");
    assert_eq!(map.len(), MANY * want.len());

    let x = normals("many", [1, MANY, 1, 4]);
    let gain: Vec<f32> = (0..MANY).map(|n| 1.0 + (n % 7) as f32).collect();
    let [x_at, gain_at] = [&x.data, &gain].map(|data| gpu.upload(data).expect("an upload"));
    let out = gpu.buffer(4 * x.data.len()).expect("a buffer");
    let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
    let norm = WeightNorm::with_pipelines(gpu.pipelines());
    let call =
        WeightNormForward::new(view(&x_at, x.shape), view(&gain_at, [1, MANY, 1, 1]), view(&out, x.shape));
    gpu.submit(|e| norm.forward(e, &call)).expect("score vectors");
    let got = gpu.download::<f32>(&out, x.data.len()).expect("a read-back");
    let want = reference::weight_norm(&widen::<f64>(&x.data), &widen::<f64>(&gain), 4).expect("it fits");
    let near = |(got, want): (&f32, &f64)| (f64::from(*got) - want).abs() <= 1e-5 * want.abs().max(1.0);
    assert!(got.iter().zip(&want).all(near), "score vectors");

    let shape = [MANY, 1, 1, 4];
    let elementwise = Elementwise::with_pipelines(gpu.pipelines());
    let call = ElementwiseForward::new(view(&x_at, shape), view(&out, shape)).activation(Activation::Silu);
    gpu.submit(|e| elementwise.forward(e, &call)).expect("an activation");
    let got = gpu.download::<f32>(&out, x.data.len()).expect("a read-back");
    let want: Vec<f64> =
        x.data.iter().map(|x| reference::activate(f64::from(*x), Activation::Silu)).collect();
    assert!(got.iter().zip(&want).all(near), "an activation");
}
