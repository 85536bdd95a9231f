//! Rotary, sinusoidal and learned positions: against other people's numbers, and the GPU against the reference.

use wgpu_attention::reference::compare::compare;
use wgpu_attention::reference::{self, widen};
use wgpu_attention::wgpu;
use wgpu_attention::{
    AddPositions, At, Attention, Config, DType, DeviceMask, Error, Forward, Gpu, HostTensor, MAX_POSITION,
    PositionTable, Positions, Rope, RopeConfig, RopeOrder, RopeScaling, Rotate, Scratch, ScratchSize,
    Sinusoid, TensorView,
};

use crate::harness::run::{Layout, Placed, window};
use crate::harness::{Part, Profile, Report, Rng, Values, Vector, defaults, full, profiles, stored};

pub const FAMILY: &str = "position";
pub const ROPE: &[&str] = &["rope_half", "rope_interleaved"];
pub const SINUSOID: &[&str] = &["sinusoid_60x32", "sinusoid_odd_start"];
pub const D2L: &[&str] = &["d2l_position"];
pub const ONNX: &[&str] = &["onnx_rotary_embedding"];

/// WGSL lets a sum or a product be either neighbour of the exact value.
const ROUNDING: f64 = 1.0 / (1 << 23) as f64;
/// As a store to f16, and below its normal numbers.
const ROUNDING_F16: (f64, f64) = (1.0 / 1024.0, 1.0 / (1 << 24) as f64);

/// Roundings in the rotation at a position, relative to its length: the three entries of the table have one each; the
/// two products, as of complex numbers, √8 each (Higham 2002, "Accuracy and stability of numerical algorithms", lemma
/// 3.5); a tenth is more than f64 leaves in the angles, 2⁻²⁹ of 2²⁴ radians.
const TURN: f64 = 3.0 + 2.0 * 2.8285 + 0.1;
/// Then the amplitude, twice: itself and its product; and the product with x.
const ROTATION: f64 = TURN + 2.0 + 2.8285;

fn stored_error(want: f64, dtype: DType) -> f64 {
    if dtype == DType::F16 { want.abs() * ROUNDING_F16.0 + ROUNDING_F16.1 } else { 0.0 }
}

fn scratch(gpu: &Gpu) -> Scratch {
    Scratch::new(gpu.device(), ScratchSize::default()).expect("no memory to speak of")
}

/// A run on the device: where everything lies, and of what type it is.
struct Setup {
    profile: &'static Profile,
    layout: Layout,
    x: DType,
    /// In place without.
    out: Option<DType>,
}

impl Setup {
    fn all() -> Vec<Self> {
        let [f32, f16] = [DType::F32, DType::F16];
        let types = [
            (f32, Some(f32)),
            (f32, None),
            (f16, Some(f16)),
            (f16, None),
            (f16, Some(f32)),
            (f32, Some(f16)),
        ];
        let mut all = Vec::new();
        for profile in profiles() {
            for (x, out) in types {
                if profile.f16 || (x, out.unwrap_or(x)) == (f32, f32) {
                    for layout in [Layout::Dense, Layout::Blhd, Layout::Window(7)] {
                        all.push(Setup { profile, layout, x, out });
                    }
                }
            }
        }
        all
    }

    fn plain(profile: &'static Profile) -> Self {
        Setup { profile, layout: Layout::Dense, x: DType::F32, out: Some(DType::F32) }
    }

    fn named(&self) -> String {
        format!("{}, {:?}, {:?} to {:?}", self.profile.name, self.layout, self.x, self.out)
    }

    fn out(&self) -> DType {
        self.out.unwrap_or(self.x)
    }

    /// Runs what `record` records on x, out and positions; what must come, and how far each element may be off.
    fn judge(
        &self,
        x: &Part<f32>,
        at: &At<Part<u32>>,
        want: &[f64],
        error: impl Fn(usize) -> f64,
        record: impl FnOnce(
            &Positions,
            &mut wgpu::CommandEncoder,
            (TensorView, Option<TensorView>, At<TensorView>),
            &mut Scratch,
        ) -> Result<(), Error>,
    ) -> Result<f64, String> {
        let Setup { profile, layout, .. } = *self;
        profile.tidy();
        let [x_at, out_at] = layout.places([x.shape; 2]);
        let placed = Placed::input(profile, Values::Floats(&x.data), self.x, x_at);
        let out = self.out.map(|dtype| Placed::output(profile, dtype, out_at));
        let tensor = match at {
            At::Start(_) => None,
            At::Tensor(t) => {
                let place = window(t.shape, &mut Rng::named("positions"), 1);
                Some(Placed::input(profile, Values::Numbers(&t.data), DType::U32, place))
            }
        };
        let at = match (at, &tensor) {
            (At::Start(start), _) => At::Start(*start),
            (_, Some(t)) => At::Tensor(t.view()),
            _ => unreachable!("placed just now"),
        };
        let positions = Positions::with_pipelines(profile.gpu.pipelines());
        let call = (placed.view(), out.as_ref().map(Placed::view), at);
        let mut scratch = scratch(&profile.gpu);
        profile.gpu.submit(|e| record(&positions, e, call, &mut scratch)).map_err(|e| e.to_string())?;
        let got = out.as_ref().unwrap_or(&placed).download("out", profile)?;
        assert_eq!(got.len(), want.len());
        let mut worst: f64 = 0.0;
        for (n, (got, want)) in got.iter().zip(want).enumerate() {
            let allowed = error(n) + stored_error(*want, self.out());
            let off = (got - want).abs();
            if off > allowed || off.is_nan() {
                return Err(format!("element {n} is {got}, not {want}: off by {off:e}, {allowed:e} allowed"));
            }
            worst = worst.max(off / allowed.max(f64::MIN_POSITIVE));
        }
        Ok(worst)
    }

