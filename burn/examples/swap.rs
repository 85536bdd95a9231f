//! Times Burn's own attention against the bridge, in one process, on the same tensors: forward and
//! a training step. Prints medians of interleaved rounds and the largest difference of the results.
//!
//! `cargo run --release -p wgpu-attention-burn --example swap`

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::nn::attention::{MhaInput as BurnInput, MultiHeadAttentionConfig};
use burn::tensor::module::{attention as burn_attention, attention_fallback};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::wgpu::WgpuSetup;
use burn::tensor::{Device, Distribution, Tensor};
use lexopt::prelude::*;
use wgpu_attention::{Attention, Config, DType, Forward, Gpu, Scratch, TensorView};
use wgpu_attention_burn::{MhaInput, MultiHeadAttention, attention};

/// Name, batch, heads, queries, keys, head_dim, causal.
type Workload = (&'static str, [usize; 5], bool);

/// The workloads of the benchmarks. Burn needs as many heads of keys as of queries.
const WORKLOADS: [Workload; 7] = [
    ("512 causal", [1, 8, 512, 512, 64], true),
    ("512", [1, 8, 512, 512, 64], false),
    ("1024 causal", [1, 8, 1024, 1024, 64], true),
    ("1024", [1, 8, 1024, 1024, 64], false),
    ("1024 causal, 128 channels", [1, 8, 1024, 1024, 128], true),
    ("8 × 12 heads, 128", [8, 12, 128, 128, 64], false),
    ("1 query, 4096 keys", [1, 32, 1, 4096, 128], false),
];

const HELP: &str = "\
Times Burn's own attention and the bridge on the same tensors.

usage: swap [--rounds N] [--only TEXT]

  --rounds N   rounds of each program, of which the median counts [default: 7]
  --only TEXT  workloads whose names contain TEXT
  -h, --help   print this text";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut rounds, mut only) = (7, String::new());
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("rounds") => rounds = arguments.value()?.parse()?,
            Long("only") => only = arguments.value()?.string()?,
            Short('h') | Long("help") => {
                println!("{HELP}");
                return Ok(());
            }
            other => return Err(other.unexpected().into()),
        }
    }
    let (device, setup) = Device::wgpu_options().init_with_setup()?;
    wgpu_attention_burn::share(&device, &setup)?;
    println!("{}; fusion {}", name(&device)?, if cfg!(feature = "fusion") { "on" } else { "off" });
    println!(
        "{:<28}{:<10}{:>12}{:>12}{:>10}{:>8}{:>13}",
        "workload", "pass", "Burn, ms", "ours, ms", "Burn's", "ratio", "difference"
    );
    for workload in WORKLOADS.iter().filter(|(name, ..)| name.contains(&only)) {
        forward(workload, &device, rounds)?;
        training(workload, &device.clone().autodiff(), rounds)?;
    }
    if "layer, 512".contains(&only) {
        layer(&device, rounds)?;
    }
    bridge_cost(&device, &setup)?;
    Ok(())
}

fn name(device: &Device) -> Result<String, wgpu_attention_burn::Error> {
    Ok(wgpu_attention_burn::pipelines(device)?.device().adapter_info().name)
}

fn tensors([batch, heads, queries, keys, channels]: [usize; 5], device: &Device) -> [Tensor<4>; 3] {
    [queries, keys, keys]
        .map(|n| Tensor::random([batch, heads, n, channels], Distribution::Normal(0.0, 1.0), device))
}

/// A program that is timed: it computes and waits.
type Program<'a> = (&'static str, Box<dyn Fn() + 'a>);

/// Medians of interleaved rounds, after one round that compiles and tunes.
fn medians(programs: &[Program], rounds: usize) -> Vec<Duration> {
    let mut times = vec![Vec::new(); programs.len()];
    for round in 0..=rounds {
        for (times, (_, program)) in times.iter_mut().zip(programs) {
            let start = Instant::now();
            program();
            if round > 0 {
                times.push(start.elapsed());
            }
        }
    }
    for times in &mut times {
        times.sort();
    }
    times.into_iter().map(|times| times[times.len() / 2]).collect()
}

/// Prints the best of Burn's programs against the last, which is ours.
fn report(workload: &str, pass: &str, programs: &[Program], rounds: usize, difference: f32) {
    let medians = medians(programs, rounds);
    let (burn, ours) = medians.split_at(medians.len() - 1);
    let best = (0..burn.len()).min_by_key(|n| burn[*n]).unwrap_or(0);
    let [burn, ours] = [burn[best], ours[0]].map(|t| t.as_secs_f64() * 1e3);
    let kind = programs[best].0;
    println!(
        "{workload:<28}{pass:<10}{burn:>12.2}{ours:>12.2}{kind:>10}{:>8.2}{difference:>13.1e}",
        burn / ours
    );
}

fn largest<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> f32 {
    (a - b).abs().max().into_scalar::<f32>()
}

