//! A page about a device: what it is, what is right on it, how fast it is.

use std::time::{Duration, Instant};

use rows::Row;
use wgpu_attention::{DType, Family, Gpu, Report, Shape, Verdict, inspect, wgpu};

use super::bed::median;
use super::ceilings::Ceilings;
use super::device;
use super::problem::{Case, Problem, Rule, Way};
use super::rows::{append, row};
use super::settings::quick;
use super::share::Kind;
use super::timer::Timer;

/// Prints the page, in Markdown.
///
/// # Panics
/// Without an adapter or a device.
pub fn print() {
    let device::Opened { gpu, fragments, instance } = device::open();
    let adapter = device::adapter(&instance);
    let timer = Timer::new(&gpu);
    of_device(&gpu, &adapter.features());
    let start = Instant::now();
    let report = gpu.check();
    let took = start.elapsed();
    match report {
        Ok(report) => of_kernels(&gpu, &report, took),
        Err(e) => println!("## Kernels\n\nThe check did not end: {e}\n"),
    }
    let ceilings = timer.as_ref().filter(|_| !quick()).map(|timer| {
        let ceilings = Ceilings::measure(&gpu, &fragments, timer);
        println!("## The device at its best\n\n```text\n{ceilings}```\n");
        ceilings
    });
    of_calls(&gpu, timer.as_ref(), ceilings.as_ref());
}

fn yes(has: bool) -> &'static str {
    if has { "yes" } else { "no" }
}

/// Name, driver, and what of its features and limits decides which kernels it gets.
fn of_device(gpu: &Gpu, offered: &wgpu::Features) {
    let info = gpu.device().adapter_info();
    let (features, limits) = (gpu.device().features(), gpu.device().limits());
    println!("# wgpu-attention {} on {}\n", inspect::VERSION, info.name);
    println!("| | |\n|---|---|");
    let driver = [info.driver.as_str(), info.driver_info.as_str()].join(" ");
    println!("| backend, driver | {:?}, {} |", info.backend, driver.trim());
    println!("| device | {:?}, vendor {:#06x}, device {:#06x} |", info.device_type, info.vendor, info.device);
    println!("| subgroups | {} to {} invocations |", info.subgroup_min_size, info.subgroup_max_size);
    for (what, feature) in [
        ("f16 in shaders", wgpu::Features::SHADER_F16),
        ("subgroup operations", wgpu::Features::SUBGROUP),
        ("cooperative matrices", wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX),
        ("timestamp queries", wgpu::Features::TIMESTAMP_QUERY),
    ] {
        let lost =
            if offered.contains(feature) && !features.contains(feature) { ", not asked for" } else { "" };
        println!("| {what} | {}{lost} |", yes(features.contains(feature)));
    }
    println!("| workgroup memory | {} KiB |", limits.max_compute_workgroup_storage_size / 1024);
    println!("| invocations of a workgroup | {} |", limits.max_compute_invocations_per_workgroup);
    println!("| storage buffers of a kernel | {} |", limits.max_storage_buffers_per_shader_stage);
    println!("| largest binding | {} MiB |\n", limits.max_storage_buffer_binding_size >> 20);
}

/// What the check found.
fn of_kernels(gpu: &Gpu, report: &Report, took: Duration) {
    println!("## Kernels\n\nChecked in {:.2} s.\n\n| family | |\n|---|---|", took.as_secs_f64());
    let used = |verdict: &Verdict| !matches!(verdict, Verdict::Unused);
    for (family, verdict) in report.findings().filter(|(_, verdict)| used(verdict)) {
        // A table has one line a row.
        let verdict = verdict.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        println!("| {family} | {verdict} |");
        append(&Row { detail: Some(verdict), ..row(gpu, "check", &family.to_string()) });
    }
    let unused: Vec<_> = report
        .findings()
        .filter(|(_, verdict)| !used(verdict))
        .map(|(family, _): (Family, _)| family.to_string())
        .collect();
    println!("\nNot used on this device: {}.\n", unused.join("; "));
}

