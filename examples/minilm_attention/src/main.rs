//! Runs the attention of layer 0 of a real model, all-MiniLM-L6-v2, on the GPU. The block reaches
//! from the layer's input to its output projection and the norm after it. The program compares the
//! results with this crate's CPU reference and with stored numbers of the `transformers` library.
//! It prints times and draws what each head attends to.
//!
//! `cargo run --release -p minilm_attention -- "A cat sits on the mat."`
//!
//! The first run downloads the weights with pip into a cache.

mod model;
mod picture;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use canvas::shortened;
use minilm::{EPSILON, Embeddings, Files, HEADS, NormBuffers, SENTENCES, Tokenizer, WIDTH};
use model::Batch;
use wgpu_attention::layers::MultiHeadForward;
use wgpu_attention::reference::compare::{Tolerance, compare};
use wgpu_attention::reference::{self, HostLinear, HostWeights, MultiHeadShape, Options, widen};
use wgpu_attention::rows::{Norm, NormConfig, NormForward, NormWeights};
use wgpu_attention::{DType, Gpu, HostTensor, Mask, MultiHeadAttention, Scratch, TensorView};
use wgpu_attention_models::{AttentionTensors, LinearTensors, Naming, Safetensors};

const STORED: &str = "../../tests/vectors/minilm/minilm_sentences.safetensors";
const NORM: &str = "encoder.layer.0.attention.output.LayerNorm";
const TOLERANCE: Tolerance = Tolerance { absolute: 1e-5 };
const RUNS: usize = 20;

const HELP: &str = "\
Runs layer 0's attention of all-MiniLM-L6-v2 on the GPU; prints errors and times, and draws each head's attention.

usage: minilm_attention [OPTIONS] [SENTENCE]...

Without sentences, it runs six default ones and compares them with stored results of the transformers library.

options:
  --show N    the number of the sentence to print and draw, from 1 [default: 1]
  --out PATH  the picture to write [default: minilm_attention.png]
  -h, --help  print this text

