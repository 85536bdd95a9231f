//! Rotations and sums at far positions, and of more rows than there are workgroups.

use wgpu_attention::position::{
    AddPositions, PositionTable, Positions, Rope, RopeConfig, RopeOrder, Rotate, Rotation, RowPositions,
};
use wgpu_attention::reference;
use wgpu_attention::reference::widen;
use wgpu_attention::wgpu;
use wgpu_attention::{DType, TensorView};

use crate::harness::device::devices;
use crate::harness::positions::{Setup, normals};
use crate::harness::{HostData, Report, Rng, full};

/// Every digit of a position, and every pair of a common width.
#[test]
fn far_positions_are_as_exact_as_near_ones() {
    let mut report = Report::new("positions, far");
    let mut rng = Rng::named("far");
    let positions: Vec<u32> = (0..4096).map(|_| rng.below(1 << 24) as u32).collect();
    let at = RowPositions::Tensor(HostData::new(positions, [1, 1, 4096, 1]));
    let x = normals("far", [1, 1, 4096, 64]);
    let setup = Setup::plain(full());
    for order in [RopeOrder::Half, RopeOrder::Interleaved] {
        let config = RopeConfig::new(64).base(500_000.0).order(order);
        report.record(&format!("{order:?}"), &setup.named(), setup.rotate(&x, config, &at));
    }
    report.record("sinusoid", &setup.named(), setup.add_sinusoid(&x, 10_000.0, &at, 0.0));
    report.finish();
}

/// More rows than workgroups: each workgroup handles several rows.
#[test]
fn few_workgroups_compute_all_rows() {
    let limit = |limits: &mut wgpu::Limits| limits.max_compute_workgroups_per_dimension = 3;
    let [gpu, _] = devices(limit);
    let shape = [2, 2, 97, 10];
    let x = normals("few workgroups", shape);
    let buffers = [gpu.upload(&x.data).expect("x"), gpu.buffer(x.data.len() * 4).expect("out")];
    let [x_view, out] = buffers.each_ref().map(|b| TensorView::new(b, DType::F32, shape));
    let config = RopeConfig::new(6);
    let rope = Rope::new(gpu.device(), config).expect("a rope");
    let positions = Positions::with_pipelines(gpu.pipelines());
    let got = || {
        let call = Rotate::new(x_view, Rotation::Rope(&rope), RowPositions::Start(9)).out(out);
        gpu.submit(|e| positions.rotate(e, &call)).expect("a rotation");
        let rotated: Vec<f32> = gpu.download(&buffers[1], x.data.len()).expect("out");
        let table = PositionTable::Learned(TensorView::new(&buffers[0], DType::F32, [1, 1, 388, 10]));
        let call = AddPositions::new(out, table, RowPositions::Start(5));
        gpu.submit(|e| positions.add(e, &call)).expect("a sum");
        (rotated, gpu.download::<f32>(&buffers[1], x.data.len()).expect("out"))
    };
    let (rotated, sum) = got();
    // A recording of the same calls compiles nothing and gives the same result.
    assert_eq!(gpu.pipelines().compiled(), 2);
    assert!(got() == (rotated.clone(), sum.clone()) && gpu.pipelines().compiled() == 2);
    let wide = widen::<f64>(&x.data);
    let want = reference::rotate(&wide, shape, &config, RowPositions::Start(9)).expect("fits");
    assert!(rotated.iter().zip(&want).all(|(g, w)| (f64::from(*g) - w).abs() < 1e-5));
    let table = PositionTable::Learned(&wide[..]);
    let want = reference::add_positions(&want, shape, table, RowPositions::Start(5), 1.0).expect("fits");
    assert!(sum.iter().zip(&want).all(|(g, w)| (f64::from(*g) - w).abs() < 1e-5));
}
