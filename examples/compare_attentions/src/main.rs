//! Compares every kind of attention on sequences of growing length. Prints tables of error, time
//! and memory, and draws them.
//!
//! `cargo run --release -p compare_attentions`

mod data;
mod kinds;
mod picture;

use std::error::Error;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use kinds::{Kind, Ready, Tensors};
use wgpu_attention::{Gpu, wgpu};

const SHORTEST: usize = 256;
/// A kind stops before a length that would take longer than this.
const PATIENCE: Duration = Duration::from_secs(2);
const SEED: u64 = 1;

const HELP: &str = "\
Compares every kind of attention on sequences of growing length, and draws error, time and memory against length.

usage: compare_attentions [OPTIONS]

There is one head of 64 channels in f32. The error is the distance from exact attention, relative to its norm.
It is omitted at lengths where exact attention takes too long. A kind ends before a call would take more than 2 s,
or if a tensor exceeds the device's binding limit.

options:
  --longest N  the longest sequence in tokens, a power of two from 256 [default: 1048576]
  --seed N     the seed of the sequence and of random parameters [default: 1]
  --out PATH   the picture to write [default: compare_attentions.png]
  -h, --help   print this text

environment:
  WGPU_BACKEND  vulkan, metal, dx12 or gl, as for every wgpu program";

