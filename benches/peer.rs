//! This crate in the line-up of other attention libraries: reads the same workload files, prints the same
//! JSON lines. `--data DIR` holds `index.txt` and one folder per workload with raw f32 inputs and an f64
//! reference; `--only`, `--variants`, `--budget` select. `--table FILE` prints such lines, this crate's and others', as
//! a table of medians. Prints nothing without either.
//!
//! Times wall time from the call to the device being idle, as for the other libraries.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use common::bed::median;
use common::settings::argument;
use common::{device, layer};
use wgpu_attention::Path::{Fused, Staged};
use wgpu_attention::{
    Attention, Config, DType, DeviceMask, Forward, Gpu, Linear, Mask, Projection, ProjectionForward, Scratch,
    Shape, TensorView, Tuning,
};

struct Workload {
    name: String,
    kind: String,
    shape: Shape,
    causal: bool,
    flops: f64,
    folder: PathBuf,
}

fn wanted(key: &str, name: &str) -> bool {
    argument(key).is_none_or(|list| list.split(',').any(|x| x == name))
}

fn workloads(folder: &Path) -> Vec<Workload> {
    let index = fs::read_to_string(folder.join("index.txt")).expect("index.txt");
    let parse = |line: &str| {
        let f: Vec<&str> = line.split_whitespace().collect();
        let n = |i: usize| f[i].parse::<usize>().expect("a number");
        let shape = Shape {
            batch: n(2),
            heads: n(3),
            kv_heads: n(4),
            q_len: n(5),
            kv_len: n(6),
            head_dim: n(7),
            value_dim: n(7),
        };
        Workload {
            name: f[0].into(),
            kind: f[1].into(),
            shape,
            causal: n(8) == 1,
            flops: f[9].parse().expect("flops"),
            folder: folder.join(f[0]),
        }
    };
    index.lines().map(parse).filter(|w| wanted("--only", &w.name)).collect()
}

impl Workload {
    fn f32(&self, name: &str) -> Vec<f32> {
        let bytes = fs::read(self.folder.join(format!("{name}.f32"))).expect("an input");
        bytes.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
    }

    fn error(&self, got: &[f32]) -> f64 {
        let bytes = fs::read(self.folder.join("ref.f64")).expect("the reference");
        let want: Vec<f64> =
            bytes.chunks_exact(8).map(|c| f64::from_le_bytes(c.try_into().expect("8 bytes"))).collect();
        let got: Vec<f64> = got.iter().map(|x| f64::from(*x)).collect();
        wgpu_attention::reference::compare::max_error(&got, &want)
    }
}

/// Repeats `run` for the budget and prints one line.
fn report(
    gpu: &Gpu,
    work: &Workload,
    variant: &str,
    out: &wgpu::Buffer,
    n: usize,
    mut run: impl FnMut(&mut wgpu::CommandEncoder),
) {
    let mut once = || {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        run(&mut encoder);
        gpu.queue().submit([encoder.finish()]);
        gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("idle");
    };
    once();
    once();
    let error = work.error(&gpu.download(out, n).expect("the result"));
    assert!(error < 1e-3, "{} is wrong by {error}", work.name);
    let budget: f64 = argument("--budget").and_then(|s| s.parse().ok()).unwrap_or(1.0);
    let (start, cpu) = (Instant::now(), cpu_seconds());
    let mut times = Vec::new();
    while times.len() < 5 || (times.len() < 60 && start.elapsed().as_secs_f64() < budget) {
        let t = Instant::now();
        once();
        times.push(t.elapsed().as_secs_f64() * 1e3);
    }
    let cpu = (cpu_seconds() - cpu) * 1e3 / times.len() as f64;
    let (runs, least) = (times.len(), times.iter().copied().fold(f64::INFINITY, f64::min));
    let ms = median(times).expect("a run");
    println!(
        "{{\"peer\": \"wgpu-attention\", \"variant\": \"{variant}\", \"workload\": \"{}\", \"dtype\": \"f32\", \
         \"ms\": {ms:.4}, \"ms_min\": {:.4}, \"cpu_ms\": {cpu:.4}, \"n\": {}, \"gflops\": {:.2}, \"err\": {error:.3e}, \
         \"note\": \"\"}}",
        work.name,
        least,
        runs,
        work.flops / ms / 1e6,
    );
}