    fn rotate(&self, x: &Part<f32>, config: RopeConfig, at: &At<Part<u32>>) -> Result<f64, String> {
        let x = Part::new(stored(&x.data, self.x), x.shape);
        let wide = widen::<f64>(&x.data);
        let want = reference::rotate(&wide, x.shape, &config, host(at)).map_err(|e| e.to_string())?;
        let dim = x.shape[3];
        let pairs = config.frequencies().len();
        let amplitude = config.amplitude();
        let error = |n: usize| {
            let (row, d) = (n / dim * dim, n % dim);
            if d >= 2 * pairs {
                return 0.0;
            }
            // The pair of d: with half order the two are `pairs` apart, with the other they are neighbours.
            let half = config == config.order(RopeOrder::Half);
            let other = if half { (d + pairs) % (2 * pairs) } else { d ^ 1 };
            ROTATION * ROUNDING * amplitude * wide[row + d].hypot(wide[row + other])
        };
        let rope = Rope::new(self.profile.gpu.device(), config).map_err(|e| e.to_string())?;
        self.judge(&x, at, &want, error, |positions, encoder, (x, out, at), scratch| {
            positions.rotate(encoder, &Rotate { x, out, rope: &rope, at }, scratch)
        })
    }

    fn add_sinusoid(&self, x: &Part<f32>, base: f64, at: &At<Part<u32>>, scale: f32) -> Result<f64, String> {
        let x = Part::new(stored(&x.data, self.x), x.shape);
        let wide = widen::<f64>(&x.data);
        let table = PositionTable::Sinusoid(base);
        let want = reference::add_positions(&wide, x.shape, table, host(at), f64::from(scale))
            .map_err(|e| e.to_string())?;
        // The rotation, the product and the sum.
        let error =
            |n: usize| ROUNDING * (TURN + (wide[n] * f64::from(scale)).abs() + want[n].abs().max(1.0));
        let sinusoid =
            Sinusoid::new(self.profile.gpu.device(), x.shape[3], base).map_err(|e| e.to_string())?;
        self.judge(&x, at, &want, error, |positions, encoder, (x, out, at), scratch| {
            let table = PositionTable::Sinusoid(&sinusoid);
            positions.add(encoder, &AddPositions { x, out, table, at, scale }, scratch)
        })
    }

    fn add_learned(
        &self,
        x: &Part<f32>,
        table: (&Part<f32>, DType),
        at: &At<Part<u32>>,
        scale: f32,
    ) -> Result<f64, String> {
        let x = Part::new(stored(&x.data, self.x), x.shape);
        let (table, dtype) = table;
        let rows = stored(&table.data, dtype);
        let (wide, wide_rows) = (widen::<f64>(&x.data), widen::<f64>(&rows));
        let host_table = PositionTable::Learned(&wide_rows[..]);
        let want = reference::add_positions(&wide, x.shape, host_table, host(at), f64::from(scale))
            .map_err(|e| e.to_string())?;
        let error = |n: usize| ROUNDING * ((wide[n] * f64::from(scale)).abs() + want[n].abs());
        let place = self.layout.places([[1; 4], table.shape])[1];
        let placed = Placed::input(self.profile, Values::Floats(&rows), dtype, place);
        self.judge(&x, at, &want, error, |positions, encoder, (x, out, at), scratch| {
            let table = PositionTable::Learned(placed.view());
            positions.add(encoder, &AddPositions { x, out, table, at, scale }, scratch)
        })
    }
}

fn host(at: &At<Part<u32>>) -> At<HostTensor<'_, u32>> {
    match at {
        At::Start(start) => At::Start(*start),
        At::Tensor(part) => At::Tensor(part.host()),
    }
}

fn normals(name: &str, shape: [usize; 4]) -> Part<f32> {
    Part::new(Rng::named(name).normals(shape.iter().product()), shape)
}