environment:
  WGPU_ATTENTION_CACHE  folder for the weights [default: wgpu-attention in the user's cache]
  WGPU_BACKEND          vulkan, metal, dx12 or gl, as for every wgpu program";

fn main() -> ExitCode {
    match Arguments::read().and_then(|arguments| arguments.map_or(Ok(()), |a| run(&a))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let sentences = &arguments.sentences;
    let shown = arguments.show - 1;

    // The model's files, mapped into memory.
    let files = Files::cached()?;
    println!("weights   {} (digests checked)", files.folder.display());

    let batch = Batch::new(Tokenizer::new(&files.tokenizer)?.tokens(sentences)?);
    println!("input     {} x {} tokens x {WIDTH}", batch.sentences, batch.length);

    // The layer, on the GPU. The buffers have the same bytes as the file.
    let gpu = Gpu::new()?;
    let info = gpu.device().adapter_info();
    println!("adapter   {} ({}, {:?}) {}", info.name, info.backend, info.device_type, info.driver_info);
    let tensors = AttentionTensors::new(&files.weights, Naming::Bert, 0)?;
    let config = tensors.config(HEADS)?;
    let buffers = tensors.upload(&gpu)?;
    let weights = buffers.view()?;
    let layer = MultiHeadAttention::with_pipelines(gpu.pipelines(), config, &weights)?;

    // The embeddings before the layer, and the norm after it.
    let embeddings = Embeddings::new(&gpu, &files.weights)?;
    embeddings.check(&batch.tokens)?;
    let after = NormBuffers::new(&gpu, &files.weights, NORM)?;
    let norm = Norm::with_pipelines(gpu.pipelines(), NormConfig::layer().eps(EPSILON))?;

    // One call takes and returns sequences, masks the padding, and writes every head's weights.
    let activations = [batch.sentences, batch.length, WIDTH];
    let maps = [batch.sentences, HEADS, batch.length, batch.length];
    let padding = [batch.sentences, 1, 1, batch.length];
    let elements = activations.iter().product::<usize>();
    let words_buffer = gpu.upload(&batch.words())?;
    let positions_buffer = gpu.upload(&batch.positions())?;
    let real_buffer = gpu.upload_bools(&batch.real)?;
    let x_buffer = gpu.buffer(elements * size_of::<f32>())?;
    let out_buffer = gpu.buffer(elements * size_of::<f32>())?;
    let normalised_buffer = gpu.buffer(elements * size_of::<f32>())?;
    let maps_buffer = gpu.buffer(maps.iter().product::<usize>() * size_of::<f32>())?;
    let sequence = |buffer| TensorView::sequence(buffer, DType::F32, activations);
    let ids = [&words_buffer, &positions_buffer]
        .map(|buffer| TensorView::sequence(buffer, DType::U32, [batch.sentences, batch.length, 1]));
    let [x_view, out_view, normalised] = [&x_buffer, &out_buffer, &normalised_buffer].map(sequence);
    let call = MultiHeadForward::self_attention(x_view, out_view)
        .mask(Mask::none().key_padding_mask(TensorView::new(&real_buffer, DType::Bool, padding)))
        .weights(TensorView::new(&maps_buffer, DType::F32, maps));
    let NormWeights { weight, bias } = after.view();
    let norm_call = NormForward::new(out_view, normalised).residual(x_view).weight(weight).bias(bias);

    let mut scratch = Scratch::new(gpu.device(), layer.scratch_size(&call)?)?;
    gpu.submit(|encoder| {
        // The output's buffer first holds the sum before the norm.
        embeddings.forward(encoder, ids, [out_view, x_view])?;
        layer.forward(encoder, &call, &mut scratch)?;
        norm.forward(encoder, &norm_call)
    })?;
    let x: Vec<f32> = gpu.download(&x_buffer, elements)?;
    let out: Vec<f32> = gpu.download(&out_buffer, elements)?;
    let normalised: Vec<f32> = gpu.download(&normalised_buffer, elements)?;
    let maps: Vec<f32> = gpu.download(&maps_buffer, maps.iter().product())?;

    // Compute the same on the CPU, in f64.
    let read = |linear: LinearTensors| -> [Vec<f64>; 2] {
        [widen(&linear.weight.to_f32()), linear.bias.map_or(Vec::new(), |bias| widen(&bias.to_f32()))]
    };
    let [query, key, value, output] = [tensors.query, tensors.key, tensors.value, tensors.out].map(read);
    let weights = HostWeights {
        query: host_linear(&query),
        key: host_linear(&key),
        value: host_linear(&value),
        out: host_linear(&output),
        bias_kv: None,
        qk_norm: None,
        gate: None,
    };
    let shape = MultiHeadShape { batch: batch.sentences, q_len: batch.length, kv_len: batch.length };
    let mask = Mask::none().key_padding_mask(HostTensor::new(&batch.real, padding));
    let wide = widen(&x);
    let options = Options::new().mask(mask).weights(true);
    let started = Instant::now();
    let truth = reference::multi_head([&wide, &wide, &wide], shape, &config, &weights, &options)?;
    let cpu_time = started.elapsed();

    println!("\nGPU against the CPU reference in f64      max abs   relative to the largest");
    report("weights of the heads", &maps, truth.weights.as_deref().unwrap_or_default())?;
    report("output projection", &out, &truth.out)?;

    if arguments.default_sentences {
        let results = [
            ("hidden0", "the input", 1, &x),
            ("l0.weights", "weights of the heads", HEADS, &maps),
            ("l0.proj", "output projection", 1, &out),
            ("l0.attn", "with residual and LayerNorm", 1, &normalised),
        ];
        compare_with_stored(&batch, &results)?;
    } else {
        println!("\nNumbers of transformers are stored for the default sentences only.");
    }

    let (submit_to_done, on_gpu) = time_on_gpu(&gpu, &layer, &call, &mut scratch)?;
    println!("\nTime of the block (projections, attention, projection)");
    println!("  GPU, submit to done      {:>9.3} ms   median of {RUNS}", milliseconds(submit_to_done));
    match on_gpu {
        Some(time) => {
            println!("  GPU, by timestamps       {:>9.3} ms   median of {RUNS}", milliseconds(time))
        }
        None => println!("  GPU, by timestamps       the device has no TIMESTAMP_QUERY"),
    }
    println!("  CPU, reference in f64    {:>9.3} ms   plain loops, one thread", milliseconds(cpu_time));

    // The weights without padding: [HEADS, n, n] for the n tokens of one sentence.
    let tokens = &batch.tokens[shown].texts;
    let one = HEADS * batch.length * batch.length;
    let cut: Vec<f32> = maps[shown * one..][..one]
        .chunks_exact(batch.length * batch.length)
        .flat_map(|head| head.chunks_exact(batch.length).take(tokens.len()))
        .flat_map(|row| &row[..tokens.len()])
        .copied()
        .collect();
    print_strongest(&sentences[shown], tokens, &cut);
    picture::write(&arguments.out, &sentences[shown], tokens, &cut)?;
    println!("\npicture   {}", std::path::absolute(&arguments.out)?.display());
    Ok(())
}

fn host_linear([weight, bias]: &[Vec<f64>; 2]) -> HostLinear<'_, f64> {
    HostLinear { weight, bias: Some(bias) }
}

/// Prints the difference between `got` and `want`. Returns an error if it exceeds [`TOLERANCE`].
fn report(what: &str, got: &[f32], want: &[f64]) -> Result<(), Box<dyn Error>> {
    let difference = compare(got, want, TOLERANCE).map_err(|e| format!("{what}: {e}"))?;
    println!("  {what:<38} {:>8.1e}   {:.1e}", difference.absolute, difference.relative);
    Ok(())
}

/// A tensor to compare: its name in the stored file, its description, its number of groups, and the
/// computed values. Groups are the dimension between sentences and rows.
type Compared<'a> = (&'a str, &'a str, usize, &'a Vec<f32>);

