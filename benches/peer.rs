//! Runs this crate in a comparison of attention libraries. It reads the same workload files and
//! prints the same JSON lines.
//!
//! ```text
//! scripts/gpu PEER --data DIR [--only NAME,…] [--variants fused,staged,backward,project]
//!                  [--dtype f32|f16|bf16] [--budget SECONDS] [--adapter TEXT]
//! PEER --table FILE
//! ```
//!
//! `DIR` holds `index.txt` and a folder for each workload, with raw f32 inputs and an f64
//! reference. `--adapter` is a part of the adapter's name; without it, OpenGL adapters are not
//! used. `--table` prints such lines, of any library, as a table of medians. Without `--data` and
//! `--table` nothing happens.
//!
//! Times are wall time, from the call until the device is idle, as for the other libraries.
//! `backward` is d_q, d_k and d_v of an attention workload after a forward call, which is not
//! timed. It needs folders with `d_out.f32`, and with `d_q.f64`, `d_k.f64`, `d_v.f64` to compare
//! with.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use common::bed::median;
use common::gradients::{Gradients, Wanted};
use common::problem::{blank, read, upload};
use common::rows::dtype_name;
use common::{device, layer};
use serde_json::json;
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::matmul::ProjectionForward;
use wgpu_attention::tuning::Algorithm::{Fused, Staged};
use wgpu_attention::{
    Attention, Config, DType, Forward, Gpu, KernelOptions, Linear, Mask, Projection, Scratch, Shape,
    TensorView, wgpu,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const VARIANTS: [&str; 4] = ["fused", "staged", "backward", "project"];

/// The options of the command line.
struct Options {
    data: Option<PathBuf>,
    table: Option<PathBuf>,
    /// Workloads, then variants; empty for all.
    only: Vec<String>,
    variants: Vec<String>,
    dtype: DType,
    budget: f64,
    adapter: Option<String>,
}

impl Options {
    fn read() -> Result<Self> {
        use lexopt::prelude::*;
        let mut options = Options {
            data: None,
            table: None,
            only: Vec::new(),
            variants: Vec::new(),
            dtype: DType::F32,
            budget: 1.0,
            adapter: None,
        };
        let list = |text: String| text.split(',').map(String::from).collect::<Vec<_>>();
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Long("data") => options.data = Some(parser.value()?.into()),
                Long("table") => options.table = Some(parser.value()?.into()),
                Long("only") => options.only = list(parser.value()?.string()?),
                Long("variants") => options.variants = list(parser.value()?.string()?),
                Long("budget") => options.budget = parser.value()?.parse()?,
                Long("adapter") => options.adapter = Some(parser.value()?.string()?),
                Long("dtype") => {
                    options.dtype = match parser.value()?.string()?.as_str() {
                        "f32" => DType::F32,
                        "f16" => DType::F16,
                        "bf16" => DType::BF16,
                        other => return Err(format!("--dtype {other}: f32, f16 or bf16").into()),
                    }
                }
                // Arguments that cargo and the callers of other benches pass.
                Long("bench" | "quick") => {}
                other => return Err(other.unexpected().into()),
            }
        }
        if let Some(name) = options.variants.iter().find(|name| !VARIANTS.contains(&name.as_str())) {
            return Err(format!("--variants {name}: of {}", VARIANTS.join(", ")).into());
        }
        Ok(options)
    }

    fn has_variant(&self, name: &str) -> bool {
        self.variants.is_empty() || self.variants.iter().any(|variant| variant == name)
    }
}

struct Workload {
    name: String,
    kind: String,
    shape: Shape,
    causal: bool,
    flops: f64,
    folder: PathBuf,
}

