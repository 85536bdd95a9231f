//! Trains gated DeltaNet, linear attention and softmax attention on associative recall. It uses
//! this crate's gradients and AdamW, and compares the models on longer lists.
//!
//! `cargo run --release -p associative_recall`

mod mixer;
mod model;
mod picture;
mod task;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use mixer::{HEADS, KINDS, Kind};
use model::{LAYERS, Model, SLOTS, Score, WIDTH};
use task::Batch;
use training::{Random, scheduled};
use wgpu_attention::Gpu;

const STEPS: usize = 400;
const QUICK_STEPS: usize = 20;
const SEED: u64 = 1;
const BATCH: usize = 64;
/// Pairs of the sequences to train on, and of those to score.
const PAIRS: usize = 8;
const SCORED: [usize; 5] = [4, 8, 16, 24, 32];
const RATE: f64 = 0.004;
const WARMUP: usize = 20;
/// The accuracy that gated DeltaNet must reach at the length of training.
const ACCURACY: f64 = 0.95;

const HELP: &str = "\
Trains two layers of gated DeltaNet, linear attention and softmax attention on associative recall:
a list of pairs, then questions for the value of each key. It scores them on longer lists, too.

usage: associative_recall [OPTIONS]

It fails if gated DeltaNet has fewer than 95 % of the answers right.

options:
  --quick     a few steps, which fail if a loss does not fall
  --steps N   the number of training steps [default: 400]
  --seed N    the seed of the weights and the sequences [default: 1]
  --out PATH  the picture to write [default: recall.png]
  -h, --help  print this text

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

/// The results of one kind.
pub struct Learned {
    pub kind: Kind,
    pub scores: Vec<Score>,
    /// The numbers of pairs, and the accuracies.
    pub recalled: Vec<(usize, f64)>,
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let gpu = Gpu::new()?;
    let info = gpu.device().adapter_info();
    println!("adapter   {} ({}, {:?}) {}", info.name, info.backend, info.device_type, info.driver_info);
    println!("models    {LAYERS} layers, {HEADS} heads, width {WIDTH}");
    println!("task      {BATCH} sequences of {PAIRS} pairs, {} steps\n", arguments.steps);
    let all = KINDS.map(|kind| learn(&gpu, kind, arguments));
    let [delta, linear, softmax] = all;
    let all = [delta?, linear?, softmax?];
    if arguments.quick {
        for Learned { kind, scores, .. } in &all {
            let loss = |scores: &[Score]| scores.iter().map(|s| s.loss).sum::<f64>() / scores.len() as f64;
            let (first, last) = (loss(&scores[..4]), loss(&scores[scores.len() - 4..]));
            println!("{kind:<18}  loss {first:.3}, then {last:.3}");
            if last.is_nan() || last >= first {
                return Err(format!("the loss of {kind} does not fall").into());
            }
        }
        return Ok(());
    }
    print!("{:<18}", "accuracy at pairs");
    all[0].recalled.iter().for_each(|(pairs, _)| print!("  {pairs:>6}"));
    for Learned { kind, recalled, .. } in &all {
        print!("\n{kind:<18}");
        recalled.iter().for_each(|(_, accuracy)| print!("  {:>5.1}%", 100.0 * accuracy));
    }
    picture::write(&arguments.out, &all)?;
    println!("\n\npicture   {}", std::path::absolute(&arguments.out)?.display());
    let of_delta = all[0].recalled.iter().find(|(pairs, _)| *pairs == PAIRS).map_or(0.0, |found| found.1);
    if of_delta >= ACCURACY {
        return Ok(());
    }
    let (got, want) = (100.0 * of_delta, 100.0 * ACCURACY);
    Err(format!("gated DeltaNet has {got:.1} % of the answers right; it takes {want} %").into())
}

fn learn(gpu: &Gpu, kind: Kind, arguments: &Arguments) -> Result<Learned, Box<dyn Error>> {
    let Arguments { steps, seed, quick, .. } = *arguments;
    let started = Instant::now();
    let mut model = Model::new(gpu, kind, [BATCH, PAIRS], seed)?;
    let mut random = Random::new(seed, 1);
    let (mut scores, mut open) = (Vec::new(), 0);
    for step in 0..steps {
        let batch = Batch::new(&mut random, BATCH, PAIRS);
        model.train(&batch, scheduled(RATE, WARMUP, step, steps), open)?;
        open += 1;
        if open == SLOTS || step + 1 == steps {
            scores.extend(model.totals(open)?);
            open = 0;
        }
        if (step + 1) % (steps / 4).max(1) == 0 && !quick {
            let Some(Score { loss, accuracy }) = scores.last() else { continue };
            let seconds = started.elapsed().as_secs_f64();
            println!(
                "{kind:<18}  step {:>4}   loss {loss:.3}   {:5.1} % right   {seconds:.0} s",
                step + 1,
                100.0 * accuracy
            );
        }
    }
    let mut recalled = Vec::new();
    if !quick {
        println!("{kind:<18}  {} parameters, {:.0} s\n", model.learned(), started.elapsed().as_secs_f64());
        let trained = model.parameters()?;
        for pairs in SCORED {
            let mut longer = Model::new(gpu, kind, [BATCH, pairs], seed)?;
            longer.set_parameters(&trained);
            let score = longer.score(&Batch::new(&mut Random::new(seed, 2), BATCH, pairs))?;
            recalled.push((pairs, score.accuracy));
        }
    }
    Ok(Learned { kind, scores, recalled })
}

struct Arguments {
    steps: usize,
    seed: u64,
    quick: bool,
    out: PathBuf,
}

impl Arguments {
    /// Reads the arguments. Returns `None` after it printed the help.
    fn read() -> Result<Option<Self>, Box<dyn Error>> {
        use lexopt::prelude::{Long, Short, ValueExt};
        let mut arguments =
            Arguments { steps: STEPS, seed: SEED, quick: false, out: PathBuf::from("recall.png") };
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Short('h') | Long("help") => {
                    println!("{HELP}");
                    return Ok(None);
                }
                Long("quick") => (arguments.quick, arguments.steps) = (true, QUICK_STEPS),
                Long("steps") => arguments.steps = parser.value()?.parse()?,
                Long("seed") => arguments.seed = parser.value()?.parse()?,
                Long("out") => arguments.out = parser.value()?.into(),
                _ => return Err(format!("{}; see --help", argument.unexpected()).into()),
            }
        }
        if arguments.steps < 8 {
            return Err(format!("--steps {}: it takes at least 8", arguments.steps).into());
        }
        Ok(Some(arguments))
    }
}
