//! A page about a device: its properties, the verdicts on its kernels, and its speed.

use std::time::Duration;

use rows::Row;
use web_time::Instant;
use wgpu_attention::tuning::{Family, Report, Verdict};
use wgpu_attention::{DType, Gpu, Shape, inspect, wgpu};

use super::ceilings::Ceilings;
use super::device;
use super::problem::{Case, Problem, Rule, Way};
use super::rows::{append, row};
use super::settings::quick;
use super::share::Kind;
use super::timer::{Timer, median};

/// Names for the device and driver, if wgpu has none: browsers give few.
#[derive(Clone, Debug, Default)]
pub struct Names {
    pub device: String,
    pub driver: String,
}

/// Prints the page, in Markdown.
///
/// # Panics
/// Without an adapter or a device.
#[cfg(not(target_arch = "wasm32"))]
pub fn print() {
    pollster::block_on(page(&Names::default(), |text| print!("{text}")));
}

/// Passes the page to `say`, part by part: a driver may crash in the next part.
///
/// # Panics
/// As for `print`.
pub async fn page(names: &Names, say: impl Fn(&str)) {
    let device::Opened { gpu, fragments, offered, .. } = device::open_async().await;
    let timer = Timer::new(&gpu);
    let info = gpu.device().adapter_info();
    let name = if info.name.is_empty() { names.device.clone() } else { info.name };
    let driver = [info.driver, info.driver_info, names.driver.clone()].join(" ");
    say(&of_device(&gpu, &name, driver.trim(), offered));
    let start = Instant::now();
    let report = gpu.check_async().await;
    let took = start.elapsed();
    say(&match report {
        Ok(report) => of_kernels(&gpu, &report, took),
        Err(e) => format!("## Kernels\n\nThe check did not end: {e}\n\n"),
    });
    let mut ceilings = None;
    if let Some(timer) = timer.as_ref().filter(|_| !quick()) {
        let measured = Ceilings { device: name, ..Ceilings::measure(&gpu, &fragments, timer).await };
        say(&format!("## The device at its best\n\n```text\n{measured}```\n\n"));
        ceilings = Some(measured);
    }
    of_calls(&gpu, timer, ceilings.as_ref(), say).await;
}

fn yes(has: bool) -> &'static str {
    if has { "yes" } else { "no" }
}

/// Describes the name, the driver, and the features and limits that decide which kernels the device
/// gets.
fn of_device(gpu: &Gpu, name: &str, driver: &str, offered: wgpu::Features) -> String {
    let info = gpu.device().adapter_info();
    let (features, limits) = (gpu.device().features(), gpu.device().limits());
    let mut page = format!("# wgpu-attention {} on {name}\n\n| | |\n|---|---|\n", inspect::VERSION);
    let mut row = |what: &str, is: String| page += &format!("| {what} | {is} |\n");
    row("backend, driver", format!("{:?}, {driver}", info.backend));
    if info.backend == wgpu::Backend::Dx12 {
        // Only DXC compiles shader model 6, which has subgroup operations on every device.
        let dxc = offered.contains(wgpu::Features::SUBGROUP);
        row("compiler", if dxc { "DXC" } else { "FXC, or a device without subgroups" }.into());
    }
    let numbers = match info.vendor {
        // As in browsers.
        0 => String::new(),
        vendor => format!(", vendor {vendor:#06x}, device {:#06x}", info.device),
    };
    row("device", format!("{:?}{numbers}", info.device_type));
    row("subgroups", format!("{} to {} invocations", info.subgroup_min_size, info.subgroup_max_size));
    for (what, feature) in [
        ("f16 in shaders", wgpu::Features::SHADER_F16),
        ("subgroup operations", wgpu::Features::SUBGROUP),
        ("cooperative matrices", wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX),
        ("timestamp queries", wgpu::Features::TIMESTAMP_QUERY),
    ] {
        let lost =
            if offered.contains(feature) && !features.contains(feature) { ", not asked for" } else { "" };
        row(what, format!("{}{lost}", yes(features.contains(feature))));
    }
    row("workgroup memory", format!("{} KiB", limits.max_compute_workgroup_storage_size / 1024));
    row("invocations of a workgroup", limits.max_compute_invocations_per_workgroup.to_string());
    row("storage buffers of a kernel", limits.max_storage_buffers_per_shader_stage.to_string());
    row("largest binding", format!("{} MiB", limits.max_storage_buffer_binding_size >> 20));
    page + "\n"
}