/// Which kernels typical calls get, and how long they take.
fn of_calls(gpu: &Gpu, timer: Option<&Timer>, ceilings: Option<&Ceilings>) {
    let f16 = gpu.device().features().contains(wgpu::Features::SHADER_F16);
    let decode = Shape { kv_heads: 8, q_len: 1, ..Shape::new(1, 32, 4096, 128) };
    let (f32, half) = (DType::F32, if f16 { DType::F16 } else { DType::F32 });
    let cases = [
        (Shape::new(1, 8, 512, 64), Rule::None, f32),
        (Shape::new(1, 8, 1024, 64), Rule::Causal, half),
        (Shape { kv_heads: 2, ..Shape::new(1, 8, 1024, 128) }, Rule::Causal, half),
        (Shape::new(8, 12, 128, 64), Rule::None, f32),
        (decode, Rule::None, f32),
        (decode, Rule::None, half),
    ];
    println!("## Typical calls\n");
    println!(
        "Batch x heads x queries x keys x channels. The floor is what the device's own rates set to what a call must compute and move.\n"
    );
    println!("| call | ms | floor, ms | share | bound | kernels |\n|---|---|---|---|---|---|");
    for (shape, rule, dtype) in cases {
        let case = Case::new(shape, rule, dtype);
        let (time, kernels) = match time(gpu, timer, case) {
            Ok(found) => found,
            Err(why) => {
                println!("| {} | {why} | | | | |", case.id());
                continue;
            }
        };
        let ms = time.as_secs_f64() * 1e3;
        let share = ceilings.and_then(|ceilings| ceilings.share(Kind::Plain, case.work(), ms));
        let columns = match (share, quick()) {
            (_, true) => "| |".to_string(),
            (None, _) => format!("{ms:.3} | |"),
            (Some(share), _) => format!("{ms:.3} | {:.3} | {:.2}", share.floor(), share.floor() / ms),
        };
        let bound = share.map_or("", |share| share.bound());
        println!("| {} | {columns} | {bound} | {} |", case.id(), kernels.join("; "));
    }
    if timer.is_none() {
        println!(
            "\nWithout timestamp queries: times are of the host's clock, submission and waiting included."
        );
    }
}

/// The median of several runs, once the result was compared, and the kernels.
fn time(gpu: &Gpu, timer: Option<&Timer>, case: Case) -> Result<(Duration, Vec<String>), String> {
    // What it compiles is this call's alone; what the check put aside stays there.
    let gpu = Gpu::with_pipelines(gpu.queue().clone(), inspect::emptied(gpu.pipelines()));
    let refused = |e: wgpu_attention::Error| e.to_string();
    let problem = Problem::new(&gpu, case).map_err(refused)?;
    let mut scratch = problem.scratch(&gpu, Way::Auto).map_err(refused)?;
    let attention = problem.operator(&gpu, Way::Auto).map_err(refused)?;
    let mut refusal = None;
    let mut run = || {
        let record = |pass: &mut wgpu::ComputePass| {
            refusal = attention.forward_in_pass(pass, &problem.call(), &mut scratch).err();
        };
        match timer {
            Some(timer) => timer.time(record),
            None => by_the_hosts_clock(&gpu, record),
        }
    };
    run();
    let rounds = if quick() { 0 } else { 15 };
    let times: Vec<f64> = (0..rounds).map(|_| run().as_secs_f64()).collect();
    if let Some(refusal) = refusal {
        return Err(refused(refusal));
    }
    problem.judge(&gpu).map_err(|wrong| format!("wrong: {wrong}"))?;
    let mut kernels = inspect::compiled(gpu.pipelines());
    kernels.sort();
    Ok((Duration::from_secs_f64(median(times).unwrap_or_default()), kernels))
}

fn by_the_hosts_clock(gpu: &Gpu, record: impl FnOnce(&mut wgpu::ComputePass)) -> Duration {
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    record(&mut encoder.begin_compute_pass(&Default::default()));
    let start = Instant::now();
    gpu.queue().submit([encoder.finish()]);
    // An error would be a lost device, which the next call reports.
    let _ = gpu.device().poll(wgpu::PollType::wait_indefinitely());
    start.elapsed()
}
