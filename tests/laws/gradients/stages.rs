//! The gradients of the stages around attention: projections, positions, merging.

use wgpu_attention::HostTensor;
use wgpu_attention::position::{PositionTable, RopeConfig, RopeOrder, RowPositions};
use wgpu_attention::reference::{
    add_positions, add_positions_backward, merge, merge_backward, project, project_backward, rotate,
    rotate_backward, rotate_by, rotate_by_backward, widen,
};

use crate::harness::Rng;
use crate::harness::gradients::{Compared, Input, compare_differences};

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn normals(rng: &mut Rng, n: usize) -> Vec<f64> {
    widen(&rng.normals(n))
}

#[track_caller]
fn check(name: &str, inputs: &[Input], loss: impl Fn(&[Vec<f64>]) -> f64) {
    let compared = &mut Compared::new();
    compare_differences(name, inputs, usize::MAX, compared, loss).unwrap_or_else(|e| panic!("{e}"));
    assert!(inputs.iter().all(|input| compared[input.name] > 0), "{name}: {compared:?}");
}

#[test]
fn projections() {
    let rng = &mut Rng::new(1);
    for [rows, d_in, d_out] in [[1, 1, 1], [3, 4, 2], [5, 2, 7]] {
        let [x, w, b] = [rows * d_in, d_out * d_in, d_out].map(|n| normals(rng, n));
        let d_y = normals(rng, rows * d_out);
        let got = project_backward(&x, &w, &d_y, d_in, d_out).expect("it fits");
        let inputs = [
            Input::new("x", &x, &got.d_x),
            Input::new("weight", &w, &got.d_weight),
            Input::new("bias", &b, &got.d_bias),
        ];
        check("project", &inputs, |x| {
            dot(&project(&x[0], &x[1], Some(&x[2]), d_in, d_out).expect("it fits"), &d_y)
        });
        assert!(project_backward(&x, &w, &d_y[1..], d_in, d_out).is_err());
    }
}

#[test]
fn rotations() {
    let rng = &mut Rng::new(2);
    let shape = [2, 2, 3, 8];
    let (x, d_out) = (normals(rng, 96), normals(rng, 96));
    let positions = [5, 0, 900, 3, 3, 77];
    for rope in [
        RopeConfig::new(8),
        RopeConfig::new(4).order(RopeOrder::Interleaved),
        RopeConfig::new(6).order(RopeOrder::Half),
    ] {
        for start in [true, false] {
            let at = || match start {
                true => RowPositions::Start(11),
                false => RowPositions::Tensor(HostTensor::new(&positions, [2, 1, 3, 1])),
            };
            let got = rotate_backward(&d_out, shape, &rope, at()).expect("it fits");
            check("rotate", &[Input::new("x", &x, &got)], |x| {
                dot(&rotate(&x[0], shape, &rope, at()).expect("it fits"), &d_out)
            });
        }
    }
    // Any cosines and sines, including tables that are not rotations.
    let (cos, sin) = (normals(rng, 18), normals(rng, 18));
    for order in [RopeOrder::Half, RopeOrder::Interleaved] {
        let got = rotate_by_backward(&d_out, shape, order, &cos, &sin).expect("it fits");
        check("rotate_by", &[Input::new("x", &x, &got)], |x| {
            dot(&rotate_by(&x[0], shape, order, &cos, &sin).expect("it fits"), &d_out)
        });
    }
}

#[test]
fn learned_positions() {
    let rng = &mut Rng::new(3);
    let (shape, rows) = ([2, 2, 3, 4], 5);
    let (x, table, d_out) = (normals(rng, 48), normals(rng, rows * 4), normals(rng, 48));
    // One position twice, and one past the last.
    let positions = [1, 1, 4, 9, 0, 1];
    for start in [true, false] {
        let at = || match start {
            true => RowPositions::Start(2),
            false => RowPositions::Tensor(HostTensor::new(&positions, [2, 1, 3, 1])),
        };
        let got = add_positions_backward(&d_out, shape, rows, at(), 0.75).expect("it fits");
        let inputs = [Input::new("x", &x, &got.d_x), Input::new("table", &table, &got.d_table)];
        check("add_positions", &inputs, |x| {
            let table = PositionTable::Learned(&x[1][..]);
            dot(&add_positions(&x[0], shape, table, at(), 0.75).expect("it fits"), &d_out)
        });
    }
    let refused = |rows| add_positions_backward(&d_out, shape, rows, RowPositions::Start(3), 1.0).is_err();
    assert!(refused(0) && refused(5) && !refused(6));
}

#[test]
fn merging() {
    let rng = &mut Rng::new(4);
    let (rows, value_dim) = (5, 3);
    let none = f64::NEG_INFINITY;
    let mut compared = Compared::new();
    for parts in 1..=3 {
        let mut outs: Vec<_> = (0..parts).map(|_| normals(rng, rows * value_dim)).collect();
        let mut lses: Vec<_> = (0..parts).map(|_| normals(rng, rows)).collect();
        let (mut d_out, mut d_lse) = (normals(rng, rows * value_dim), normals(rng, rows));
        // In one row the first part has no key, in another row no part has one.
        (lses[0][1], outs[0][3]) = (none, f64::NAN);
        lses.iter_mut().for_each(|lse| lse[2] = none);
        if parts == 1 {
            (d_out[4], d_lse[1]) = (f64::NAN, f64::NAN);
        }
        (d_out[7], d_lse[2]) = (f64::NAN, f64::NAN);
        let of = |x: &[Vec<f64>], with_lse: bool| {
            let parts: Vec<_> = x.chunks_exact(2).map(|part| (&part[0][..], &part[1][..])).collect();
            let (out, lse) = merge(&parts, value_dim).expect("equal rows");
            let known = |x: &[f64], d: &[f64]| -> f64 {
                x.iter().zip(d).filter(|(_, d)| !d.is_nan()).map(|(x, d)| x * d).sum()
            };
            known(&out, &d_out) + if with_lse { known(&lse, &d_lse) } else { 0.0 }
        };
        for with_lse in [true, false] {
            let all: Vec<_> = outs.iter().zip(&lses).map(|(out, lse)| (&out[..], &lse[..])).collect();
            let got =
                merge_backward(&all, value_dim, &d_out, with_lse.then_some(&d_lse)).expect("equal rows");
            let mut inputs = Vec::new();
            for ((out, lse), got) in all.iter().zip(&got) {
                assert!(got.d_lse[2] == 0.0 && got.d_out[6..9] == [0.0; 3]);
                inputs.push(Input::new("out", out, &got.d_out));
                inputs.push(Input::new("lse", lse, &got.d_lse));
            }
            assert!(got[0].d_lse[1] == 0.0 && got[0].d_out[3..6] == [0.0; 3]);
            let name = format!("merge {parts}, {with_lse}");
            compare_differences(&name, &inputs, usize::MAX, &mut compared, |x| of(x, with_lse))
                .unwrap_or_else(|e| panic!("{e}"));
        }
    }
    assert!(compared["out"] > 100 && compared["lse"] > 30, "{compared:?}");
    assert!(merge_backward::<f64>(&[(&[0.0; 2], &[0.0])], 2, &[0.0], None).is_err());
    assert!(merge_backward::<f64>(&[(&[0.0; 2], &[0.0])], 2, &[0.0; 2], Some(&[])).is_err());
}