/// Describes the results of the check.
fn of_kernels(gpu: &Gpu, report: &Report, took: Duration) -> String {
    let took = took.as_secs_f64();
    let mut page = format!("## Kernels\n\nChecked in {took:.2} s.\n\n| family | |\n|---|---|\n");
    let used = |verdict: &Verdict| !matches!(verdict, Verdict::Unused);
    for (family, verdict) in report.findings().filter(|(_, verdict)| used(verdict)) {
        // A table has one line a row.
        let verdict = verdict.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        page += &format!("| {family} | {verdict} |\n");
        append(&Row { detail: Some(verdict), ..row(gpu, "check", &family.to_string()) });
    }
    let unused: Vec<_> = report
        .findings()
        .filter(|(_, verdict)| !used(verdict))
        .map(|(family, _): (Family, _)| family.to_string())
        .collect();
    page + &format!("\nNot used on this device: {}.\n\n", unused.join("; "))
}

/// Describes the kernels that typical calls get, and their times.
async fn of_calls(gpu: &Gpu, timer: Option<Timer>, ceilings: Option<&Ceilings>, say: impl Fn(&str)) {
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
    say(
        "## Typical calls\n\nBatch x heads (of keys and values) x queries x keys, where there are others than queries, x channels. The floor is what the device's own rates set to what a call must compute and move.\n\n",
    );
    say("| call | ms | floor, ms | share | bound | kernels |\n|---|---|---|---|---|---|\n");
    let by_host = timer.is_none();
    let timer = timer.unwrap_or_else(|| Timer::of_host(gpu));
    for (shape, rule, dtype) in cases {
        let case = Case::new(shape, rule, dtype);
        let (time, kernels) = match time(gpu, &timer, case).await {
            Ok(found) => found,
            Err(why) => {
                say(&format!("| {} | {why} | | | | |\n", case.id()));
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
        say(&format!("| {} | {columns} | {bound} | {} |\n", case.id(), kernels.join("; ")));
    }
    if by_host {
        say("\nWithout timestamp queries: times are of the host's clock, submission and waiting included.\n");
    }
}

/// Returns the median of several runs and the kernels' names, after the result was compared.
async fn time(gpu: &Gpu, timer: &Timer, case: Case) -> Result<(Duration, Vec<String>), String> {
    // The new pipelines compile kernels for this call alone. Kernels that the check disabled stay
    // disabled.
    let gpu = Gpu::with_pipelines(gpu.queue().clone(), inspect::emptied(gpu.pipelines()));
    let refused = |e: wgpu_attention::Error| e.to_string();
    let problem = Problem::new(&gpu, case).map_err(refused)?;
    let mut scratch = problem.scratch(&gpu, Way::Auto).map_err(refused)?;
    let attention = problem.operator(&gpu, Way::Auto).map_err(refused)?;
    let mut refusal = None;
    let rounds = if quick() { 0 } else { 15 };
    let start = Instant::now();
    let mut times = Vec::new();
    for round in 0..=rounds {
        // SwiftShader may take seconds for one run.
        if round > 1 && start.elapsed() > Duration::from_secs(10) {
            break;
        }
        let record = |pass: &mut wgpu::ComputePass| {
            refusal = attention.forward(pass, &problem.call(), &mut scratch).err();
        };
        let time = timer.time_async(record).await;
        // The first run compiles.
        if round > 0 {
            times.push(time.as_secs_f64());
        }
    }
    if let Some(refusal) = refusal {
        return Err(refused(refusal));
    }
    problem.judge_async(&gpu).await.map_err(|wrong| format!("wrong: {wrong}"))?;
    let mut kernels = inspect::compiled(gpu.pipelines());
    kernels.sort();
    Ok((Duration::from_secs_f64(median(times).unwrap_or_default()), kernels))
}
