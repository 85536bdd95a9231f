//! Numbers from PyTorch, Dive into Deep Learning, ONNX and the formulas of `transformers`.

use wgpu_attention::mask::DeviceMask;
use wgpu_attention::position::{
    PositionTable, Positions, Rope, RopeConfig, RopeOrder, RopeScaling, Rotate, Rotation, RowPositions,
};
use wgpu_attention::reference;
use wgpu_attention::reference::compare::compare;
use wgpu_attention::reference::widen;
use wgpu_attention::{Attention, Config, DType, Forward, TensorView};

use super::scratch;
use crate::harness::positions::Setup;
use crate::harness::{HostData, Profile, Report, Vector, profiles};

pub const FAMILY: &str = "position";
pub const ROPE: &[&str] = &["rope_half", "rope_interleaved"];
pub const SINUSOID: &[&str] = &["sinusoid_60x32", "sinusoid_odd_start"];
pub const D2L: &[&str] = &["d2l_position"];
pub const ONNX: &[&str] = &["onnx_rotary_embedding"];

#[test]
fn rotations_match_vectors() {
    let mut report = Report::new("positions, rope vectors");
    for name in ROPE {
        let vector = Vector::load(FAMILY, name);
        let order =
            if vector.attrs["interleaved"] == true { RopeOrder::Interleaved } else { RopeOrder::Half };
        let base = vector.number("base").expect("a base");
        let config = RopeConfig::new(vector.size("rotary_dim")).base(base).order(order);
        let start = vector.size("start") as u32;
        for (given, rotated) in [("q", "q_rot"), ("k", "k_rot")] {
            let x = vector.floats(given);
            let got = reference::rotate(&widen::<f64>(&x.data), x.shape, &config, RowPositions::Start(start))
                .expect("fits");
            let want = vector.f64(rotated);
            assert_eq!(got.len(), want.len());
            assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-14), "{name} {rotated}");
            for profile in profiles() {
                let setup = Setup::plain(profile);
                report.record(name, &setup.named(), setup.rotate(&x, config, &RowPositions::Start(start)));
            }
        }
        for profile in profiles() {
            report.record(name, &profile.name, attended(&vector, profile, config, start));
        }
    }
    report.finish();
}

/// Rotates queries and keys in place and attends to them, in one encoder.
fn attended(
    vector: &Vector,
    profile: &'static Profile,
    config: RopeConfig,
    start: u32,
) -> Result<f64, String> {
    let gpu = &profile.gpu;
    let [q, k, v] = ["q", "k", "v"].map(|name| vector.floats(name));
    let (q_shape, k_shape, v_shape) = (q.shape, k.shape, v.shape);
    let [q, k, v] = [q, k, v].map(|x| gpu.upload(&x.data).expect("an upload"));
    let n = q_shape.iter().product::<usize>();
    let out = gpu.buffer(n * 4).map_err(|e| e.to_string())?;
    let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
    let (q, k) = (view(&q, q_shape), view(&k, k_shape));
    let call = Forward::new(q, k, view(&v, v_shape), view(&out, q_shape)).mask(DeviceMask::causal());
    let heads = Config::new(q_shape[1], q_shape[3]).kv_heads(k_shape[1]);
    let attention = Attention::with_pipelines(gpu.pipelines(), heads).map_err(|e| e.to_string())?;
    let positions = Positions::with_pipelines(gpu.pipelines());
    let rope = Rope::new(gpu.device(), config).map_err(|e| e.to_string())?;
    let mut scratch = scratch(gpu);
    gpu.submit(|encoder| {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for x in [q, k] {
            let call = Rotate::new(x, Rotation::Rope(&rope), RowPositions::Start(start));
            positions.rotate(&mut pass, &call)?;
        }
        attention.forward(&mut pass, &call, &mut scratch)
    })
    .map_err(|e| e.to_string())?;
    let got: Vec<f32> = gpu.download(&out, n).map_err(|e| e.to_string())?;
    let (want, tolerance) = vector.expected("out").expect("an output");
    let off = compare(&got, &want, tolerance).map_err(|e| e.to_string())?;
    Ok(off.absolute / tolerance.absolute)
}

#[test]
fn encodings_match_vectors() {
    let mut report = Report::new("positions, sinusoid vectors");
    for name in SINUSOID {
        let vector = Vector::load(FAMILY, name);
        let (length, dim) = (vector.size("length"), vector.size("dim"));
        let (base, start) = (vector.number("base").expect("a base"), vector.size("start") as u32);
        let want = vector.f64("out");
        let got = reference::sinusoid::<f64>(dim, base, start, length).expect("an encoding");
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-14), "{name}");
        assert_eq!(got.len(), want.len());
        let zeros = HostData::new(vec![0.0; length * dim], [1, 1, length, dim]);
        for profile in profiles() {
            let setup = Setup::plain(profile);
            report.record(
                name,
                &setup.named(),
                setup.add_sinusoid(&zeros, base, &RowPositions::Start(start), 1.0),
            );
        }
    }
    for name in D2L {
        let vector = Vector::load("d2l", name);
        let (x, base) = (vector.floats("x"), vector.number("base").expect("a base"));
        let (want, tolerance) = vector.expected("out").expect("an output");
        let table = PositionTable::Sinusoid(base);
        let x = HostData::new(x.data, x.shape);
        let got =
            reference::add_positions(&widen::<f64>(&x.data), x.shape, table, RowPositions::Start(0), 1.0);
        // Their table is f32, from angles in f32.
        let tolerance = reference::compare::Tolerance { absolute: tolerance.absolute.max(4e-6) };
        compare(&got.expect("fits"), &want, tolerance).unwrap_or_else(|e| panic!("{name}: {e}"));
        for profile in profiles() {
            let setup = Setup::plain(profile);
            report.record(name, &setup.named(), setup.add_sinusoid(&x, base, &RowPositions::Start(0), 1.0));
        }
    }
    report.finish();
}