/// Everything that says where rows stand, for two sequences of five rows.
fn places(last: u32) -> Vec<At<Part<u32>>> {
    let of = |shape, f: fn([usize; 4]) -> u32| At::Tensor(Part::of(shape, f));
    vec![
        At::Start(0),
        At::Start(last - 4),
        of([2, 1, 5, 1], |[b, _, i, _]| [[3, 0, 300, 65_536, 70_000], [255, 256, 1, 9, 511]][b][i]),
        of([1, 1, 5, 1], |[_, _, i, _]| [16_777_215, 16_777_214, 16_776_960, 16_711_680, 65_535][i]),
        // Past the last, by the rows' numbers or by themselves.
        of([2, 1, 1, 1], |[b, ..]| [MAX_POSITION - 2, 77][b]),
        of([1, 1, 1, 1], |_| u32::MAX - 1),
        of([2, 1, 5, 1], |[b, _, i, _]| [u32::MAX, 1 << 24, (1 << 24) + 1][(b + i) % 3]),
    ]
}

#[test]
fn the_rotations_of_others() {
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
            let got =
                reference::rotate(&widen::<f64>(&x.data), x.shape, &config, At::Start(start)).expect("fits");
            let want = vector.f64(rotated);
            assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-14), "{name} {rotated}");
            for profile in profiles() {
                let setup = Setup::plain(profile);
                report.record(name, &setup.named(), setup.rotate(&x, config, &At::Start(start)));
            }
        }
        for profile in profiles() {
            report.record(name, &profile.name, attended(&vector, profile, config, start));
        }
    }
    report.finish();
}

/// Queries and keys rotated in place and attended to, in one encoder.
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
    let call = Forward::new(view(&q, q_shape), view(&k, k_shape), view(&v, v_shape), view(&out, q_shape))
        .mask(DeviceMask::causal());
    let heads = Config::new(q_shape[1], q_shape[3]).kv_heads(k_shape[1]);
    let attention = Attention::with_pipelines(gpu.pipelines(), heads).map_err(|e| e.to_string())?;
    let positions = Positions::with_pipelines(gpu.pipelines());
    let rope = Rope::new(gpu.device(), config).map_err(|e| e.to_string())?;
    let mut scratch = scratch(gpu);
    gpu.submit(|encoder| {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for x in [call.q, call.k] {
            let call = Rotate { x, out: None, rope: &rope, at: At::Start(start) };
            positions.rotate_in_pass(&mut pass, &call, &mut scratch)?;
        }
        attention.forward_in_pass(&mut pass, &call, &mut scratch)
    })
    .map_err(|e| e.to_string())?;
    let got: Vec<f32> = gpu.download(&out, n).map_err(|e| e.to_string())?;
    let (want, tolerance) = vector.expected("out").expect("an output");
    let off = compare(&got, &want, tolerance).map_err(|e| e.to_string())?;
    Ok(off.absolute / tolerance.absolute)
}

#[test]
fn the_encodings_of_others() {
    let mut report = Report::new("positions, sinusoid vectors");
    for name in SINUSOID {
        let vector = Vector::load(FAMILY, name);
        let (length, dim) = (vector.size("length"), vector.size("dim"));
        let (base, start) = (vector.number("base").expect("a base"), vector.size("start") as u32);
        let want = vector.f64("out");
        let got = reference::sinusoid::<f64>(dim, base, start, length).expect("an encoding");
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-14), "{name}");
        assert_eq!(got.len(), want.len());
        let zeros = Part::new(vec![0.0; length * dim], [1, 1, length, dim]);
        for profile in profiles() {
            let setup = Setup::plain(profile);
            report.record(name, &setup.named(), setup.add_sinusoid(&zeros, base, &At::Start(start), 1.0));
        }
    }
    for name in D2L {
        let vector = Vector::load("d2l", name);
        let (x, base) = (vector.floats("x"), vector.number("base").expect("a base"));
        let (want, tolerance) = vector.expected("out").expect("an output");
        let table = PositionTable::Sinusoid(base);
        let x = Part::new(x.data, x.shape);
        let got = reference::add_positions(&widen::<f64>(&x.data), x.shape, table, At::Start(0), 1.0);
        // Their table is f32, from angles in f32.
        let tolerance = reference::compare::Tolerance { absolute: tolerance.absolute.max(4e-6) };
        compare(&got.expect("fits"), &want, tolerance).unwrap_or_else(|e| panic!("{name}: {e}"));
        for profile in profiles() {
            let setup = Setup::plain(profile);
            report.record(name, &setup.named(), setup.add_sinusoid(&x, base, &At::Start(0), 1.0));
        }
    }
    report.finish();
}

/// Its caches are random numbers, not cosines: they show which channels are pairs, and no kernel takes them.
#[test]
fn the_pairs_of_onnx() {
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
    }
}