impl Workload {
    /// Parses a line of `index.txt`: name, kind, seven sizes (with one channel count for keys and
    /// values), causal, operations.
    fn parse(line: &str, folder: &Path) -> Option<Self> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let n = |i: usize| fields.get(i)?.parse::<usize>().ok();
        let shape = Shape {
            batch: n(2)?,
            heads: n(3)?,
            kv_heads: n(4)?,
            q_len: n(5)?,
            kv_len: n(6)?,
            head_dim: n(7)?,
            value_dim: n(7)?,
        };
        let name = fields[0].to_owned();
        Some(Workload {
            kind: fields[1].into(),
            shape,
            causal: n(8)? == 1,
            flops: fields.get(9)?.parse().ok()?,
            folder: folder.join(&name),
            name,
        })
    }

    /// Returns the selected workloads of `folder`.
    fn all(folder: &Path, only: &[String]) -> Result<Vec<Self>> {
        let index = folder.join("index.txt");
        let text = fs::read_to_string(&index).map_err(|e| format!("{}: {e}", index.display()))?;
        let mut all = Vec::new();
        for line in text.lines() {
            let parsed = Workload::parse(line, folder);
            all.push(parsed.ok_or_else(|| format!("{}: not understood: {line}", index.display()))?);
        }
        if let Some(name) = only.iter().find(|name| all.iter().all(|work| work.name != **name)) {
            let names: Vec<&str> = all.iter().map(|work| work.name.as_str()).collect();
            return Err(format!("--only {name}: of {}", names.join(", ")).into());
        }
        all.retain(|work| only.is_empty() || only.contains(&work.name));
        Ok(all)
    }

    fn file(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.folder.join(name);
        Ok(fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?)
    }

    fn f32(&self, name: &str) -> Result<Vec<f32>> {
        Ok(bytemuck::pod_collect_to_vec(&self.file(&format!("{name}.f32"))?))
    }

    /// True if there are reference gradients.
    fn has_gradients(&self) -> bool {
        self.folder.join("d_out.f32").exists()
    }

    /// Returns the largest error, and the largest expected number, by the reference in `file`.
    fn error(&self, got: &[f32], file: &str) -> Result<(f64, f64)> {
        let want: Vec<f64> = bytemuck::pod_collect_to_vec(&self.file(file)?);
        let got: Vec<f64> = got.iter().map(|x| f64::from(*x)).collect();
        let largest = want.iter().fold(0f64, |most, x| most.max(x.abs()));
        Ok((wgpu_attention::reference::compare::max_error(&got, &want), largest))
    }
}

/// The output of a run.
struct Output<'a> {
    buffer: &'a wgpu::Buffer,
    len: usize,
    dtype: DType,
    /// The file of its reference.
    file: &'static str,
}

/// The device, and the fields of every line.
struct Bench {
    gpu: Gpu,
    options: Options,
    adapter: serde_json::Value,
}

impl Bench {
    fn open(options: Options) -> Result<Self> {
        let gpu = device::open().gpu;
        let info = gpu.device().adapter_info();
        let found = format!("{} ({:?})", info.name, info.backend);
        let is_meant = match &options.adapter {
            Some(text) => info.name.to_lowercase().contains(&text.to_lowercase()),
            None => info.backend != wgpu::Backend::Gl,
        };
        if !is_meant {
            let wanted = options.adapter.as_deref().unwrap_or("any but OpenGL's");
            return Err(format!("the adapter is {found}, not {wanted}: is scripts/gpu missing?").into());
        }
        if options.dtype == DType::F16 && !gpu.device().features().contains(wgpu::Features::SHADER_F16) {
            return Err(format!("--dtype f16: {found} has none").into());
        }
        let adapter = json!({
            "name": info.name,
            "driver": format!("{} {}", info.driver, info.driver_info).trim(),
            "backend": format!("{:?}", info.backend),
            "subgroup": [info.subgroup_min_size, info.subgroup_max_size],
        });
        Ok(Bench { gpu, options, adapter })
    }

    fn dtype(&self) -> DType {
        self.options.dtype
    }

    fn upload(&self, x: &[f32]) -> Result<wgpu::Buffer> {
        Ok(upload(&self.gpu, x, self.dtype())?)
    }

    fn blank(&self, n: usize) -> Result<wgpu::Buffer> {
        Ok(blank(&self.gpu, n, self.dtype())?)
    }