fn main() -> ExitCode {
    match Arguments::read().and_then(|arguments| arguments.map_or(Ok(()), |a| run(&a))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

/// The measurements of one kind at one length.
pub struct Point {
    pub length: usize,
    pub ms: f64,
    /// Bytes of temporary memory.
    pub bytes: u64,
    pub error: Option<f64>,
}

pub struct Curve {
    pub kind: Kind,
    pub points: Vec<Point>,
}

impl Curve {
    /// The exponent with which time grows with length: the slope of log(time) against log(length)
    /// over the three longest octaves.
    pub fn exponent(&self) -> Option<f64> {
        let last = self.points.last()?;
        let of = |p: &Point| [(p.length as f64).ln(), p.ms.ln()];
        let upper: Vec<_> = self.points.iter().filter(|p| 8 * p.length >= last.length).map(of).collect();
        let n = upper.len() as f64;
        let [x, y] = [0, 1].map(|a| upper.iter().map(|p| p[a]).sum::<f64>() / n);
        let over = upper.iter().map(|p| (p[0] - x) * (p[1] - y)).sum::<f64>();
        let under = upper.iter().map(|p| (p[0] - x).powi(2)).sum::<f64>();
        (upper.len() > 1).then_some(over / under)
    }

    /// True if the next length, twice the last, would take too long.
    fn ends(&self) -> bool {
        let grows = self.exponent().unwrap_or(2.0).max(1.0);
        self.points.last().is_some_and(|last| last.ms * 2f64.powf(grows) > PATIENCE.as_secs_f64() * 1e3)
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let gpu = Gpu::new()?;
    let info = gpu.device().adapter_info();
    println!("adapter   {} ({}, {:?}) {}", info.name, info.backend, info.device_type, info.driver_info);
    let mut curves = Kind::ALL.map(|kind| Curve { kind, points: Vec::new() });

    let lengths: Vec<_> =
        (0..).map(|n| SHORTEST << n).take_while(|length| *length <= arguments.longest).collect();
    let shows = std::io::stderr().is_terminal();
    for length in &lengths {
        let tensors = Tensors::new(&gpu, *length, arguments.seed)?;
        // True while full attention, the first kind, still runs at this length.
        let mut exact = true;
        for curve in &mut curves {
            if curve.ends() || curve.points.last().is_some_and(|last| 2 * last.length < *length) {
                exact &= curve.kind != Kind::Full;
                continue;
            }
            if shows {
                eprint!("\r\x1b[K{length} tokens: {}", curve.kind.name());
                std::io::stderr().flush()?;
            }
            match measure(&gpu, curve.kind, &tensors, exact, arguments.seed) {
                Ok(point) => curve.points.push(point),
                Err(e) => match e.downcast_ref() {
                    Some(wgpu_attention::Error::BindingLimit { .. }) => {}
                    _ => return Err(e),
                },
            }
        }
    }
    if shows {
        eprint!("\r\x1b[K");
    }

    print_table("ms", &lengths, &curves, |point| Some(format!("{:.2}", point.ms)));
    print_table("temporary memory, KiB", &lengths, &curves, |point| Some((point.bytes / 1024).to_string()));
    print_table("error", &lengths, &curves, |point| Some(format!("{:.3}", point.error?)));
    println!("\n{:26} time grows as length to the power of", "");
    for curve in &curves {
        let exponent = curve.exponent().map_or("?".into(), |exponent| format!("{exponent:.2}"));
        println!("{:26} {exponent}", curve.kind.name());
    }
    picture::write(&arguments.out, &info, &curves)?;
    println!("\npicture   {}", std::path::absolute(&arguments.out)?.display());
    Ok(())
}

/// Runs one kind at one length: times calls, and compares the result if an exact one is feasible.
fn measure(
    gpu: &Gpu,
    kind: Kind,
    tensors: &Tensors,
    exact: bool,
    seed: u64,
) -> Result<Point, Box<dyn Error>> {
    let once = |ready: &mut Ready| -> Result<Duration, Box<dyn Error>> {
        let start = Instant::now();
        gpu.submit(|encoder| ready.record(encoder, tensors))?;
        gpu.device().poll(wgpu::PollType::wait_indefinitely())?;
        Ok(start.elapsed())
    };
    let mut ready = Ready::new(gpu, kind, tensors, seed)?;
    // The first call compiles the kernels.
    once(&mut ready)?;
    let got = tensors.result(gpu)?;
    let mut times = Vec::new();
    let started = Instant::now();
    while times.len() < 3 || times.len() < 9 && started.elapsed() < PATIENCE {
        times.push(once(&mut ready)?.as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    let error = if exact && kind.approximates() {
        once(&mut Ready::exact(gpu, kind, tensors, seed)?)?;
        Some(distance(&got, &tensors.result(gpu)?))
    } else {
        None
    };
    Ok(Point { length: tensors.length, ms: times[times.len() / 2], bytes: ready.bytes(), error })
}

/// The distance between `got` and `want`, relative to the norm of `want`.
fn distance(got: &[f32], want: &[f32]) -> f64 {
    let squares = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    let off = squares(&mut got.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    (off / squares(&mut want.iter().map(|x| f64::from(*x)))).sqrt()
}

fn print_table(title: &str, lengths: &[usize], curves: &[Curve], cell: impl Fn(&Point) -> Option<String>) {
    print!("\n{title:26}");
    lengths.iter().for_each(|length| print!(" {length:>9}"));
    println!();
    for curve in curves {
        let cells: Vec<_> = lengths
            .iter()
            .map(|length| curve.points.iter().find(|p| p.length == *length).and_then(&cell))
            .collect();
        if cells.iter().any(Option::is_some) {
            print!("{:26}", curve.kind.name());
            cells.into_iter().for_each(|cell| print!(" {:>9}", cell.unwrap_or_default()));
            println!();
        }
    }
}

struct Arguments {
    longest: usize,
    seed: u64,
    out: PathBuf,
}

impl Arguments {
    /// Reads the arguments. Returns `None` after it printed the help.
    fn read() -> Result<Option<Self>, Box<dyn Error>> {
        use lexopt::prelude::{Long, Short, ValueExt};
        let mut arguments =
            Arguments { longest: 1 << 20, seed: SEED, out: PathBuf::from("compare_attentions.png") };
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Short('h') | Long("help") => {
                    println!("{HELP}");
                    return Ok(None);
                }
                Long("longest") => arguments.longest = parser.value()?.parse()?,
                Long("seed") => arguments.seed = parser.value()?.parse()?,
                Long("out") => arguments.out = parser.value()?.into(),
                _ => return Err(format!("{}; see --help", argument.unexpected()).into()),
            }
        }
        let longest = arguments.longest;
        if !longest.is_power_of_two() || longest < SHORTEST {
            return Err(format!("--longest {longest}: a power of two from {SHORTEST} on").into());
        }
        Ok(Some(arguments))
    }
}
