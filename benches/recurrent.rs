//! `scripts/gpu cargo bench -p benches --bench recurrent [-- --quick]`
//!
//! Measures recurrent attention in chunks, and the token-by-token kernel of linear attention. It
//! prints the least time of interleaved rounds and the ratio of the backward pass to the forward
//! pass. It also prints the growth with the length.

use std::time::Instant;

use common::bed::Bed;
use common::settings::quick;
use common::timer::noise;
use wgpu_attention::linear_attention::{
    FeatureMap, LinearAttention, LinearConfig, LinearForward, UpdateRule,
};
use wgpu_attention::recurrent::{
    Decay, RecurrentAttention, RecurrentBackward, RecurrentConfig, RecurrentForward,
};
use wgpu_attention::{DType, Scratch, TensorView, wgpu};

/// Tokens of the largest call that the token-by-token kernel is timed with.
const MOST_TOKENS: usize = 4096;

struct Rule {
    name: &'static str,
    decay: Decay,
    delta: bool,
    by_token: UpdateRule,
}

const RULES: [Rule; 4] = [
    Rule { name: "gated delta", decay: Decay::PerHead, delta: true, by_token: UpdateRule::GatedDelta },
    Rule { name: "KDA", decay: Decay::PerChannel, delta: true, by_token: UpdateRule::GatedDelta },
    Rule { name: "Mamba-2", decay: Decay::PerHead, delta: false, by_token: UpdateRule::Gated },
    Rule { name: "GLA", decay: Decay::PerChannel, delta: false, by_token: UpdateRule::Gated },
];

/// Returns the least times in ms of the forward pass, the backward pass, the token-by-token kernel.
fn times(bed: &Bed, rule: &Rule, heads: usize, dim: usize, length: usize) -> [f64; 3] {
    let rows = [1, heads, length, dim];
    let channels = if rule.decay == Decay::PerChannel { dim } else { 1 };
    let upload = |values: Vec<f32>| bed.gpu.upload(&values).expect("room");
    let count = heads * length * dim;
    let [q, v, d_out] = [1, 3, 5].map(|n| upload(noise(count, n)));
    let mut keys = noise(count, 2);
    for row in keys.chunks_exact_mut(dim) {
        let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
        row.iter_mut().for_each(|x| *x /= norm);
    }
    let k = upload(keys);
    let decay = upload(noise(heads * length * channels, 6).iter().map(|x| -0.1 * x.abs()).collect());
    let beta = upload(noise(heads * length, 7).iter().map(|x| 0.5 + 0.4 * x).collect());
    let buffer = |count: usize| bed.gpu.buffer(4 * count).expect("room");
    let [out, d_q, d_k, d_v] = [0; 4].map(|_| buffer(count));
    let (d_decay, d_beta) = (buffer(heads * length * channels), buffer(heads * length));
    fn view(buffer: &wgpu::Buffer, shape: [usize; 4]) -> TensorView<'_> {
        TensorView::new(buffer, DType::F32, shape)
    }
    let [of_decay, of_beta] = [channels, 1].map(|channels| [1, heads, length, channels]);
    let given_beta = rule.delta.then(|| view(&beta, of_beta));
    let pipelines = bed.gpu.pipelines();
    let config = RecurrentConfig::new(heads, dim).decay(rule.decay).delta(rule.delta);
    let operator = RecurrentAttention::with_pipelines(pipelines, config).expect("an operator");
    let call = RecurrentForward::new(view(&q, rows), view(&k, rows), view(&v, rows), view(&out, rows))
        .decay(view(&decay, of_decay))
        .beta(given_beta);
    let backward = RecurrentBackward::new(call, view(&d_out, rows))
        .d_q(view(&d_q, rows))
        .d_k(view(&d_k, rows))
        .d_v(view(&d_v, rows))
        .d_decay(view(&d_decay, of_decay))
        .d_beta(rule.delta.then(|| view(&d_beta, of_beta)));
    let size = operator.scratch_size(&call).expect("a size");
    let size = size.max(operator.backward_scratch_size(&backward).expect("a size"));
    let mut scratch = Scratch::new(bed.gpu.device(), size).expect("room");
    let linear = LinearConfig::new(heads, dim)
        .feature_map(FeatureMap::Identity)
        .normalised(false)
        .causal(true)
        .update_rule(rule.by_token);
    let by_token = LinearAttention::with_pipelines(pipelines, linear).expect("an operator");
    let token_call = LinearForward::new(view(&q, rows), view(&k, rows), view(&v, rows), view(&out, rows))
        .decay(view(&decay, of_decay))
        .beta(given_beta);
    let mut token_scratch =
        Scratch::new(bed.gpu.device(), by_token.scratch_size(&token_call).expect("a size")).expect("room");
    let mut least = [f64::INFINITY; 3];
    let start = Instant::now();
    for round in 0..if quick() { 2 } else { 6 } {
        if round > 2 && start.elapsed().as_secs() > 20 {
            break;
        }
        let time = bed.timer.time(|pass: &mut wgpu::ComputePass| {
            operator.forward(pass, &call, &mut scratch).expect("a call");
        });
        least[0] = least[0].min(time.as_secs_f64() * 1e3);
        let time = bed.timer.time(|pass: &mut wgpu::ComputePass| {
            operator.backward(pass, &backward, &mut scratch).expect("a call");
        });
        least[1] = least[1].min(time.as_secs_f64() * 1e3);
        if length <= MOST_TOKENS && round < 2 {
            let time = bed.timer.time(|pass: &mut wgpu::ComputePass| {
                by_token.forward(pass, &token_call, &mut token_scratch).expect("a call");
            });
            least[2] = least[2].min(time.as_secs_f64() * 1e3);
        }
    }
    least
}

fn main() {
    let Some(bed) = Bed::open() else { return };
    let lengths: &[usize] = if quick() { &[64, 128] } else { &[1024, 4096, 16384, 65536] };
    for (heads, dim) in [(1, 64), (8, 128)] {
        for rule in &RULES {
            let mut before: Option<(usize, f64)> = None;
            for length in lengths.iter().filter(|length| *length * heads * dim < 1 << 25) {
                let start = Instant::now();
                let [forward, backward, by_token] = times(&bed, rule, heads, dim, *length);
                let mut line = format!(
                    "{heads} × {dim} × {dim} {:<12} {length:>6}: {forward:>9.2} ms, backward {:>5.2} ×",
                    rule.name,
                    backward / forward
                );
                if by_token.is_finite() {
                    line += &format!(", token by token {:>6.2} ×", by_token / forward);
                }
                if let Some((length_before, time)) = before {
                    let growth = (forward / time).ln() / (*length as f64 / length_before as f64).ln();
                    line += &format!(", exponent {growth:.2}");
                }
                println!("{line}");
                before = Some((*length, forward));
                if start.elapsed().as_secs() > 40 {
                    break;
                }
            }
        }
    }
}
