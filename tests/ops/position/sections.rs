//! Rotations by positions on three axes: time, height and width.

use wgpu_attention::position::{
    Positions, Rope, RopeConfig, RopeOrder, RopeScaling, RopeSections, Rotate, RowPositions,
};
use wgpu_attention::reference::{self, widen};
use wgpu_attention::{DType, HostTensor, TensorView};

use crate::harness::positions::{Setup, axes_places, host, normals};
use crate::harness::rotary::sections_of;
use crate::harness::run::Layout;
use crate::harness::{HostData, Report, Rng, Vector, full, profiles};

pub const AXES_FAMILY: &str = "mrope";
pub const AXES_NAMES: &[&str] = &[
    "mrope_contiguous",
    "mrope_contiguous_bwd",
    "mrope_interleaved_sections",
    "mrope_interleaved_sections_bwd",
    "mrope_partial",
    "mrope_qwen2_vl",
    "mrope_qwen3_vl",
    "mrope_text_only",
];

fn config_of(vector: &Vector) -> RopeConfig {
    let of = &vector.attrs["sections"];
    let sections = [0, 1, 2].map(|n| of[n].as_u64().expect("a section") as usize);
    let sections = match vector.attrs["section_layout"].as_str() {
        Some("contiguous") => RopeSections::Contiguous(sections),
        Some("interleaved") => RopeSections::Interleaved(sections),
        other => panic!("{other:?} is new"),
    };
    let order = if vector.attrs["interleaved"] == true { RopeOrder::Interleaved } else { RopeOrder::Half };
    let config = RopeConfig::new(vector.size("rotary_dim")).order(order).sections(sections);
    config.base(vector.number("base").expect("a base"))
}

/// Returns the positions `[3, batch, length]` of a vector as `[batch, 3, length, 1]`.
fn positions_of(vector: &Vector) -> HostData<u32> {
    let [_, batch, length] = vector.shape("position_ids")[..] else { panic!("three axes") };
    let ids = vector.integers("position_ids");
    HostData::of([batch, 3, length, 1], |[b, axis, i, _]| ids[(axis * batch + b) * length + i] as u32)
}

/// The tensors before and after, and true for gradients.
const PAIRS: [(&str, &str, bool); 4] =
    [("q", "q_rot", false), ("k", "k_rot", false), ("dq_rot", "dq", true), ("dk_rot", "dk", true)];

#[test]
fn vectors_match_on_three_axes() {
    let mut report = Report::new("positions, vectors on three axes");
    let mut gradients = 0;
    for name in AXES_NAMES {
        let vector = Vector::load(AXES_FAMILY, name);
        let (config, at) = (config_of(&vector), RowPositions::Tensor(positions_of(&vector)));
        for (given, rotated, back) in PAIRS.into_iter().filter(|(given, ..)| vector.has(given)) {
            gradients += usize::from(back);
            let x = vector.floats(given);
            let rotate = if back { reference::rotate_backward } else { reference::rotate };
            let got = rotate(&widen::<f64>(&x.data), x.shape, &config, host(&at)).expect("fits");
            let want = vector.f64(rotated);
            // The error of the angles, which are products in f64 of at most some thousands.
            let near = |got: &[f64]| got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-11);
            assert!(got.len() == want.len() && near(&got), "{name} {rotated}");
            for setup in Setup::all().into_iter().filter(|setup| setup.layout == Layout::Dense) {
                let setup = Setup { back, ..setup };
                report.record(&format!("{name} {rotated}"), &setup.named(), setup.rotate(&x, config, &at));
            }
        }
    }
    assert_eq!(gradients, 4, "both files with gradients");
    report.finish();
}

/// The tensor of `transformers`, `[3, batch, length]`, is a transposed view.
#[test]
fn transposed_position_ids_match_vectors() {
    let vector = Vector::load(AXES_FAMILY, "mrope_contiguous_bwd");
    let [_, batch, length] = vector.shape("position_ids")[..] else { panic!("three axes") };
    assert!(batch > 1);
    let ids: Vec<u32> = vector.integers("position_ids").iter().map(|id| *id as u32).collect();
    for profile in profiles() {
        let gpu = &profile.gpu;
        let ids = gpu.upload(&ids).expect("an upload");
        let at = TensorView::new(&ids, DType::U32, [3, batch, length, 1]).transposed(0, 1);
        let rope = Rope::new(gpu.device(), config_of(&vector)).expect("a rope");
        let positions = Positions::with_pipelines(gpu.pipelines());
        for (given, rotated, back) in PAIRS {
            let x = vector.floats(given);
            let buffer = gpu.upload(&x.data).expect("an upload");
            let view = TensorView::new(&buffer, DType::F32, x.shape);
            let call = Rotate::new(view, &rope, RowPositions::Tensor(at));
            let rotate = if back { Positions::rotate_backward } else { Positions::rotate };
            gpu.submit(|e| rotate(&positions, e, &call)).expect("a rotation");
            let got: Vec<f32> = gpu.download(&buffer, x.data.len()).expect("a read-back");
            let (want, tolerance) = vector.expected(rotated).expect("an output");
            reference::compare::compare(&got, &want, tolerance)
                .unwrap_or_else(|e| panic!("{}, {rotated}: {e}", profile.name));
        }
    }
}