/// Compares with the stored results of transformers, if the file exists.
fn compare_with_stored(batch: &Batch, results: &[Compared]) -> Result<(), Box<dyn Error>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(STORED);
    if !path.exists() {
        println!("\nNo {}: the comparison with transformers is skipped.", path.display());
        return Ok(());
    }
    let stored = Safetensors::open(&path)?;
    println!("\nAgainst transformers in f64, as stored    max abs   relative to the largest");
    for (name, what, groups, got) in results {
        let want: Vec<f64> = widen(&stored.tensor(name)?.to_f32());
        // Skip padding: its stored numbers are zero, but here padding is masked only as a key.
        report(what, &batch.real_rows(got, *groups), &batch.real_rows(&want, *groups))?;
    }
    Ok(())
}

/// Returns the median time of a call on the host, and the median of the GPU's timestamps.
fn time_on_gpu(
    gpu: &Gpu,
    layer: &MultiHeadAttention,
    call: &MultiHeadForward,
    scratch: &mut Scratch,
) -> Result<(Duration, Option<Duration>), Box<dyn Error>> {
    let device = gpu.device();
    let queries = device.features().contains(wgpu::Features::TIMESTAMP_QUERY).then(|| {
        device.create_query_set(&wgpu::QuerySetDescriptor {
            label: None,
            ty: wgpu::QueryType::Timestamp,
            count: 2 * RUNS as u32,
        })
    });
    let mut times = Vec::new();
    for run in 0..RUNS as u32 {
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let timestamp_writes = queries.as_ref().map(|query_set| wgpu::ComputePassTimestampWrites {
            query_set,
            beginning_of_pass_write_index: Some(2 * run),
            end_of_pass_write_index: Some(2 * run + 1),
        });
        let mut pass =
            encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: None, timestamp_writes });
        layer.forward(&mut pass, call, scratch)?;
        drop(pass);
        let commands = encoder.finish();
        let started = Instant::now();
        gpu.queue().submit([commands]);
        device.poll(wgpu::PollType::wait_indefinitely())?;
        times.push(started.elapsed());
    }
    let Some(queries) = queries else { return Ok((median(times), None)) };

    let bytes = 2 * RUNS * size_of::<u64>();
    let resolved = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: bytes as u64,
        usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    });
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    encoder.resolve_query_set(&queries, 0..2 * RUNS as u32, &resolved, 0);
    gpu.queue().submit([encoder.finish()]);
    let ticks: Vec<u64> = gpu.download(&resolved, 2 * RUNS)?;
    let period = f64::from(gpu.queue().get_timestamp_period());
    let duration =
        |pair: &[u64]| Duration::from_nanos((pair[1].wrapping_sub(pair[0]) as f64 * period) as u64);
    Ok((median(times), Some(median(ticks.chunks_exact(2).map(duration).collect()))))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Prints the key token with the largest weight, for every head and query token.
fn print_strongest(sentence: &str, tokens: &[String], maps: &[f32]) {
    const TOGETHER: usize = 6;
    println!("\nWhat each head attends to most in \"{}\"", shortened(sentence, 80));
    let n = tokens.len();
    for first in (0..HEADS).step_by(TOGETHER) {
        let heads = first..HEADS.min(first + TOGETHER);
        print!("\n  {:<12}", "query");
        heads.clone().for_each(|head| print!("  {:<14}", format!("head {head}")));
        println!();
        for (i, token) in tokens.iter().enumerate() {
            print!("  {:<12}", shortened(token, 12));
            for head in heads.clone() {
                let row = &maps[(head * n + i) * n..][..n];
                let strongest = row.iter().zip(tokens).max_by(|a, b| a.0.total_cmp(b.0));
                if let Some((weight, key)) = strongest {
                    print!("  {:<9} {weight:.2}", shortened(key, 9));
                }
            }
            println!();
        }
    }
}

struct Arguments {
    sentences: Vec<String>,
    default_sentences: bool,
    /// Counted from 1.
    show: usize,
    out: PathBuf,
}

impl Arguments {
    /// Reads the arguments. Returns `None` after it printed the help.
    fn read() -> Result<Option<Self>, Box<dyn Error>> {
        use lexopt::prelude::{Long, Short, Value, ValueExt};
        let (mut sentences, mut show, mut out) = (Vec::new(), 1, PathBuf::from("minilm_attention.png"));
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Short('h') | Long("help") => {
                    println!("{HELP}");
                    return Ok(None);
                }
                Long("show") => show = parser.value()?.parse()?,
                Long("out") => out = parser.value()?.into(),
                Value(sentence) => sentences.push(sentence.string()?),
                _ => return Err(format!("{}; see --help", argument.unexpected()).into()),
            }
        }
        let default_sentences = sentences.is_empty();
        if default_sentences {
            sentences = SENTENCES.map(str::to_owned).to_vec();
        }
        if show == 0 || show > sentences.len() {
            return Err(
                format!("--show {show}: there are {} sentences, counted from 1", sentences.len()).into()
            );
        }
        Ok(Some(Arguments { sentences, default_sentences, show, out }))
    }
}