/// The numbers are the formulas' of `transformers`, `modeling_rope_utils.py`, computed in Python.
#[test]
fn scaled_frequencies_are_those_of_other_programs() {
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
    // Every pair but the first turns too rarely; every pair turns often enough.
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

#[test]
fn rotations_equal_the_reference() {
    let mut report = Report::new("positions, rotate");
    let x = normals("rotate", [2, 3, 5, 14]);
    let yarn = RopeScaling::Yarn {
        factor: 16.0,
        original_len: 512,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
    };
    for setup in Setup::all() {
        for order in [RopeOrder::Half, RopeOrder::Interleaved] {
            for rotary_dim in [14, 6, 2] {
                let config = RopeConfig::new(rotary_dim).order(order).scaling(yarn);
                for (n, at) in places(MAX_POSITION).iter().enumerate() {
                    // Windows and wide rotations meet every place, the rest some.
                    if setup.layout == Layout::Window(7) || rotary_dim == 14 || n % 3 == rotary_dim % 3 {
                        let name = format!("{order:?} {rotary_dim} at {n}");
                        report.record(&name, &setup.named(), setup.rotate(&x, config, at));
                    }
                }
            }
        }
    }
    report.finish();
}

#[test]
fn sums_equal_the_reference() {
    let mut report = Report::new("positions, add");
    let table = normals("a learned table", [1, 1, 9, 7]);
    for setup in Setup::all() {
        // An odd width ends with a sine.
        let x = normals("add", [2, 2, 5, 7]);
        for (n, at) in places(MAX_POSITION).iter().enumerate() {
            let judged = setup.add_sinusoid(&x, 10_000.0, at, 2.5);
            report.record(&format!("sinusoid at {n}"), &setup.named(), judged);
        }
        for dtype in [DType::F32, DType::F16] {
            if dtype == DType::F16 && !setup.profile.f16 {
                report.skip("F16: the device lacks SHADER_F16".into(), "a learned table");
                continue;
            }
            for (n, at) in places(8).iter().enumerate() {
                let judged = setup.add_learned(&x, (&table, dtype), at, -0.5);
                report.record(&format!("{dtype:?} table at {n}"), &setup.named(), judged);
            }
        }
    }
    report.finish();
}

/// Every digit of a position, and every pair of a width in use.
#[test]
fn far_positions_are_as_exact_as_near_ones() {
    let mut report = Report::new("positions, far");
    let mut rng = Rng::named("far");
    let positions: Vec<u32> = (0..4096).map(|_| rng.below(1 << 24) as u32).collect();
    let at = At::Tensor(Part::new(positions, [1, 1, 4096, 1]));
    let x = normals("far", [1, 1, 4096, 64]);
    let setup = Setup::plain(full());
    for order in [RopeOrder::Half, RopeOrder::Interleaved] {
        let config = RopeConfig::new(64).base(500_000.0).order(order);
        report.record(&format!("{order:?}"), &setup.named(), setup.rotate(&x, config, &at));
    }
    report.record("sinusoid", &setup.named(), setup.add_sinusoid(&x, 10_000.0, &at, 0.0));
    report.finish();
}

#[test]
fn the_first_position_leaves_every_bit() {
    let gpu = &full().gpu;
    let x: Vec<f32> = normals("bits", [1, 1, 1, 64]).data;
    let buffer = gpu.upload(&x).expect("an upload");
    let rope = Rope::new(gpu.device(), RopeConfig::new(64)).expect("a rope");
    let x_view = TensorView::new(&buffer, DType::F32, [1, 1, 1, 64]);
    let call = Rotate { x: x_view, out: None, rope: &rope, at: At::Start(0) };
    let positions = Positions::new(gpu.device());
    let mut scratch = scratch(gpu);
    gpu.submit(|e| positions.rotate(e, &call, &mut scratch)).expect("a rotation");
    assert_eq!(gpu.download::<f32>(&buffer, 64).expect("x"), x);
}

/// More rows than there may be workgroups: each does the work of several.
#[test]
fn few_workgroups_do_the_work_of_many() {
    let limit = |limits: &mut wgpu::Limits| limits.max_compute_workgroups_per_dimension = 3;
    let [gpu, _] = devices(limit);
    let shape = [2, 2, 97, 10];
    let x = normals("few workgroups", shape);
    let buffers = [gpu.upload(&x.data).expect("x"), gpu.buffer(x.data.len() * 4).expect("out")];
    let [x_view, out] = buffers.each_ref().map(|b| TensorView::new(b, DType::F32, shape));
    let config = RopeConfig::new(6);
    let rope = Rope::new(gpu.device(), config).expect("a rope");
    let positions = Positions::with_pipelines(gpu.pipelines());
    let mut scratch = scratch(&gpu);
    let got = |scratch: &mut Scratch| {
        let call = Rotate { x: x_view, out: Some(out), rope: &rope, at: At::Start(9) };
        gpu.submit(|e| positions.rotate(e, &call, scratch)).expect("a rotation");
        let rotated: Vec<f32> = gpu.download(&buffers[1], x.data.len()).expect("out");
        let table = PositionTable::Learned(TensorView::new(&buffers[0], DType::F32, [1, 1, 388, 10]));
        let call = AddPositions { x: out, out: None, table, at: At::Start(5), scale: 1.0 };
        gpu.submit(|e| positions.add(e, &call, scratch)).expect("a sum");
        (rotated, gpu.download::<f32>(&buffers[1], x.data.len()).expect("out"))
    };
    let (rotated, sum) = got(&mut scratch);
    // A recording of the same calls compiles nothing and says the same.
    assert_eq!(gpu.pipelines().compiled(), 2);
    assert!(got(&mut scratch) == (rotated.clone(), sum.clone()) && gpu.pipelines().compiled() == 2);
    let wide = widen::<f64>(&x.data);
    let want = reference::rotate(&wide, shape, &config, At::Start(9)).expect("fits");
    assert!(rotated.iter().zip(&want).all(|(g, w)| (f64::from(*g) - w).abs() < 1e-5));
    let table = PositionTable::Learned(&wide[..]);
    let want = reference::add_positions(&want, shape, table, At::Start(5), 1.0).expect("fits");
    assert!(sum.iter().zip(&want).all(|(g, w)| (f64::from(*g) - w).abs() < 1e-5));
}

/// Two devices of one instance: across instances wgpu cannot tell whose a buffer is.
fn devices(change: impl FnOnce(&mut wgpu::Limits)) -> [Gpu; 2] {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = pollster::block_on(instance.request_adapter(&Default::default())).expect("an adapter");
    let mut required_limits = wgpu::Limits::default();
    change(&mut required_limits);
    let descriptor = wgpu::DeviceDescriptor { required_limits, ..Default::default() };
    [(); 2].map(|()| {
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("a device");
        Gpu::with_device(device, queue)
    })
}

fn says(error: Error, words: &[&str]) {
    let message = error.to_string();
    assert!(words.iter().all(|w| message.contains(w)), "{words:?} not in {message:?}");
}

#[test]
fn bad_configurations_are_refused() {
    let device = full().gpu.device();
    let refused = |config: RopeConfig, words: &[&str]| {
        says(config.check().expect_err("refused"), words);
        says(Rope::new(device, config).expect_err("refused"), words);
        says(
            reference::rotate(&[1.0f64; 4], [1, 1, 1, 4], &config, At::Start(0)).expect_err("refused"),
            words,
        );
        assert!(config.frequencies().is_empty());
    };
    let four = RopeConfig::new(4);
    refused(RopeConfig::new(0), &["rotary_dim is 0"]);
    refused(RopeConfig::new(7), &["rotary_dim 7 is not divisible by", "2"]);
    refused(RopeConfig::new(65_538), &["rotary_dim is 65538", "at most 65536"]);
    for base in [1.0, 0.0, -10.0, f64::NAN, f64::INFINITY] {
        refused(four.base(base), &["rope base is", &base.to_string(), "above 1"]);
    }
    for factor in [0.5, -1.0, f64::NAN, f64::INFINITY] {
        refused(four.scaling(RopeScaling::Linear { factor }), &["factor is", "at least 1"]);
        refused(four.scaling(RopeScaling::NtkAware { factor }), &["factor is", "at least 1"]);
    }
    let yarn = |factor, original_len, beta_fast, beta_slow, attention_factor| {
        four.scaling(RopeScaling::Yarn { factor, original_len, beta_fast, beta_slow, attention_factor })
    };
    assert!(yarn(2.0, 512, 32.0, 1.0, None).check().is_ok());
    refused(yarn(0.0, 512, 32.0, 1.0, None), &["factor is 0"]);
    refused(yarn(2.0, 0, 32.0, 1.0, None), &["original_len is 0"]);
    refused(yarn(2.0, 512, 32.0, 0.0, None), &["beta_slow is 0"]);
    refused(yarn(2.0, 512, 1.0, 1.0, None), &["beta_fast is 1"]);
    refused(yarn(2.0, 512, f64::NAN, 1.0, None), &["beta_fast is NaN"]);
    for amplitude in [0.0, -1.0, 1e300, 1e-300, f64::NAN] {
        refused(yarn(2.0, 512, 32.0, 1.0, Some(amplitude)), &["attention_factor is"]);
    }
    let llama = |factor, low_freq_factor, high_freq_factor, original_len| {
        four.scaling(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len })
    };
    assert!(llama(8.0, 1.0, 4.0, 8192).check().is_ok());
    refused(llama(f64::NAN, 1.0, 4.0, 8192), &["factor is NaN"]);
    refused(llama(8.0, 0.0, 4.0, 8192), &["low_freq_factor is 0"]);
    refused(llama(8.0, 4.0, 4.0, 8192), &["high_freq_factor is 4"]);
    refused(llama(8.0, 1.0, 4.0, 0), &["original_len is 0"]);

    for (dim, base, words) in
        [(0, 1e4, "sinusoid dim is 0"), (4, 0.5, "sinusoid base is 0.5"), (65_537, 1e4, "65537")]
    {
        says(Sinusoid::new(device, dim, base).expect_err("refused"), &[words]);
        says(reference::sinusoid::<f64>(dim, base, 0, 1).expect_err("refused"), &[words]);
    }
    // 65536 channels are 192 MiB of table.
    let small = defaults().gpu.device();
    let words = ["`rope`", "201326592", "134217728"];
    says(Rope::new(small, RopeConfig::new(65_536)).expect_err("refused"), &words);
    says(Sinusoid::new(small, 65_536, 1e4).expect_err("refused"), &["`sinusoid`", "201326592"]);
}