fn forward(
    (name, sizes, is_causal): &Workload,
    device: &Device,
    rounds: usize,
) -> wgpu_attention_burn::Result<()> {
    let [q, k, v] = tensors(*sizes, device);
    let options = AttentionModuleOptions { is_causal: *is_causal, ..Default::default() };
    let all = || (q.clone(), k.clone(), v.clone());
    let wait = |out: Tensor<4>| {
        device.sync().expect("the device");
        black_box(out);
    };
    let (a, b, c) = all();
    let own = burn_attention(a, b, c, None, None, options);
    let (a, b, c) = all();
    let difference = largest(attention(a, b, c, None, None, options)?, own);
    let programs: [Program; 3] = [
        (
            "tuned",
            Box::new(|| {
                let (q, k, v) = all();
                wait(burn_attention(q, k, v, None, None, options));
            }),
        ),
        (
            "composed",
            Box::new(|| {
                let (q, k, v) = all();
                wait(attention_fallback(q, k, v, None, None, options));
            }),
        ),
        (
            "ours",
            Box::new(|| {
                let (q, k, v) = all();
                wait(attention(q, k, v, None, None, options).expect("checked"));
            }),
        ),
    ];
    report(name, "forward", &programs, rounds, difference);
    Ok(())
}

fn training(
    (name, sizes, is_causal): &Workload,
    device: &Device,
    rounds: usize,
) -> wgpu_attention_burn::Result<()> {
    let leaves = tensors(*sizes, device).map(Tensor::require_grad);
    let options = AttentionModuleOptions { is_causal: *is_causal, ..Default::default() };
    let step = |ours: bool| {
        let [q, k, v] = leaves.clone();
        let out = if ours {
            attention(q, k, v, None, None, options)?
        } else {
            burn_attention(q, k, v, None, None, options)
        };
        let grads = (out.clone() * out).sum().backward();
        let gradients = leaves.each_ref().map(|leaf| leaf.grad(&grads).expect("a gradient"));
        device.sync().expect("the device");
        wgpu_attention_burn::Result::Ok(gradients)
    };
    let pairs = step(true)?.into_iter().zip(step(false)?);
    let difference = pairs.map(|(a, b)| largest(a, b)).fold(0.0, f32::max);
    let programs: [Program; 2] = [
        ("autodiff", Box::new(|| drop(black_box(step(false).expect("checked"))))),
        ("ours", Box::new(|| drop(black_box(step(true).expect("checked"))))),
    ];
    report(name, "training", &programs, rounds, difference);
    Ok(())
}

fn layer(device: &Device, rounds: usize) -> wgpu_attention_burn::Result<()> {
    for training in [false, true] {
        let device = if training { device.clone().autodiff() } else { device.clone() };
        let burn = MultiHeadAttentionConfig::new(512, 8).with_dropout(0.0).init(&device);
        let layer = MultiHeadAttention::from(burn.clone());
        let x = Tensor::<3>::random([1, 512, 512], Distribution::Normal(0.0, 1.0), &device);
        let finish = |out: Tensor<3>| {
            let grads = training.then(|| (out.clone() * out.clone()).sum().backward());
            device.sync().expect("the device");
            drop(black_box((out, grads)));
        };
        let own = burn.forward(BurnInput::self_attn(x.clone())).context;
        let difference = largest(layer.forward(MhaInput::self_attn(x.clone()))?.detach(), own.detach());
        let programs: [Program; 2] = [
            ("module", Box::new(|| finish(burn.forward(BurnInput::self_attn(x.clone())).context))),
            ("ours", Box::new(|| finish(layer.forward(MhaInput::self_attn(x.clone())).expect("checked")))),
        ];
        report("layer, 512", if training { "training" } else { "forward" }, &programs, rounds, difference);
    }
    Ok(())
}

/// Times the host's part of a call on tensors of one row. The bridge and the library's own operator
/// do not wait for the device.
fn bridge_cost(device: &Device, setup: &WgpuSetup) -> wgpu_attention_burn::Result<()> {
    let [q, k, v] = tensors([1, 1, 1, 1, 8], device);
    let bridge =
        median(device, || drop(attention(q.clone(), k.clone(), v.clone(), None, None, Default::default())));
    let gpu = Gpu::with_pipelines(setup.queue.clone(), wgpu_attention_burn::pipelines(device)?);
    let buffers = [gpu.buffer(32)?, gpu.buffer(32)?, gpu.buffer(32)?, gpu.buffer(32)?];
    let [q, k, v, out] = buffers.each_ref().map(|buffer| TensorView::new(buffer, DType::F32, [1, 1, 1, 8]));
    let operator = Attention::with_pipelines(gpu.pipelines(), Config::new(1, 8))?;
    let call = Forward::new(q, k, v, out);
    let mut scratch = Scratch::new(gpu.device(), operator.scratch_size(&call)?)?;
    let direct =
        median(device, || drop(gpu.submit(|encoder| operator.forward(encoder, &call, &mut scratch))));
    println!(
        "host, median of a call: {bridge:.1} µs by the bridge, {direct:.1} µs by the library; bytes copied: 0"
    );
    Ok(())
}

/// Microseconds of a call.
fn median(device: &Device, mut call: impl FnMut()) -> f64 {
    call();
    let mut times: Vec<Duration> = Vec::new();
    for _ in 0..100 {
        device.sync().expect("the device");
        let start = Instant::now();
        call();
        times.push(start.elapsed());
    }
    times.sort();
    times[50].as_secs_f64() * 1e6
}
