//! Computes attention over a sequence that several ranks share. Compares the result with one
//! device, prints times and draws a timeline:
//!
//! ```sh
//! scripts/mpi scripts/gpu cargo run --release -p wgpu-attention-mpi --features mpi --example ring -- --ranks 4
//! ```
//!
//! With `--threads 4`, the ranks are threads of one process, and no MPI is needed.

mod picture;

use std::env;
use std::error::Error;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use lexopt::prelude::*;
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, compare};
use wgpu_attention::reference::{Options, attention, widen};
use wgpu_attention::{Attention, Config, DType, Forward, Gpu, Scratch, Shape, TensorView};
use wgpu_attention_mpi::{
    RingAttention, RingBackward, RingForward, Schedule, SequenceMask, ThreadWire, Wire, timeline,
};

const HEADS: usize = 2;
const KV_HEADS: usize = 1;
const DIM: usize = 16;
/// Rows that each rank compares.
const SAMPLE: usize = 8;

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

#[derive(Clone)]
struct Wanted {
    ranks: Option<usize>,
    threads: Option<usize>,
    length: usize,
    schedule: Schedule,
    window: Option<usize>,
    backward: bool,
    out: PathBuf,
}

const USAGE: &str = "\
Computes causal attention on several ranks, compares it with one device, and draws a timeline.

usage: ring --ranks N | --threads N [OPTIONS]

  --ranks N        start N processes with mpirun
  --threads N      run N ranks as threads of this process, without MPI
  --length N       the tokens of the sequence [default: 65536]
  --schedule KIND  contiguous, zigzag or ulysses [default: zigzag]
  --window N       the number of keys that a query sees [default: all]
  --backward       also compute gradients
  --out PATH       the picture to write [default: ring.png]
  --help           print this text
";

fn wanted() -> Result<Wanted> {
    let mut wanted = Wanted {
        ranks: None,
        threads: None,
        length: 65536,
        schedule: Schedule::Zigzag,
        window: None,
        backward: false,
        out: "ring.png".into(),
    };
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("ranks") => wanted.ranks = Some(arguments.value()?.parse()?),
            Long("threads") => wanted.threads = Some(arguments.value()?.parse()?),
            Long("length") => wanted.length = arguments.value()?.parse()?,
            Long("window") => wanted.window = Some(arguments.value()?.parse()?),
            Long("backward") => wanted.backward = true,
            Long("out") => wanted.out = arguments.value()?.into(),
            Long("schedule") => {
                wanted.schedule = match arguments.value()?.string()?.as_str() {
                    "contiguous" => Schedule::Contiguous,
                    "zigzag" => Schedule::Zigzag,
                    "ulysses" => Schedule::Ulysses,
                    other => return Err(format!("there is no schedule {other}\n{USAGE}").into()),
                }
            }
            Long("help") => {
                print!("{USAGE}");
                std::process::exit(0);
            }
            other => return Err(format!("{}\n{USAGE}", other.unexpected()).into()),
        }
    }
    Ok(wanted)
}

/// True if `mpirun` started this process.
fn is_rank() -> bool {
    ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].iter().any(|name| env::var_os(name).is_some())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ring: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result {
    let wanted = wanted()?;
    if is_rank() {
        return on_mpi(&wanted);
    }
    match (wanted.ranks, wanted.threads) {
        (Some(ranks), None) => under_mpirun(ranks),
        (None, Some(threads)) => on_threads(&wanted, threads),
        _ => Err(USAGE.into()),
    }
}

/// Starts this program under `mpirun`, once for each rank.
fn under_mpirun(ranks: usize) -> Result {
    let mut command = Command::new("mpirun");
    command.args(["--oversubscribe", "-n", &ranks.to_string()]);
    // A program that starts others with a software driver, if the variable is set.
    command.args(env::var_os("WGPU_ATTENTION_RUNNER")).args(env::args_os());
    let status = command.status().map_err(|e| format!("mpirun: {e}; scripts/mpi brings one"))?;
    if status.success() { Ok(()) } else { Err(format!("mpirun: {status}").into()) }
}

