//! Tests of ranks over a real MPI. This program starts itself under `mpirun`, on 1, 2, 3 and 4
//! ranks. Without `mpirun` it prints a message and passes.

#[path = "ranks/problem.rs"]
#[allow(dead_code)]
mod problem;

use std::env;
use std::io::Write as _;
use std::process::{Command, ExitCode, Stdio, exit};
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::traits::Communicator;
use problem::{GPU, Problem, rules};
use wgpu_attention::{Config, DType, Shape, TensorView};
use wgpu_attention_mpi::Schedule::{self, Contiguous, Ulysses, Zigzag};
use wgpu_attention_mpi::{Error, MpiWire, RingAttention, RingForward, SequenceMask, give_up};

/// The environment variable that makes a process a rank and names its test case.
const CASE: &str = "WGPU_ATTENTION_MPI_CASE";
/// The longest time in which the ranks must detect a dead rank.
const SOON: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    if let Ok(case) = env::var(CASE) {
        rank(&case);
        return ExitCode::SUCCESS;
    }
    let wanted: Vec<String> = env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    if Command::new("mpirun").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("mpirun: SKIPPED, there is none here; scripts/mpi brings one");
        return ExitCode::SUCCESS;
    }
    let mut failed = 0;
    for (name, test) in TESTS {
        if !wanted.is_empty() && !wanted.iter().any(|word| name.contains(word.as_str())) {
            continue;
        }
        let start = Instant::now();
        let outcome = test();
        let seconds = start.elapsed().as_secs_f32();
        match outcome {
            Ok(()) => println!("test {name} ... ok ({seconds:.1} s)"),
            Err(text) => {
                failed += 1;
                println!("test {name} ... FAILED ({seconds:.1} s)\n{text}");
            }
        }
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

type Test = fn() -> Result<(), String>;

const TESTS: [(&str, Test); 6] = [
    ("results_on_1_to_4_ranks", || (1..=4).try_for_each(|ranks| succeeds(ranks, "results"))),
    ("twenty_runs_have_the_same_bits", || succeeds(3, "bits")),
    ("a_killed_rank_ends_all", || {
        // The default of mpirun: it ends the other ranks and names the dead rank.
        let (_, text) = run(3, "killed", &[])?;
        expect(&text, &["rank 1", "Killed"])
    }),
    ("the_others_notice_a_killed_rank_themselves", || {
        // Options for whole lines, each with its rank. The first rank that notices reports it to
        // the other ranks.
        let (_, text) = run(3, "killed", &["--enable-recovery", "--tag-output"])?;
        let says = |rank: usize| {
            let start = format!("rank {rank} of 3: ");
            text.lines().any(|line| line.contains(&start) && line.contains("rank 1: no message for"))
        };
        if says(0) && says(2) { Ok(()) } else { Err(format!("not both of ranks 0 and 2 in:\n{text}")) }
    }),
    ("ranks_that_differ", || {
        let (_, text) = run(3, "differ", &[])?;
        let words = "rank 2: heads is 4, but on rank 0 it is 2";
        expect(&text, &[0, 1, 2].map(|rank| format!("rank {rank} of 3: {words}")))
    }),
    ("an_mpi_without_threads", || {
        let (_, text) = run(2, "threads", &[])?;
        let words = "rank 0: MPI was initialised with thread support MPI_THREAD_";
        expect(&text, &[0, 1].map(|rank| format!("rank {rank} of 2: {words}")))
    }),
];

fn expect(text: &str, words: &[impl AsRef<str>]) -> Result<(), String> {
    match words.iter().find(|words| !text.contains(words.as_ref())) {
        Some(words) => Err(format!("no {:?} in:\n{text}", words.as_ref())),
        None => Ok(()),
    }
}

fn succeeds(ranks: usize, case: &str) -> Result<(), String> {
    let (ok, text) = run(ranks, case, &[])?;
    let said = text.matches("all is well").count();
    if ok && said == ranks { Ok(()) } else { Err(format!("{said} of {ranks} ranks:\n{text}")) }
}

/// Runs a case under `mpirun`. Returns true if it succeeded, and its output. Returns an error if a
/// case that must fail succeeds or fails too late.
fn run(ranks: usize, case: &str, options: &[&str]) -> Result<(bool, String), String> {
    let mut command = Command::new("timeout");
    command.arg("300").arg("mpirun").args(["--oversubscribe", "-n", &ranks.to_string()]).args(options);
    // A program that starts others with a software driver, if the variable is set. The running
    // executable is then the loader, so take this program's name from the arguments.
    command.args(env::var_os("WGPU_ATTENTION_RUNNER")).args(env::args_os().next());
    command.env(CASE, case).env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let start = Instant::now();
    let output = command.output().map_err(|e| e.to_string())?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    let fails = ["killed", "differ", "threads"].contains(&case);
    // With recovery, mpirun reports success if any rank survives.
    let wrong = output.status.success() && options.is_empty();
    if fails && (wrong || start.elapsed() > SOON) {
        return Err(format!("{} after {:?}:\n{text}", output.status, start.elapsed()));
    }
    Ok((output.status.success(), text))
}

/// Runs a test case as one rank.
fn rank(case: &str) {
    let level = if case == "threads" { Threading::Single } else { Threading::Multiple };
    let (universe, _) = mpi::initialize_with_threading(level).expect("MPI is not initialised yet");
    let world = universe.world();
    let (rank, ranks) = (world.rank() as usize, world.size() as usize);
    let result = match case {
        "results" => results(&world, rank, ranks),
        "bits" => bits(&world, rank),
        "killed" => small(&world, 2, rank == 1),
        "differ" => small(&world, if rank == 2 { 4 } else { 2 }, false),
        "threads" => MpiWire::new(&world).map(drop).map_err(|error| error.to_string()),
        _ => Err(format!("there is no case {case}")),
    };
    match result {
        Ok(()) => println!("rank {rank}: all is well"),
        Err(error) if ["differ", "threads"].contains(&case) => {
            // All ranks have the error, so all can end normally. Write the whole line at once,
            // then wait, because mpirun ends the other ranks after the first failure.
            let line = format!("rank {rank} of {ranks}: {error}\n");
            std::io::stderr().write_all(line.as_bytes()).expect("standard error");
            std::thread::sleep(Duration::from_secs(1));
            drop(universe);
            exit(1);
        }
        Err(error) => give_up(&world, &error),
    }
}

/// Two query heads for each key head, and values of another width. The length is a multiple of no
/// tested number of ranks except 1.
const SHAPE: Shape =
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 37, kv_len: 37, head_dim: 8, value_dim: 12 };

