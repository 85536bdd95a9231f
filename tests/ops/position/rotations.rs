//! Rotations: every order, width and position, compared with the reference.

use wgpu_attention::position::{
    MAX_POSITION, Positions, Rope, RopeConfig, RopeOrder, RopeScaling, Rotate, Rotation, RowPositions,
};
use wgpu_attention::reference;
use wgpu_attention::reference::widen;
use wgpu_attention::{DType, TensorView};

use crate::harness::positions::{Setup, normals, places};
use crate::harness::run::Layout;
use crate::harness::{Report, full};

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
                    // Windows and wide rotations use every position, the others some.
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

/// Tables with a row for each row of x, and tables whose rows positions choose, per batch and for
/// all.
#[test]
fn given_cosines_and_sines_equal_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("positions, cos and sin");
    let x = normals("given", [2, 3, 5, 14]);
    for setup in Setup::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for order in [RopeOrder::Half, RopeOrder::Interleaved] {
                for shape in [[2, 1, 5, 7], [1, 1, 5, 3], [1, 1, 9, 7], [2, 1, 9, 1]] {
                    let [cos, sin] = ["cos", "sin"].map(|name| normals(name, shape));
                    let rows = shape[2] as u32;
                    for (n, at) in places(rows - 1).iter().enumerate() {
                        // Windows use every position, the others some.
                        if setup.layout == Layout::Window(7) || n % 3 == shape[3] % 3 {
                            let judged = setup.rotate_by(&x, order, ([&cos, &sin], dtype), at);
                            let name = format!("{dtype:?} {shape:?} {order:?} at {n}");
                            report.record(&name, &setup.named(), judged);
                        }
                    }
                }
            }
        }
    }
    report.finish();
}

/// The cosines and sines of a rope give its rotation. Exchanged ones do not.
#[test]
fn given_cosines_and_sines_are_not_exchanged() {
    let setup = Setup::plain(full());
    let x = normals("exchanged", [1, 1, 5, 8]);
    let config = RopeConfig::new(6);
    let angles = (3..8).flat_map(|p| config.frequencies().into_iter().map(move |f| f64::from(p) * f));
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.map(|a| (a.cos() as f32, a.sin() as f32)).unzip();
    let [cos, sin] = [cos, sin].map(|t| setup.profile.gpu.upload(&t).expect("an upload"));
    let [cos, sin] = [&cos, &sin].map(|t| TensorView::new(t, DType::F32, [1, 1, 5, 3]));
    let wide = widen::<f64>(&x.data);
    let want = reference::rotate(&wide, x.shape, &config, RowPositions::Start(3)).expect("fits");
    let judged = |cos, sin, order| {
        pollster::block_on(setup.judge(
            &x,
            &RowPositions::Start(0),
            &want,
            |_| 1e-5,
            |positions, encoder, (x, out, at)| {
                let rotation = Rotation::CosSin { cos, sin, order };
                positions.rotate(encoder, &Rotate::new(x, rotation, at).out(out))
            },
        ))
    };
    judged(cos, sin, RopeOrder::Half).expect("the rope's rotation");
    assert!(judged(sin, cos, RopeOrder::Half).is_err_and(|e| e.contains("element")));
    assert!(judged(cos, sin, RopeOrder::Interleaved).is_err_and(|e| e.contains("element")));
}

#[test]
fn first_position_changes_no_bit() {
    let gpu = &full().gpu;
    let x: Vec<f32> = normals("bits", [1, 1, 1, 64]).data;
    let buffer = gpu.upload(&x).expect("an upload");
    let rope = Rope::new(gpu.device(), RopeConfig::new(64)).expect("a rope");
    let x_view = TensorView::new(&buffer, DType::F32, [1, 1, 1, 64]);
    let out = gpu.upload(&[f32::NAN; 64]).expect("an upload");
    let out_view = TensorView::new(&out, DType::F32, [1, 1, 1, 64]);
    let call = Rotate::new(x_view, Rotation::Rope(&rope), RowPositions::Start(0)).out(out_view);
    let positions = Positions::new(gpu.device());
    gpu.submit(|e| positions.rotate(e, &call)).expect("a rotation");
    assert_eq!(gpu.download::<f32>(&out, 64).expect("out"), x);
    let in_place = call.out(None);
    gpu.submit(|e| positions.rotate(e, &in_place)).expect("a rotation");
    assert_eq!(gpu.download::<f32>(&buffer, 64).expect("x"), x);
    // The second position changes them.
    let second = Rotate::new(x_view, &rope, RowPositions::Start(1));
    gpu.submit(|e| positions.rotate(e, &second)).expect("a rotation");
    assert_ne!(gpu.download::<f32>(&buffer, 64).expect("x"), x);
}

/// The comparison must be able to fail.
#[test]
fn rotation_orders_differ() {
    let setup = Setup::plain(full());
    let x = normals("the other order", [1, 1, 5, 8]);
    let wide = widen::<f64>(&x.data);
    let config = RopeConfig::new(8);
    let want =
        reference::rotate(&wide, x.shape, &config.order(RopeOrder::Interleaved), RowPositions::Start(3))
            .expect("fits");
    let rope = Rope::new(setup.profile.gpu.device(), config).expect("a rope");
    let judged = pollster::block_on(setup.judge(
        &x,
        &RowPositions::Start(3),
        &want,
        |_| 1e-3,
        |positions, encoder, (x, out, at)| {
            positions.rotate(encoder, &Rotate::new(x, Rotation::Rope(&rope), at).out(out))
        },
    ));
    assert!(judged.is_err_and(|e| e.contains("element")));
}