#[cfg(feature = "mpi")]
fn on_mpi(wanted: &Wanted) -> Result {
    use mpi::traits::Communicator;
    let (universe, _) =
        mpi::initialize_with_threading(mpi::Threading::Multiple).ok_or("MPI was initialised before")?;
    let world = universe.world();
    let result =
        wgpu_attention_mpi::MpiWire::new(&world).map_err(Into::into).and_then(|wire| on_rank(wanted, wire));
    match result {
        Ok(()) => Ok(()),
        Err(error) => {
            let _ = world.rank();
            wgpu_attention_mpi::give_up(&world, &error)
        }
    }
}

#[cfg(not(feature = "mpi"))]
fn on_mpi(_: &Wanted) -> Result {
    Err("this was built without MPI: add --features mpi".into())
}

fn on_threads(wanted: &Wanted, threads: usize) -> Result {
    std::thread::scope(|scope| {
        let of_rank = |wire| scope.spawn(move || on_rank(wanted, wire).map_err(|error| error.to_string()));
        let ranks: Vec<_> = ThreadWire::all(threads).into_iter().map(of_rank).collect();
        ranks.into_iter().try_for_each(|rank| Ok(rank.join().map_err(|_| "a rank panicked")??))
    })
}

/// Computes an element of a tensor from its position, so that every rank can compute any
/// element.
fn element(tensor: u64, head: usize, position: usize, channel: usize) -> f32 {
    let mut x = ((tensor * 64 + head as u64) << 48) ^ ((position as u64) << 8) ^ channel as u64;
    let mut sum = 0.0;
    for _ in 0..4 {
        x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = x;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        sum += ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
    }
    1.7 * sum
}

fn tensor(which: u64, heads: usize, positions: impl Iterator<Item = usize> + Clone) -> Vec<f32> {
    let row = |head, at| (0..DIM).map(move |channel| element(which, head, at, channel));
    (0..heads).flat_map(|head| positions.clone().flat_map(move |at| row(head, at))).collect()
}

fn on_rank(wanted: &Wanted, wire: impl Wire) -> Result {
    let length = wanted.length;
    let gpu = Gpu::new()?;
    let config = Config::new(HEADS, DIM).kv_heads(KV_HEADS);
    let mut ring =
        RingAttention::with_pipelines(gpu.pipelines(), gpu.queue(), config, wanted.schedule, wire)?;
    let shares = ring.shares(length)?;
    let rank = ring.rank();
    let positions: Vec<usize> = shares.positions(rank).collect();
    let tokens = positions.len();
    let of = |which, heads| tensor(which, heads, positions.iter().copied());
    let buffers = [gpu.upload(&of(0, HEADS))?, gpu.upload(&of(1, KV_HEADS))?, gpu.upload(&of(2, KV_HEADS))?];
    let wide = [1, HEADS, tokens, DIM];
    let narrow = [1, KV_HEADS, tokens, DIM];
    let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
    let [q, k, v] = [view(&buffers[0], wide), view(&buffers[1], narrow), view(&buffers[2], narrow)];
    let bytes = 4 * HEADS * tokens * DIM;
    let [out, lse] = [gpu.buffer(bytes)?, gpu.buffer(bytes / DIM)?];
    let out_view = view(&out, wide);
    let lse_view = view(&lse, [1, HEADS, tokens, 1]);
    let mut mask = SequenceMask::causal();
    if let Some(window) = wanted.window {
        mask = mask.window(window.saturating_sub(1), 0);
    }
    let call = RingForward::new(q, k, v, out_view, length).lse(lse_view).mask(&mask);
    // The first call compiles the kernels.
    ring.forward(&call)?;
    ring.forward(&call)?;
    report(&mut ring, wanted, "forward", &wanted.out)?;
    compare_sample(&gpu, wanted, &positions, rank, &out)?;
    if wanted.backward {
        let d_out = gpu.upload(&of(3, HEADS))?;
        let gradients = [gpu.buffer(bytes)?, gpu.buffer(bytes)?, gpu.buffer(bytes)?];
        let into = [view(&gradients[0], wide), view(&gradients[1], narrow), view(&gradients[2], narrow)];
        let call = RingBackward::new([q, k, v], out_view, lse_view, view(&d_out, wide), into, length);
        let call = call.mask(&mask);
        ring.backward(&call)?;
        ring.backward(&call)?;
        report(&mut ring, wanted, "backward", &wanted.out.with_extension("backward.png"))?;
    }
    Ok(())
}

