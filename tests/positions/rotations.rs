//! Rotations: every order, width and place against the reference.

use wgpu_attention::reference::{self, widen};
use wgpu_attention::{
    DType, MAX_POSITION, Positions, Rope, RopeConfig, RopeOrder, RopeScaling, Rotate, RowPositions,
    TensorView,
};

use super::scratch;
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
fn the_first_position_leaves_every_bit() {
    let gpu = &full().gpu;
    let x: Vec<f32> = normals("bits", [1, 1, 1, 64]).data;
    let buffer = gpu.upload(&x).expect("an upload");
    let rope = Rope::new(gpu.device(), RopeConfig::new(64)).expect("a rope");
    let x_view = TensorView::new(&buffer, DType::F32, [1, 1, 1, 64]);
    let out = gpu.upload(&[f32::NAN; 64]).expect("an upload");
    let out_view = TensorView::new(&out, DType::F32, [1, 1, 1, 64]);
    let call = Rotate { x: x_view, out: Some(out_view), rope: &rope, at: RowPositions::Start(0) };
    let positions = Positions::new(gpu.device());
    let mut scratch = scratch(gpu);
    gpu.submit(|e| positions.rotate(e, &call, &mut scratch)).expect("a rotation");
    assert_eq!(gpu.download::<f32>(&out, 64).expect("out"), x);
    let in_place = Rotate { out: None, ..call };
    gpu.submit(|e| positions.rotate(e, &in_place, &mut scratch)).expect("a rotation");
    assert_eq!(gpu.download::<f32>(&buffer, 64).expect("x"), x);
    // The second position does not.
    let second = Rotate { at: RowPositions::Start(1), ..in_place };
    gpu.submit(|e| positions.rotate(e, &second, &mut scratch)).expect("a rotation");
    assert_ne!(gpu.download::<f32>(&buffer, 64).expect("x"), x);
}

/// The judgement must be able to fail.
#[test]
fn the_other_order_is_not_this_one() {
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
        |positions, encoder, (x, out, at), scratch| {
            positions.rotate(encoder, &Rotate { x, out, rope: &rope, at }, scratch)
        },
    ));
    assert!(judged.is_err_and(|e| e.contains("element")));
}