    fn out<'a>(&self, buffer: &'a wgpu::Buffer, len: usize) -> Output<'a> {
        Output { buffer, len, dtype: self.dtype(), file: "ref.f64" }
    }

    /// Checks the result of `run`, repeats it for the budget and prints a line.
    fn report(
        &self,
        work: &Workload,
        variant: &str,
        outputs: &[Output],
        mut run: impl FnMut(&mut wgpu::CommandEncoder),
    ) -> Result<()> {
        let gpu = &self.gpu;
        let mut once = || {
            let start = Instant::now();
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            run(&mut encoder);
            gpu.queue().submit([encoder.finish()]);
            gpu.device()
                .poll(wgpu::PollType::wait_indefinitely())
                .map(|_| start.elapsed().as_secs_f64() * 1e3)
        };
        once()?;
        // Relative to the largest result. F16 and BF16 may have four roundings. F32 may have the
        // error of a sum of thousands of terms.
        let permitted = match self.dtype() {
            DType::F16 => 2e-3,
            DType::BF16 => 16e-3,
            _ => 1e-5,
        };
        let mut worst = 0f64;
        for output in outputs {
            let got = read(gpu, output.buffer, output.len, output.dtype);
            let (error, largest) = work.error(&got, output.file)?;
            if error >= largest.max(1.0) * permitted {
                let file = output.file;
                return Err(format!("{} {variant} is wrong by {error} beside {file}", work.name).into());
            }
            worst = worst.max(error);
        }
        let warm_up = settle(&mut once)?;
        let (start, cpu) = (Instant::now(), cpu_seconds());
        let mut times = Vec::new();
        while times.len() < 5 || (times.len() < 60 && start.elapsed().as_secs_f64() < self.options.budget) {
            times.push(once()?);
        }
        let cpu = (cpu_seconds() - cpu) * 1e3 / times.len() as f64;
        let (runs, least) = (times.len(), times.iter().copied().fold(f64::INFINITY, f64::min));
        let ms = median(times).expect("a run");
        // Backward has five products, forward two.
        let flops = if variant == "backward" { 2.5 * work.flops } else { work.flops };
        let digits = |x: f64, digits: i32| (x * 10f64.powi(digits)).round() / 10f64.powi(digits);
        let line = json!({
            "peer": "wgpu-attention",
            "variant": variant,
            "workload": work.name,
            "dtype": dtype_name(self.dtype()),
            "ms": digits(ms, 4),
            "ms_min": digits(least, 4),
            "cpu_ms": digits(cpu, 4),
            "n": runs,
            "warm_up": warm_up,
            "gflops": digits(flops / ms / 1e6, 2),
            "err": worst,
            "note": "",
            "adapter": self.adapter,
        });
        writeln!(io::stdout(), "{line}")?;
        Ok(())
    }

    fn attend(&self, work: &Workload, variant: &str, path: wgpu_attention::tuning::Algorithm) -> Result<()> {
        let shape = work.shape;
        let [q, k, v] =
            [self.upload(&work.f32("q")?)?, self.upload(&work.f32("k")?)?, self.upload(&work.f32("v")?)?];
        let n: usize = shape.out().iter().product();
        let out = self.blank(n)?;
        let config = Config::new(shape.heads, shape.head_dim)
            .dtype(self.dtype())
            .kv_heads(shape.kv_heads)
            .kernel_options(KernelOptions::new().algorithm(path));
        let attention = Attention::with_pipelines(self.gpu.pipelines(), config)?;
        let view = |buffer, shape| TensorView::new(buffer, self.dtype(), shape);
        let mask = if work.causal { Mask::causal() } else { DeviceMask::none() };
        let call = Forward::new(
            view(&q, shape.q()),
            view(&k, shape.k()),
            view(&v, shape.v()),
            view(&out, shape.out()),
        )
        .mask(mask);
        let mut scratch = Scratch::new(self.gpu.device(), attention.scratch_size(&call)?)?;
        self.report(work, variant, &[self.out(&out, n)], |encoder| {
            attention.forward(encoder, &call, &mut scratch).expect("forward")
        })
    }

    fn backward(&self, work: &Workload) -> Result<()> {
        let data = [work.f32("q")?, work.f32("k")?, work.f32("v")?, work.f32("d_out")?];
        let gradients = Gradients::of(&self.gpu, work.shape, work.causal, data, self.dtype());
        let attention = gradients.operator(&self.gpu);
        let call = gradients.call(Wanted::All);
        let mut scratch = Scratch::new(self.gpu.device(), attention.backward_scratch_size(&call)?)?;
        let files = ["d_q.f64", "d_k.f64", "d_v.f64"];
        let outputs = [0, 1, 2].map(|n| {
            let (buffer, len) = gradients.result(n);
            Output { buffer, len, dtype: DType::F32, file: files[n] }
        });
        self.report(work, "backward", &outputs, |encoder| {
            attention.backward(encoder, &call, &mut scratch).expect("backward");
        })
    }

    fn layer(&self, work: &Workload) -> Result<()> {
        let inputs = [work.f32("x")?, work.f32("wqkv")?, work.f32("wo")?];
        let n = inputs[0].len();
        let layer =
            layer::Layer::new(&self.gpu, work.shape.heads, inputs, work.shape.q_len, self.dtype(), true);
        let operator = layer.operator(&self.gpu);
        let call = layer.call();
        let mut scratch = Scratch::new(self.gpu.device(), operator.scratch_size(&call)?)?;
        self.report(work, "fused", &[self.out(&layer.y, n)], |encoder| {
            operator.forward(encoder, &call, &mut scratch).expect("forward");
        })
    }

    fn matmul(&self, work: &Workload) -> Result<()> {
        let [m, n, k] = [work.shape.q_len, work.shape.kv_len, work.shape.head_dim];
        let [a, b] = [self.upload(&work.f32("a")?)?, self.upload(&work.f32("b")?)?];
        let out = self.blank(m * n)?;
        let weight = TensorView::matrix(&b, self.dtype(), [k, n]).transposed(2, 3);
        let product = ProjectionForward::new(
            TensorView::sequence(&a, self.dtype(), [1, m, k]),
            Linear { weight, bias: None },
            TensorView::sequence(&out, self.dtype(), [1, m, n]),
        );
        let projection = Projection::with_pipelines(self.gpu.pipelines());
        self.report(work, "project", &[self.out(&out, m * n)], |encoder| {
            projection.forward(encoder, &[product]).expect("forward");
        })
    }

    fn run(&self, work: &Workload) -> Result<()> {
        let wants = |name| self.options.has_variant(name);
        match work.kind.as_str() {
            "attn" => {
                for (variant, path) in [("staged", Staged), ("fused", Fused)] {
                    if wants(variant) {
                        self.attend(work, variant, path)?;
                    }
                }
                // If the user requests it by name, it reports what is missing.
                let named = self.options.variants.iter().any(|name| name == "backward");
                if named || (wants("backward") && work.has_gradients()) {
                    self.backward(work)?;
                }
                Ok(())
            }
            "layer" if wants("fused") => self.layer(work),
            "gemm" if wants("project") => self.matmul(work),
            _ => Ok(()),
        }
    }
}