/// Seconds of processor time this process has used, where the system tells.
fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks: f64 =
        after_name.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<f64>().ok()).sum();
    ticks / 100.0
}

fn attend(gpu: &Gpu, work: &Workload, variant: &str, path: wgpu_attention::Path) {
    let shape = work.shape;
    let upload = |name| gpu.upload(&work.f32(name)).expect("upload");
    let (q, k, v) = (upload("q"), upload("k"), upload("v"));
    let n: usize = shape.out().iter().product();
    let out = gpu.buffer(n * 4).expect("out");
    let config =
        Config::new(shape.heads, shape.head_dim).kv_heads(shape.kv_heads).tuning(Tuning::new().path(path));
    let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("config");
    let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
    let mask = if work.causal { Mask::causal() } else { DeviceMask::none() };
    let call =
        Forward::new(view(&q, shape.q()), view(&k, shape.k()), view(&v, shape.v()), view(&out, shape.out()))
            .mask(mask);
    let mut scratch =
        Scratch::new(gpu.device(), attention.scratch_size(&call).expect("size")).expect("scratch");
    report(gpu, work, variant, &out, n, |encoder| {
        attention.forward(encoder, &call, &mut scratch).expect("forward")
    });
}

fn layer(gpu: &Gpu, work: &Workload) {
    let inputs = [work.f32("x"), work.f32("wqkv"), work.f32("wo")];
    let n = inputs[0].len();
    let layer = layer::Layer::new(gpu, work.shape.heads, inputs, work.shape.q_len, true);
    let operator = layer.operator(gpu);
    let call = layer.call();
    let mut scratch =
        Scratch::new(gpu.device(), operator.scratch_size(&call).expect("size")).expect("scratch");
    report(gpu, work, "fused", &layer.y, n, |encoder| {
        operator.forward(encoder, &call, &mut scratch).expect("forward");
    });
}

fn matmul(gpu: &Gpu, work: &Workload) {
    let [m, n, k] = [work.shape.q_len, work.shape.kv_len, work.shape.head_dim];
    let (a, b) = (gpu.upload(&work.f32("a")).expect("a"), gpu.upload(&work.f32("b")).expect("b"));
    let out = gpu.buffer(m * n * 4).expect("out");
    let weight = TensorView::matrix(&b, DType::F32, [k, n]).transposed(2, 3);
    let product = ProjectionForward::new(
        TensorView::sequence(&a, DType::F32, [1, m, k]),
        Linear { weight, bias: None },
        TensorView::sequence(&out, DType::F32, [1, m, n]),
    );
    let projection = Projection::with_pipelines(gpu.pipelines());
    report(gpu, work, "project", &out, m * n, |encoder| {
        projection.forward(encoder, &[product]).expect("forward");
    });
}

/// Milliseconds by workload and program: medians over the rounds of a file of JSON lines.
fn table(file: &str) {
    let text = fs::read_to_string(file).expect("a file of JSON lines");
    let mut cells: BTreeMap<(String, String), Vec<f64>> = BTreeMap::new();
    for line in text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()) {
        let text = |key: &str| line[key].as_str().unwrap_or_default().to_string();
        if let Some(ms) = line["ms"].as_f64() {
            let program = format!("{} {}", text("peer"), text("variant"));
            cells.entry((text("workload"), program)).or_default().push(ms);
        }
    }
    let mut workload = String::new();
    for ((name, program), times) in cells {
        if workload != name {
            println!("{name}");
            workload = name;
        }
        let rounds = times.len();
        let ms = median(times).expect("a round");
        println!("    {ms:10.2} ms  {program} ({rounds} rounds)");
    }
}

fn main() {
    if let Some(file) = argument("--table") {
        return table(&file);
    }
    let Some(data) = argument("--data") else { return };
    let gpu = device::open().gpu;
    for work in workloads(Path::new(&data)) {
        match work.kind.as_str() {
            "attn" => {
                for (variant, path) in [("staged", Staged), ("fused", Fused)] {
                    if wanted("--variants", variant) {
                        attend(&gpu, &work, variant, path);
                    }
                }
            }
            "layer" if wanted("--variants", "fused") => layer(&gpu, &work),
            "gemm" if wanted("--variants", "project") => matmul(&gpu, &work),
            _ => {}
        }
    }
}