/// Its caches are random numbers, not cosines, with a row for each possible position.
#[test]
fn rotations_match_onnx() {
    let mut report = Report::new("positions, ONNX's rotary embedding");
    for name in ONNX {
        let vector = Vector::load("onnx", name);
        let x = vector.floats("x");
        let pairs = vector.shape("cos")[1];
        let ids = vector.integers("position_ids");
        let gather = |cache: &str| -> Vec<f64> {
            let cache = vector.f64(cache);
            ids.iter().flat_map(|id| cache[id * pairs..][..pairs].to_vec()).collect()
        };
        let (cos, sin) = (gather("cos"), gather("sin"));
        let (want, tolerance) = vector.expected("out").expect("an output");
        let rotated = |order| reference::rotate_by(&widen::<f64>(&x.data), x.shape, order, &cos, &sin);
        let got = rotated(RopeOrder::Half).expect("fits");
        compare(&got, &want, tolerance).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(compare(&rotated(RopeOrder::Interleaved).expect("fits"), &want, tolerance).is_err());
        let rows = vector.shape("cos")[0];
        let [cos, sin] = ["cos", "sin"].map(|t| HostData::new(vector.floats(t).data, [1, 1, rows, pairs]));
        let [batch, _, length, _] = x.shape;
        let ids: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
        let at = RowPositions::Tensor(HostData::new(ids, [batch, 1, length, 1]));
        for profile in profiles() {
            let setup = Setup::plain(profile);
            let judged = setup.rotate_by(&x, RopeOrder::Half, ([&cos, &sin], DType::F32), &at);
            report.record(name, &setup.named(), judged);
        }
    }
    report.finish();
}

/// The numbers come from the formulas of `transformers`, `modeling_rope_utils.py`, computed in
/// Python.
#[test]
fn scaled_frequencies_match_transformers() {
    let near = |config: RopeConfig, want: &[f64], amplitude: f64| {
        let got = config.frequencies();
        assert_eq!(got.len(), want.len());
        let close = got.iter().zip(want).all(|(g, w)| (g / w - 1.0).abs() < 1e-12);
        assert!(close && (config.amplitude() - amplitude).abs() < 1e-15, "{config:?}: {got:?}, not {want:?}");
    };
    let eight = RopeConfig::new(8);
    near(eight, &[1.0, 0.1, 0.01, 0.001], 1.0);
    near(eight.base(16.0), &[1.0, 0.5, 0.25, 0.125], 1.0);
    near(eight.scaling(RopeScaling::Linear { factor: 4.0 }), &[0.25, 0.025, 0.0025, 0.00025], 1.0);
    let ntk = RopeScaling::NtkAware { factor: 4.0 };
    near(eight.scaling(ntk), &[1.0, 0.06299605249474366, 0.003968502629920499, 0.00025], 1.0);
    near(RopeConfig::new(2).scaling(ntk), &[1.0], 1.0);
    let yarn = |original_len, attention_factor| RopeScaling::Yarn {
        factor: 4.0,
        original_len,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor,
    };
    let sixteen = RopeConfig::new(16);
    let want = [
        1.0,
        0.31622776601683794,
        0.1,
        0.02569350598886808,
        0.00625,
        0.0013834964763236657,
        0.00025,
        7.905694150420948e-05,
    ];
    near(sixteen.scaling(yarn(4096, None)), &want, 1.138629436111989);
    near(sixteen.scaling(yarn(4096, Some(0.75))), &want, 0.75);
    // Either every pair except the first turns too rarely, or every pair turns often enough.
    near(eight.scaling(yarn(1, Some(1.0))), &[1.0, 0.025, 0.0025, 0.00025], 1.0);
    near(eight.scaling(yarn(1 << 50, Some(1.0))), &[1.0, 0.1, 0.01, 0.001], 1.0);
    let llama =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 8192 };
    let want = [
        1.0,
        0.19392274474868576,
        0.03760603093086393,
        0.0072926647372171085,
        0.0005248461609929547,
        3.428102195952591e-05,
        6.647869871181236e-06,
        1.2891731721515574e-06,
    ];
    near(sixteen.base(500_000.0).scaling(llama), &want, 1.0);
    assert!(
        RopeConfig::new(7).frequencies().is_empty() && RopeConfig::new(usize::MAX).frequencies().is_empty()
    );
}