/// Runs until times settle: three consecutive times within a tenth, or 2 s. Returns the number of
/// runs.
///
/// In a process's first half second, a processor's clock rises, and the driver's threads find their
/// cores.
fn settle<E>(once: &mut impl FnMut() -> std::result::Result<f64, E>) -> std::result::Result<usize, E> {
    let start = Instant::now();
    let mut last = Vec::new();
    loop {
        last.push(once()?);
        let elapsed = start.elapsed().as_secs_f64();
        let three = &last[last.len().saturating_sub(3)..];
        let (least, most) = three.iter().fold((f64::INFINITY, 0f64), |(l, m), x| (l.min(*x), m.max(*x)));
        if (three.len() == 3 && elapsed > 0.5 && most <= 1.1 * least) || elapsed > 2.0 {
            return Ok(last.len());
        }
    }
}

/// Returns the seconds of processor time of this process, if the system reports them.
fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks: f64 =
        after_name.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<f64>().ok()).sum();
    ticks / 100.0
}

/// Prints milliseconds by workload and program: medians over the rounds of a file of JSON lines.
fn table(file: &Path) -> Result<()> {
    let text = fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let mut cells: BTreeMap<(String, String), Vec<f64>> = BTreeMap::new();
    for line in text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()) {
        let text = |key: &str| line[key].as_str().unwrap_or_default().to_string();
        if let Some(ms) = line["ms"].as_f64() {
            let workload = format!("{} {}", text("workload"), text("dtype"));
            let program = format!("{} {}", text("peer"), text("variant"));
            cells.entry((workload, program)).or_default().push(ms);
        }
    }
    let mut workload = String::new();
    for ((name, program), times) in cells {
        if workload != name {
            writeln!(io::stdout(), "{name}")?;
            workload = name;
        }
        let rounds = times.len();
        let ms = median(times).expect("a round");
        writeln!(io::stdout(), "    {ms:10.2} ms  {program} ({rounds} rounds)")?;
    }
    Ok(())
}

fn run() -> Result<()> {
    let options = Options::read()?;
    if let Some(file) = &options.table {
        return table(file);
    }
    let Some(data) = options.data.clone() else { return Ok(()) };
    let works = Workload::all(&data, &options.only)?;
    let bench = Bench::open(options)?;
    works.iter().try_for_each(|work| bench.run(work))
}

fn main() -> std::process::ExitCode {
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        // The reader has enough: `| head`.
        Err(e) if e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) => {
            std::process::ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("peer: {e}");
            std::process::ExitCode::FAILURE
        }
    }
}