/// The tensors of a rotation and of a sum, ready to be spoiled.
struct Bench {
    gpu: Gpu,
    rope: Rope,
    sinusoid: Sinusoid,
    x: wgpu::Buffer,
    out: wgpu::Buffer,
    table: wgpu::Buffer,
    positions: wgpu::Buffer,
}

const SHAPE: [usize; 4] = [2, 3, 5, 8];
const POISON: u32 = 0x7fc1_2345;

impl Bench {
    fn new(gpu: &Gpu) -> Self {
        let poison = vec![POISON; 1024];
        let upload = || gpu.upload(&poison).expect("an upload");
        Bench {
            gpu: gpu.clone(),
            rope: Rope::new(gpu.device(), RopeConfig::new(6)).expect("a rope"),
            sinusoid: Sinusoid::new(gpu.device(), 8, 1e4).expect("a sinusoid"),
            x: upload(),
            out: upload(),
            table: upload(),
            positions: upload(),
        }
    }

    fn rotate(&self) -> Rotate<'_> {
        let [x, out] = [&self.x, &self.out].map(|b| TensorView::new(b, DType::F32, SHAPE));
        Rotate { x, out: Some(out), rope: &self.rope, at: At::Tensor(self.at([2, 1, 5, 1])) }
    }

    fn add(&self) -> AddPositions<'_> {
        let [x, out] = [&self.x, &self.out].map(|b| TensorView::new(b, DType::F32, SHAPE));
        let table = PositionTable::Learned(TensorView::new(&self.table, DType::F32, [1, 1, 9, 8]));
        AddPositions { x, out: Some(out), table, at: At::Start(4), scale: 1.0 }
    }

    fn at(&self, shape: [usize; 4]) -> TensorView<'_> {
        TensorView::new(&self.positions, DType::U32, shape)
    }

    /// Refused in an encoder and in a pass, after which nothing has been written.
    fn refuses(
        &self,
        words: &[&str],
        record: impl Fn(&Positions, &mut wgpu::CommandEncoder, &mut Scratch) -> Result<(), Error>,
    ) {
        let positions = Positions::with_pipelines(self.gpu.pipelines());
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        let error = record(&positions, &mut encoder, &mut scratch(&self.gpu)).expect_err("refused");
        says(error, words);
        self.gpu.queue().submit([encoder.finish()]);
        for buffer in [&self.x, &self.out] {
            let now = self.gpu.download::<u32>(buffer, 1024).expect("a read-back");
            assert!(now.iter().all(|word| *word == POISON), "{words:?}: something was recorded");
        }
    }

    fn refuses_rotation<'a>(&'a self, words: &[&str], change: impl Fn(&mut Rotate<'a>)) {
        let mut call = self.rotate();
        change(&mut call);
        self.refuses(words, |positions, encoder, scratch| positions.rotate(encoder, &call, scratch));
        self.refuses(words, |positions, encoder, scratch| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            positions.rotate_in_pass(&mut pass, &call, scratch)
        });
    }

    fn refuses_sum<'a>(&'a self, words: &[&str], change: impl Fn(&mut AddPositions<'a>)) {
        let mut call = self.add();
        change(&mut call);
        self.refuses(words, |positions, encoder, scratch| positions.add(encoder, &call, scratch));
        self.refuses(words, |positions, encoder, scratch| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            positions.add_in_pass(&mut pass, &call, scratch)
        });
    }
}