fn results(world: &impl Communicator, rank: usize, ranks: usize) -> Result<(), String> {
    for schedule in [Contiguous, Zigzag, Ulysses] {
        let of_ulysses = Shape { heads: 2 * ranks, kv_heads: ranks, ..SHAPE };
        let shape = if schedule == Ulysses { of_ulysses } else { SHAPE };
        for rules in rules(shape.q_len) {
            let problem = Problem::new(shape, rules, DType::F32);
            let own = on_rank(&problem, schedule, world).map_err(|error| error.to_string())?;
            let shares = wgpu_attention_mpi::Shares::new(schedule, shape.q_len, ranks)
                .map_err(|error| error.to_string())?;
            problem.judge_rank(&own, &shares, rank).map_err(|error| format!("{schedule:?}: {error}"))?;
        }
    }
    Ok(())
}

fn on_rank(problem: &Problem, schedule: Schedule, world: &impl Communicator) -> Result<[Vec<f32>; 5], Error> {
    let wire = MpiWire::new(world)?;
    Ok(problem.on_rank(schedule, world.rank() as usize, wire)?.0)
}

fn bits(world: &impl Communicator, rank: usize) -> Result<(), String> {
    let shape = Shape { kv_heads: 3, heads: 6, ..SHAPE };
    for schedule in [Contiguous, Zigzag, Ulysses] {
        let problem = Problem::new(shape, rules(shape.q_len).swap_remove(1), DType::F32);
        let mut first = None;
        for run in 0..20u64 {
            // Delay each rank by a different time in each run.
            std::thread::sleep(Duration::from_millis((run * 7 + rank as u64 * 5) % 11));
            let own = on_rank(&problem, schedule, world).map_err(|error| error.to_string())?;
            if *first.get_or_insert_with(|| own.clone()) != own {
                return Err(format!("{schedule:?}: run {run} has other bits than the first"));
            }
        }
    }
    Ok(())
}

/// Makes two calls; a rank may die between them.
fn small(world: &impl Communicator, heads: usize, dies: bool) -> Result<(), String> {
    let (rank, ranks) = (world.rank() as usize, world.size() as usize);
    let (length, config) = (8 * ranks, Config::new(heads, 8));
    let wire = MpiWire::new(world).map_err(|error| error.to_string())?;
    let ring = RingAttention::with_pipelines(GPU.pipelines(), GPU.queue(), config, Zigzag, wire);
    let mut ring = ring.map_err(|error| error.to_string())?;
    let tokens = ring.shares(length).map_err(|error| error.to_string())?.tokens(rank);
    let buffers = [0; 4].map(|_| GPU.upload(&vec![0.5f32; heads * tokens * 8]).expect("memory"));
    let [q, k, v, out] =
        [0, 1, 2, 3].map(|n| TensorView::new(&buffers[n], DType::F32, [1, heads, tokens, 8]));
    let mask = SequenceMask::causal();
    let call = RingForward::new(q, k, v, out, length).mask(&mask);
    ring.forward(&call).map_err(|error| error.to_string())?;
    if dies {
        let own = std::process::id().to_string();
        let _ = Command::new("kill").args(["-9", &own]).status();
    }
    ring.forward(&call).map_err(|error| error.to_string())
}
