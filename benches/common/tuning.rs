//! The results of tuning for typical calls, and their confirmation.

use std::time::Duration;

use rows::Row;
use wgpu_attention::layers::MultiHeadConfig;
use wgpu_attention::tuning::{Measured, TuningBudget, Workload};
use wgpu_attention::{DType, Gpu, Shape};

use super::bed::median;
use super::device;
use super::problem::{Case, Problem, Rule, Way};
use super::rows::{append, row};
use super::settings::quick;
use super::timer::Timer;

/// Returns the workloads of the comparison with peers.
pub fn cases(half: bool) -> Vec<Case> {
    let decode = Shape { kv_heads: 8, q_len: 1, ..Shape::new(1, 32, 4096, 128) };
    let dtypes = if half { vec![DType::F32, DType::F16] } else { vec![DType::F32] };
    let shapes = [
        (Shape::new(1, 8, 512, 64), Rule::None),
        (Shape::new(1, 8, 512, 64), Rule::Causal),
        (Shape::new(1, 8, 1024, 64), Rule::None),
        (Shape::new(1, 8, 1024, 64), Rule::Causal),
        (Shape::new(1, 8, 1024, 128), Rule::Causal),
        (Shape::new(8, 12, 128, 64), Rule::None),
        (decode, Rule::None),
    ];
    let all = dtypes.into_iter().flat_map(|dtype| shapes.map(|(shape, rule)| Case::new(shape, rule, dtype)));
    all.collect()
}

fn workload(case: &Case) -> Workload {
    let workload = Workload::attention(case.shape, case.dtype);
    if case.rule == Rule::None { workload } else { workload.masked() }
}

/// Returns the budget of a workload: half a second on GPUs, more on software drivers, which compile
/// for seconds.
fn limits(gpu: &Gpu) -> TuningBudget {
    let seconds = match (quick(), device::software(gpu)) {
        (true, _) => 0.0,
        (false, true) => 10.0,
        (false, false) => 0.5,
    };
    TuningBudget::new().time(Duration::from_secs_f64(seconds))
}

/// Prints the results of tuning for each workload. Then it prints the interleaved times of calls
/// with tuning and by the rules.
///
/// # Panics
/// Without an adapter or a device.
pub fn print() {
    let gpu = device::open().gpu;
    let info = gpu.device().adapter_info();
    println!("{} {} {}", info.name, info.driver, info.driver_info);
    let cases =
        cases(!device::software(&gpu) && gpu.device().features().contains(wgpu::Features::SHADER_F16));
    let layer = Workload::layer(&MultiHeadConfig::new(512, 8), 1, 512);
    let product = Workload::product([1024; 3], DType::F32);
    let workloads: Vec<Workload> = cases.iter().map(workload).chain(layer).chain([product]).collect();
    for workload in workloads {
        match gpu.pipelines().tune(gpu.queue(), &[workload], limits(&gpu)) {
            Ok(measured) => measured.iter().for_each(|measured| print_one(&gpu, measured)),
            Err(why) => println!("{workload}: {why}"),
        }
    }
    let Some(timer) = Timer::new(&gpu).filter(|_| !quick()) else { return };
    println!("\ncall | by the rules, ms | tuned, ms | rules / tuned");
    for case in cases {
        match confirm(&gpu, &timer, case) {
            Ok([ruled, tuned]) => println!("{} | {ruled:.3} | {tuned:.3} | {:.2}", case.id(), ruled / tuned),
            Err(why) => println!("{} | {why}", case.id()),
        }
    }
}

fn print_one(gpu: &Gpu, measured: &Measured) {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    append(&Row {
        ms: Some(ms(measured.tuned)),
        value: measured.by_rules.map(|ruled| ms(ruled) / ms(measured.tuned)),
        detail: Some(measured.plan.clone()),
        ..row(gpu, "tune", &measured.workload.to_string())
    });
    println!("{measured}");
    measured.failed.iter().for_each(|why| println!("    failed: {why}"));
}

/// Returns the medians of both ways, in ms.
fn confirm(gpu: &Gpu, timer: &Timer, case: Case) -> Result<[f64; 2], wgpu_attention::Error> {
    let problem = Problem::new(gpu, case)?;
    let ways = [Way::Ruled, Way::Auto];
    let mut runs = Vec::new();
    for way in ways {
        runs.push((problem.operator(gpu, way)?, problem.scratch(gpu, way)?, Vec::new()));
    }
    for round in 0..21 {
        for at in 0..2 {
            let (attention, scratch, times) = &mut runs[(round + at) % 2];
            let mut refusal = None;
            let time = timer.time(|pass| {
                refusal = attention.forward(pass, &problem.call(), scratch).err();
            });
            refusal.map_or(Ok(()), Err)?;
            // The first run compiles.
            times.extend((round > 0).then_some(time.as_secs_f64() * 1e3));
        }
    }
    let of = |times: &Vec<f64>| median(times.clone()).unwrap_or_default();
    Ok([of(&runs[0].2), of(&runs[1].2)])
}
