//! Trains an attention-only model with this crate's gradients and AdamW, from random weights. The
//! task is induction: repeat the letter that followed the same letter before. The heads become
//! different during training, and the picture shows it.
//!
//! `cargo run --release -p train_heads`

mod heads;
mod kernels;
mod layer;
mod model;
mod parameters;
mod picture;
mod task;
mod train;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use heads::{Importance, Pruned, Role};
use model::Model;
use parameters::{HEADS, LAYERS};
use task::{BATCH, Batch, LENGTH};
use train::Progress;
use wgpu_attention::Gpu;

const STEPS: usize = 240;
const SEED: u64 = 1;
/// The accuracy that training must reach on the predictable held-out letters.
const ACCURACY: f64 = 0.95;
const HELD_OUT: usize = 4;

const HELP: &str = "\
Trains two attention layers on induction: repeat the letter that followed the same letter before.
Shows how the heads become different, then prunes them one by one.

usage: train_heads [OPTIONS]

It fails if fewer than 95 % of the held-out letters are right.

options:
  --steps N   the number of training steps [default: 240]
  --seed N    the seed of the weights and the sequences [default: 1]
  --out PATH  the picture to write [default: train_heads.png]
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

/// The results that the picture shows.
pub struct Findings {
    pub learned: usize,
    pub scores: Vec<model::Score>,
    /// The letters of one held-out sequence. `before` and `after` have each layer's maps of it,
    /// `[HEADS, LENGTH, LENGTH]`, before and after training.
    pub text: String,
    pub before: Vec<Vec<f32>>,
    pub after: Vec<Vec<f32>>,
    pub roles: [[Role; HEADS]; LAYERS],
    pub importance: Importance,
    /// The accuracy on held-out sequences, with all heads.
    pub accuracy: f64,
    /// The accuracies with heads pruned, the least important first, and the most important first.
    pub least_first: Vec<Pruned>,
    pub most_first: Vec<Pruned>,
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let gpu = Gpu::new()?;
    let info = gpu.device().adapter_info();
    println!("adapter   {} ({}, {:?}) {}", info.name, info.backend, info.device_type, info.driver_info);
    let mut model = Model::new(&gpu, arguments.seed)?;
    let learned = model.places.learned();
    println!("model     {LAYERS} layers of {HEADS} heads, {learned} parameters");
    let held_out = train::held_out(HELD_OUT, arguments.seed);
    let shown = &held_out[0];
    println!("task      continue {}", shown.text(0));

    let before = model.maps(shown)?;
    let started = Instant::now();
    let scores = train::train(&mut model, arguments.steps, arguments.seed, Some(&mut Progress::new()))?;
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "trained   {} steps of {BATCH} sequences of {LENGTH} letters in {seconds:.1} s",
        arguments.steps
    );
    let score = train::score(&mut model, &held_out)?;
    let known: usize = held_out.iter().map(Batch::known).sum();
    println!("held out  {:.2} % of {known} letters right, loss {:.4}", 100.0 * score.accuracy, score.loss);
    println!("weights   hash {:016x}, the same on every run with this device", hash(&model.parameters()?));

    let after = model.maps(shown)?;
    let roles: [[Role; HEADS]; LAYERS] =
        std::array::from_fn(|layer| std::array::from_fn(|head| heads::role(&after[layer], shown, head)));
    let importance = heads::importance(&mut model, shown)?;
    let least_first = heads::prune(&mut model, &held_out, |a, b| a < b)?;
    let most_first = heads::prune(&mut model, &held_out, |a, b| a > b)?;

    println!(
        "\nattention of head   to the letter itself   to the one before   to what followed   importance"
    );
    for [layer, head] in heads::all() {
        let Role { own, previous, followed } = roles[layer][head];
        let importance = importance[layer][head];
        println!(
            "{layer}.{head:<15}   {own:>20.2}   {previous:>17.2}   {followed:>16.2}   {importance:>10.1e}"
        );
    }
    println!("\nheads left   accuracy   pruned last");
    println!("{:>10}   {:>6.1} %", LAYERS * HEADS, 100.0 * score.accuracy);
    for (n, ([layer, head], accuracy)) in least_first.iter().enumerate() {
        println!("{:>10}   {:>6.1} %   {layer}.{head}", LAYERS * HEADS - 1 - n, 100.0 * accuracy);
    }

    let first = |maps: Vec<Vec<f32>>| -> Vec<Vec<f32>> {
        maps.iter().map(|layer| layer[..HEADS * LENGTH * LENGTH].to_vec()).collect()
    };
    let findings = Findings {
        learned,
        scores,
        text: shown.text(0),
        before: first(before),
        after: first(after),
        roles,
        importance,
        accuracy: score.accuracy,
        least_first,
        most_first,
    };
    picture::write(&arguments.out, &findings)?;
    println!("\npicture   {}", std::path::absolute(&arguments.out)?.display());
    if score.accuracy > ACCURACY {
        return Ok(());
    }
    let (got, want) = (100.0 * score.accuracy, 100.0 * ACCURACY);
    Err(format!("{got:.1} % of the held-out letters are right after training; it takes more than {want} %")
        .into())
}

/// The FNV-1a hash of all bits.
fn hash(values: &[f32]) -> u64 {
    let bytes = bytemuck::cast_slice::<f32, u8>(values);
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |h, byte| (h ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3))
}

struct Arguments {
    steps: usize,
    seed: u64,
    out: PathBuf,
}

impl Arguments {
    /// Reads the arguments. Returns `None` after it printed the help.
    fn read() -> Result<Option<Self>, Box<dyn Error>> {
        use lexopt::prelude::{Long, Short, ValueExt};
        let mut arguments = Arguments { steps: STEPS, seed: SEED, out: PathBuf::from("train_heads.png") };
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Short('h') | Long("help") => {
                    println!("{HELP}");
                    return Ok(None);
                }
                Long("steps") => arguments.steps = parser.value()?.parse()?,
                Long("seed") => arguments.seed = parser.value()?.parse()?,
                Long("out") => arguments.out = parser.value()?.into(),
                _ => return Err(format!("{}; see --help", argument.unexpected()).into()),
            }
        }
        if arguments.steps == 0 {
            return Err("--steps 0: it takes at least one".into());
        }
        Ok(Some(arguments))
    }
}