#[test]
fn bad_calls_are_refused_before_anything_is_recorded() {
    let bench = Bench::new(&full().gpu);
    let view = |buffer, dtype, shape| TensorView::new(buffer, dtype, shape);
    let Bench { x, out, table, .. } = &bench;
    let [f32, u32] = [DType::F32, DType::U32];
    let learned = |shape| PositionTable::Learned(view(table, f32, shape));

    // Tensors of either call.
    bench.refuses_rotation(&["`x`", "heads is 0"], |c| c.x = view(x, f32, [2, 0, 5, 8]));
    bench.refuses_rotation(&["`x`", "F32 or F16", "U32"], |c| c.x = view(x, u32, SHAPE));
    bench.refuses_rotation(&["`x`", "ends at byte", "4096"], |c| c.x = c.x.with_offset(900));
    bench.refuses_rotation(&["`x`", "2^32"], |c| c.x = c.x.with_offset(usize::MAX));
    bench.refuses_rotation(&["`out`", "F32 or F16", "Bool"], |c| c.out = Some(view(out, DType::Bool, SHAPE)));
    bench.refuses_rotation(&["`out`", "heads must be 3", "got 2"], |c| {
        c.out = Some(view(out, f32, [2, 2, 5, 8]))
    });
    bench.refuses_rotation(&["`out`", "share memory"], |c| {
        c.out = Some(view(out, f32, SHAPE).with_strides([0, 0, 0, 1]));
    });
    bench.refuses_rotation(&["`x`", "share memory"], |c| {
        (c.x, c.out) = (c.x.with_strides([0, 0, 0, 1]), None);
    });
    bench.refuses_rotation(&["`out`", "shares its buffer with `x`"], |c| c.out = Some(c.x));
    bench.refuses_rotation(&["`out`", "shares its buffer with `positions`"], |c| {
        c.at = At::Tensor(view(out, u32, [1, 1, 5, 1]).with_offset(500));
    });
    bench.refuses_rotation(&["`x`", "shares its buffer with `positions`"], |c| {
        (c.out, c.at) = (None, At::Tensor(view(x, u32, [1, 1, 5, 1]).with_offset(500)));
    });
    bench.refuses_sum(&["`out`", "dim must be 8", "got 7"], |c| c.out = Some(view(out, f32, [2, 3, 5, 7])));
    bench.refuses_sum(&["`out`", "shares its buffer with `table`"], |c| {
        c.table = PositionTable::Learned(view(out, f32, [1, 1, 9, 8]));
    });

    // Positions.
    bench.refuses_rotation(&["`positions`", "U32", "F32"], |c| {
        c.at = At::Tensor(view(table, f32, [2, 1, 5, 1]));
    });
    for (shape, words) in [
        ([3, 1, 5, 1], "batch must be 2 or 1, got 3"),
        ([2, 3, 5, 1], "heads must be 1, got 3"),
        ([2, 1, 4, 1], "length must be 5 or 1, got 4"),
        ([2, 1, 5, 2], "dim must be 1, got 2"),
        ([2, 1, 0, 1], "length is 0"),
    ] {
        bench.refuses_rotation(&["`positions`", words], |c| c.at = At::Tensor(bench.at(shape)));
        bench.refuses_sum(&["`positions`", words], |c| c.at = At::Tensor(bench.at(shape)));
    }
    let words = ["start is 16777212", "at most 2^24"];
    bench.refuses_rotation(&words, |c| c.at = At::Start(MAX_POSITION - 3));
    bench.refuses_rotation(&["start is 4294967295"], |c| c.at = At::Start(u32::MAX));
    bench.refuses_sum(&words, |c| {
        (c.at, c.table) = (At::Start(MAX_POSITION - 3), PositionTable::Sinusoid(&bench.sinusoid));
    });
    bench.refuses_sum(&["`table`", "length must be at least 10", "got 9"], |c| c.at = At::Start(5));
    bench.refuses_sum(&["`table`", "at least 4294967300", "got 9"], |c| c.at = At::Start(u32::MAX));

    // What is added, and by how much x is scaled.
    let wide = Rope::new(bench.gpu.device(), RopeConfig::new(10)).expect("a rope");
    let mut call = bench.rotate();
    call.rope = &wide;
    bench.refuses(&["`x`", "dim must be at least 10", "got 8"], |p, e, s| p.rotate(e, &call, s));
    bench.refuses_sum(&["`x`", "dim must be 8", "got 6"], |c| {
        (c.x, c.out) = (view(x, f32, [2, 3, 5, 6]), None);
        c.table = PositionTable::Sinusoid(&bench.sinusoid);
    });
    for (shape, words) in [
        ([2, 1, 9, 8], "batch must be 1, got 2"),
        ([1, 2, 9, 8], "heads must be 1, got 2"),
        ([1, 1, 9, 7], "dim must be 8, got 7"),
        ([1, 1, 0, 8], "length is 0"),
    ] {
        bench.refuses_sum(&["`table`", words], |c| c.table = learned(shape));
    }
    bench.refuses_sum(&["`table`", "F32 or F16", "U32"], |c| {
        c.table = PositionTable::Learned(view(table, u32, [1, 1, 9, 8]));
    });
    for scale in [f32::NAN, f32::INFINITY] {
        bench.refuses_sum(&["scale is", "finite"], |c| c.scale = scale);
    }

    // Buffers and devices.
    let usage = wgpu::BufferUsages::COPY_SRC;
    let plain = wgpu::BufferDescriptor { label: None, size: 4096, usage, mapped_at_creation: false };
    let plain = bench.gpu.device().create_buffer(&plain);
    let mut call = bench.rotate();
    call.x = view(&plain, f32, SHAPE);
    bench.refuses(&["`x`", "STORAGE"], |p, e, s| p.rotate(e, &call, s));

    let bench = Bench::new(&defaults().gpu);
    bench.refuses_rotation(&["SHADER_F16"], |c| c.x = view(&bench.x, DType::F16, SHAPE));
    bench.refuses_sum(&["SHADER_F16"], |c| {
        c.table = PositionTable::Learned(view(&bench.table, DType::F16, [1, 1, 9, 8]));
    });

    let [one, other] = devices(|limits| {
        limits.max_compute_workgroups_per_dimension = 4;
        limits.max_storage_buffer_binding_size = 1 << 20;
    });
    let (bench, stranger) = (Bench::new(&one), Bench::new(&other));
    bench.refuses_rotation(&["workgroups", "is 5", "allows 4"], |c| {
        (c.x, c.out) = (view(&bench.x, f32, [1, 5, 1, 8]), None);
        c.at = At::Start(0);
    });
    let mut call = bench.rotate();
    call.rope = &stranger.rope;
    bench.refuses(&["wgpu refused"], |p, e, s| p.rotate(e, &call, s));
    let big = one.buffer(2 << 20).expect("a buffer");
    let mut call = bench.rotate();
    call.x = view(&big, f32, SHAPE).with_strides([300_000, 8, 24, 1]);
    bench.refuses(&["`x`", "allows 1048576"], |p, e, s| p.rotate(e, &call, s));

    // What all of them spoiled is right.
    let positions = Positions::with_pipelines(one.pipelines());
    let mut scratch = scratch(&one);
    one.submit(|e| positions.rotate(e, &bench.rotate(), &mut scratch)).expect("a rotation");
    one.submit(|e| positions.add(e, &bench.add(), &mut scratch)).expect("a sum");
}