/// Sections of every layout and size, with each order, scaling and shape of positions. Queries and
/// keys have different numbers of heads.
#[test]
fn sections_equal_the_reference() {
    let mut report = Report::new("positions, three axes");
    let inputs = [3, 1].map(|heads| normals("three axes", [2, heads, 5, 14]));
    let yarn = RopeScaling::Yarn {
        factor: 16.0,
        original_len: 512,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
    };
    let scalings = [RopeScaling::None, RopeScaling::Linear { factor: 3.0 }, yarn];
    let sections = [
        (14, RopeSections::Contiguous([2, 3, 2])),
        (14, RopeSections::Interleaved([3, 2, 2])),
        (14, RopeSections::Contiguous([0, 7, 0])),
        (14, RopeSections::Interleaved([6, 1, 0])),
        (10, RopeSections::Interleaved([2, 2, 1])),
        (6, RopeSections::Contiguous([1, 0, 2])),
        (2, RopeSections::Contiguous([0, 0, 1])),
    ];
    let tensor = |shape| RowPositions::Tensor(axes_places(shape));
    let places = [
        tensor([2, 3, 5, 1]),
        tensor([1, 3, 5, 1]),
        // The first positions of each sequence, on each axis.
        tensor([2, 3, 1, 1]),
        tensor([1, 3, 1, 1]),
        // Equal positions on all axes.
        tensor([2, 1, 5, 1]),
        RowPositions::Start(900),
    ];
    let rng = &mut Rng::named("sections of three axes");
    for setup in Setup::all() {
        for (rotary_dim, sections) in sections {
            for at in &places {
                let order = rng.pick(&[RopeOrder::Half, RopeOrder::Interleaved]);
                let config = RopeConfig::new(rotary_dim).order(order).scaling(rng.pick(&scalings));
                let config = config.sections(sections);
                let (setup, x) = (Setup { back: rng.chance(0.3), ..setup }, &inputs[rng.below(2)]);
                let name = format!("{config:?} at {at:?}, {:?}", x.shape);
                report.record(&name, &setup.named(), setup.rotate(x, config, at));
            }
        }
    }
    report.finish();
}

/// The comparison must be able to fail: other sections, other layouts and exchanged axes.
#[test]
fn other_sections_differ() {
    let x = normals("other sections", [1, 1, 5, 16]);
    let wide = widen::<f64>(&x.data);
    let at = axes_places([1, 3, 5, 1]);
    let exchanged = HostData::of(at.shape, |[_, axis, i, _]| at.data[[0, 2, 1][axis] * 5 + i]);
    let rotated = |sections, at: &HostData<u32>| {
        let config = RopeConfig::new(16).sections(sections);
        reference::rotate(&wide, x.shape, &config, RowPositions::Tensor(at.host())).expect("fits")
    };
    let contiguous = RopeSections::Contiguous([2, 3, 3]);
    let want = rotated(contiguous, &at);
    let setup = Setup::plain(full());
    let judged = |sections, at: &HostData<u32>| {
        let rope = Rope::new(setup.profile.gpu.device(), RopeConfig::new(16).sections(sections));
        let (rope, at) = (rope.expect("a rope"), RowPositions::Tensor(at.clone()));
        pollster::block_on(setup.judge(
            &x,
            &at,
            &want,
            |_| 1e-4,
            |positions, encoder, (x, out, at)| positions.rotate(encoder, &Rotate::new(x, &rope, at).out(out)),
        ))
    };
    judged(contiguous, &at).expect("the same sections");
    for (sections, at) in [
        (RopeSections::Interleaved([3, 3, 2]), &at),
        (RopeSections::Contiguous([3, 2, 3]), &at),
        (contiguous, &exchanged),
    ] {
        assert!(judged(sections, at).is_err_and(|e| e.contains("element")), "{sections:?}");
    }
}

/// With equal positions on all axes, sections change no bit of the reference.
#[test]
fn text_rotates_as_without_sections() {
    let x: Vec<f64> = widen(&normals("text", [2, 2, 7, 16]).data);
    let shape = [2, 2, 7, 16];
    let places = |[b, _, i, _]: [usize; 4]| (40 * b + i) as u32;
    let [one, three] = [1, 3].map(|axes| HostData::of([2, axes, 7, 1], places));
    let plain = RopeConfig::new(12).base(1e6);
    let rotated = |config: &RopeConfig, at: HostTensor<u32>| {
        reference::rotate(&x, shape, config, RowPositions::Tensor(at)).expect("fits")
    };
    let want = rotated(&plain, one.host());
    for interleaved in [false, true] {
        let config = plain.sections(sections_of(6, interleaved));
        assert_eq!(rotated(&config, three.host()), want);
        assert_eq!(rotated(&config, one.host()), want);
    }
}