/// Rank 0 prints the table and draws the picture.
fn report(ring: &mut RingAttention, wanted: &Wanted, what: &str, to: &std::path::Path) -> Result {
    let Some(timelines) = ring.gather_timelines()? else { return Ok(()) };
    let title = format!(
        "{what}, {:?}, {} tokens on {} ranks, {HEADS} heads of {DIM}, {KV_HEADS} of keys",
        wanted.schedule,
        wanted.length,
        ring.ranks()
    );
    print!("{title}\n{}", timeline::table(&timelines));
    picture::draw(&title, &timelines, to)?;
    println!("timeline: {}", to.display());
    Ok(())
}

/// Compares some of the rank's rows with one device that has all keys, and with the reference.
fn compare_sample(
    gpu: &Gpu,
    wanted: &Wanted,
    positions: &[usize],
    rank: usize,
    out: &wgpu_attention::wgpu::Buffer,
) -> Result {
    let (length, tokens) = (wanted.length, positions.len());
    let got: Vec<f32> = gpu.download(out, HEADS * tokens * DIM)?;
    let [k, v] = [1, 2].map(|which| tensor(which, KV_HEADS, 0..length));
    let [k_buffer, v_buffer] = [gpu.upload(&k)?, gpu.upload(&v)?];
    let config = Config::new(HEADS, DIM).kv_heads(KV_HEADS);
    let attention_of_one = Attention::with_pipelines(gpu.pipelines(), config)?;
    let largest = v.iter().fold(0.0f64, |most, x| most.max(f64::from(x.abs())));
    let [mut from_device, mut from_truth] = [0.0f64; 2];
    for n in 0..SAMPLE {
        let row = (2 * n + 1) * tokens / (2 * SAMPLE);
        let at = positions[row];
        let first = wanted.window.map_or(0, |window| (at + 1).saturating_sub(window));
        let keys = at + 1 - first;
        let q = tensor(0, HEADS, [at].into_iter());
        let [q_buffer, one] = [gpu.upload(&q)?, gpu.buffer(4 * HEADS * DIM)?];
        let row_view = |buffer| TensorView::new(buffer, DType::F32, [1, HEADS, 1, DIM]);
        let all =
            |buffer| TensorView::new(buffer, DType::F32, [1, KV_HEADS, length, DIM]).slice(2, first, keys);
        let call = Forward::new(row_view(&q_buffer), all(&k_buffer), all(&v_buffer), row_view(&one));
        let mut scratch = Scratch::new(gpu.device(), attention_of_one.scratch_size(&call)?)?;
        gpu.submit(|encoder| attention_of_one.forward(encoder, &call, &mut scratch))?;
        let one: Vec<f32> = gpu.download(&one, HEADS * DIM)?;
        let own: Vec<f32> =
            (0..HEADS).flat_map(|head| got[(head * tokens + row) * DIM..][..DIM].to_vec()).collect();
        let shape = Shape {
            batch: 1,
            heads: HEADS,
            kv_heads: KV_HEADS,
            q_len: 1,
            kv_len: keys,
            head_dim: DIM,
            value_dim: DIM,
        };
        let rows = |x: &[f32]| -> Vec<f32> {
            (0..KV_HEADS).flat_map(|head| x[(head * length + first) * DIM..][..keys * DIM].to_vec()).collect()
        };
        let (k, v) = (rows(&k), rows(&v));
        let options = Options::new();
        let want = attention::<f64>(&widen(&q), &widen(&k), &widen(&v), shape, &options)?.out;
        let naive = attention::<f32>(&q, &k, &v, shape, &options)?.out;
        let naive: Vec<f64> = naive.into_iter().map(f64::from).collect();
        let tolerance = Tolerance::from_naive(&naive, &want, largest, EPSILON_F32);
        let of_one = compare(&one, &want, tolerance).map_err(|e| format!("one device, query {at}: {e}"))?;
        let of_ring = compare(&own, &want, tolerance).map_err(|e| format!("ring, query {at}: {e}"))?;
        from_truth = from_truth.max(of_one.absolute).max(of_ring.absolute);
        let apart = own.iter().zip(&one).map(|(a, b)| f64::from((a - b).abs()));
        from_device = from_device.max(apart.fold(0.0, f64::max));
    }
    println!(
        "rank {rank}: {SAMPLE} rows differ by at most {from_device:.1e} from one device's, both by at most {from_truth:.1e} \
         from the reference's"
    );
    Ok(())
}