#[test]
fn the_reference_refuses_what_does_not_fit() {
    let (x, config, shape) = ([0.5f64; 24], RopeConfig::new(4), [1, 2, 3, 4]);
    let rotate = |x: &[f64], shape, at| reference::rotate(x, shape, &config, at);
    says(rotate(&x[1..], shape, At::Start(0)).expect_err("refused"), &["`x`: 24 elements expected, got 23"]);
    says(rotate(&[], [1, 0, 3, 4], At::Start(0)).expect_err("refused"), &["heads is 0"]);
    says(rotate(&x, [1, 4, 3, 2], At::Start(0)).expect_err("refused"), &["dim must be at least 4"]);
    says(rotate(&x, shape, At::Start(MAX_POSITION - 1)).expect_err("refused"), &["start is 16777214"]);
    assert!(rotate(&x, shape, At::Start(MAX_POSITION - 2)).is_ok());
    let two = At::Tensor(HostTensor::new(&[1, 2], [1, 1, 2, 1]));
    says(rotate(&x, shape, two).expect_err("refused"), &["`positions`: length must be 3 or 1, got 2"]);
    let short = At::Tensor(HostTensor::new(&[1, 2], [1, 1, 3, 1]));
    says(rotate(&x, shape, short).expect_err("refused"), &["`positions`: 3 elements expected, got 2"]);
    let add = |table: &[f64], start| {
        reference::add_positions(&x, shape, PositionTable::Learned(table), At::Start(start), 1.0)
    };
    says(add(&x[..13], 0).expect_err("refused"), &["`table`: 12 elements expected, got 13"]);
    says(add(&[], 0).expect_err("refused"), &["`table`: 4 elements expected, got 0"]);
    says(add(&x[..12], 1).expect_err("refused"), &["`table`: length must be at least 4", "got 3"]);
    assert_eq!(add(&x[..12], 0).expect("fits"), [1.0; 24]);
    assert!(reference::sinusoid::<f32>(4, 1e4, 0, 0).expect("nothing").is_empty());
    says(reference::sinusoid::<f32>(4, 1e4, MAX_POSITION, 2).expect_err("refused"), &["start is 16777215"]);
    let (cos, sin) = ([1.0; 6], [0.0; 6]);
    let by = |cos: &[f64], sin: &[f64]| reference::rotate_by(&x, shape, RopeOrder::Half, cos, sin);
    assert_eq!(by(&cos, &sin).expect("fits"), x);
    says(by(&cos[1..], &sin).expect_err("refused"), &["`cos`: 3 elements expected, got 5"]);
    says(by(&cos, &sin[1..]).expect_err("refused"), &["`sin`: 6 elements expected, got 5"]);
}

/// The judgement must be able to fail.
#[test]
fn the_other_order_is_not_this_one() {
    let setup = Setup::plain(full());
    let x = normals("the other order", [1, 1, 5, 8]);
    let wide = widen::<f64>(&x.data);
    let config = RopeConfig::new(8);
    let want =
        reference::rotate(&wide, x.shape, &config.order(RopeOrder::Interleaved), At::Start(3)).expect("fits");
    let rope = Rope::new(setup.profile.gpu.device(), config).expect("a rope");
    let judged = setup.judge(
        &x,
        &At::Start(3),
        &want,
        |_| 1e-3,
        |positions, encoder, (x, out, at), scratch| {
            positions.rotate(encoder, &Rotate { x, out, rope: &rope, at }, scratch)
        },
    );
    assert!(judged.is_err_and(|e| e.contains("element")));
}
