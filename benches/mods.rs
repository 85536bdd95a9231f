//! `scripts/gpu cargo bench -p benches --bench mods [-- --quick]`
//!
//! Compares score functions and masks of the caller with the built-in rules of the same meaning.
//! Their results must be equal. It prints the least time of interleaved rounds, and ratios. Then it
//! measures the host's time for a new text, before any driver sees it.

use std::time::Instant;

use common::bed::Bed;
use common::settings::quick;
use common::timer::noise;
use wgpu_attention::mask::{Blocks, BoundMaskMod, BoundScoreMod, Captured, DeviceMask, MaskMod, ScoreMod};
use wgpu_attention::{Attention, Backward, Config, DType, Forward, Mask, Scratch, Shape, TensorView, wgpu};

const CAUSAL: &str = "fn mask_mod(at: At) -> bool { return i32(at.key) <= at.position; }";
const WINDOW: &str = "
    struct Uniforms { left: u32 }
    fn mask_mod(at: At) -> bool {
        return i32(at.key) <= at.position && i32(at.key) + i32(uniforms().left) >= at.position;
    }";
const BANDS: &str = "
    struct Uniforms { every: u32 }
    fn mask_mod(at: At) -> bool { return at.key / 64u % uniforms().every == at.query / 64u % uniforms().every; }";
const ALIBI: &str = "
    fn score_mod(score: f32, at: At) -> f32 {
        return score + slopes_at(0u, at.head, 0u, 0u) * f32(i32(at.key) - at.position);
    }";
const SOFTCAP: &str = "
    struct Uniforms { cap: f32 }
    fn score_mod(score: f32, at: At) -> f32 { return uniforms().cap * tanh(score / uniforms().cap); }";
const SAME: &str = "fn score_mod(score: f32, at: At) -> f32 { return score; }";
const TABLE: &str = "
    fn score_mod(score: f32, at: At) -> f32 {
        return score + table_at(0u, at.head, 0u, u32(clamp(i32(at.key) - at.position, -64, 64) + 64));
    }";

/// Attention of pseudo-random numbers.
struct Problem<'a> {
    bed: &'a Bed,
    shape: Shape,
    buffers: [wgpu::Buffer; 3],
    out: wgpu::Buffer,
    lse: wgpu::Buffer,
}

/// A call with a name.
struct Run<'a> {
    name: &'static str,
    record: Box<dyn FnMut(&mut wgpu::ComputePass) + 'a>,
    least: f64,
}

fn count(shape: [usize; 4]) -> usize {
    shape.iter().product()
}

fn whole(buffer: &wgpu::Buffer, shape: [usize; 4]) -> TensorView<'_> {
    TensorView::new(buffer, DType::F32, shape)
}

impl<'a> Problem<'a> {
    fn new(bed: &'a Bed, shape: Shape) -> Self {
        let upload = |n: usize, shape| bed.gpu.upload(&noise(count(shape), n as u32)).expect("room");
        let buffers = [upload(1, shape.q()), upload(2, shape.k()), upload(3, shape.v())];
        let blank = |shape| bed.gpu.buffer(4 * count(shape)).expect("room");
        Problem { bed, shape, buffers, out: blank(shape.out()), lse: blank(shape.lse()) }
    }

    fn qkv(&self) -> [TensorView<'_>; 3] {
        let [q, k, v] = &self.buffers;
        [whole(q, self.shape.q()), whole(k, self.shape.k()), whole(v, self.shape.v())]
    }

    fn operator(&self, softcap: Option<f64>) -> Attention {
        let config = Config::new(self.shape.heads, self.shape.head_dim).softcap(softcap);
        Attention::with_pipelines(self.bed.gpu.pipelines(), config).expect("an operator")
    }

    fn forward<'b>(&'b self, name: &'static str, mask: DeviceMask<'b>, softcap: Option<f64>) -> Run<'b> {
        let attention = self.operator(softcap);
        let [q, k, v] = self.qkv();
        let lse = whole(&self.lse, self.shape.lse());
        let call = Forward::new(q, k, v, whole(&self.out, self.shape.out())).lse(lse).mask(mask);
        let size = attention.scratch_size(&call).expect("a size");
        let mut scratch = Scratch::new(self.bed.gpu.device(), size).expect("room");
        let record = move |pass: &mut wgpu::ComputePass| {
            attention.forward(pass, &call, &mut scratch).expect("a call");
        };
        Run { name, record: Box::new(record), least: f64::INFINITY }
    }

    /// Compares calls that compute the same. All outputs must equal the first call's output.
    fn compare(&self, what: &str, runs: &mut [Run]) {
        let mut first = None;
        for run in runs.iter_mut() {
            self.bed.timer.time(&mut run.record);
            let out: Vec<f32> = self.bed.gpu.download(&self.out, count(self.shape.out())).expect("an output");
            let first = first.get_or_insert_with(|| out.clone());
            let off = out.iter().zip(first.iter()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off < 1e-5, "{what}, {}: off by {off}", run.name);
        }
        self.time(what, runs);
    }

    fn time(&self, what: &str, runs: &mut [Run]) {
        for _ in 0..if quick() { 2 } else { 40 } {
            for run in runs.iter_mut() {
                run.least = run.least.min(self.bed.timer.time(&mut run.record).as_secs_f64() * 1e3);
            }
        }
        for run in runs.iter() {
            println!("{what:<28} {:<22} {:>8.2} ms {:>6.2}", run.name, run.least, run.least / runs[0].least);
        }
    }
}

fn masks(problem: &Problem) {
    let gpu = &problem.bed.gpu;
    let shape = problem.shape;
    let mask = |text| MaskMod::new(text).expect("a mask");
    let score = |text| ScoreMod::new(text).expect("a score function");

    problem.time(
        "nothing",
        &mut [
            problem.forward("nothing", Mask::none(), None),
            problem.forward("the score itself", Mask::none().score_mod(score(SAME)), None),
        ],
    );

    let heads = shape.heads;
    let slopes: Vec<f32> = (1..=heads).map(|h| 0.5f32.powf(8.0 * h as f32 / heads as f32)).collect();
    let slopes = gpu.upload(&slopes).expect("room");
    let slopes = whole(&slopes, [1, heads, 1, 1]);
    let alibi = ScoreMod::capturing(ALIBI, &[Captured::float("slopes")]).expect("a score function");
    problem.compare(
        "ALiBi",
        &mut [
            problem.forward("Mask::alibi", Mask::none().alibi(slopes), None),
            problem.forward("score_mod", Mask::none().score_mod(alibi.with(&[slopes])), None),
        ],
    );

    let softcap: BoundScoreMod = score(SOFTCAP).uniforms(&20f32.to_ne_bytes());
    problem.compare(
        "softcap",
        &mut [
            problem.forward("Config::softcap", Mask::none(), Some(20.0)),
            problem.forward("score_mod", Mask::none().score_mod(softcap), None),
        ],
    );

    problem.compare(
        "causal",
        &mut [
            problem.forward("Mask::causal", Mask::causal(), None),
            problem.forward("and mask_mod", Mask::causal().mask_mod(mask(CAUSAL)), None),
        ],
    );
}

/// Measures calls with a block map, which is made once. The calls use a rule, the rule with the
/// map, and a `mask_mod` with the map. Without a rule, it compares the last call with a call
/// without a mask.
fn maps(problem: &Problem, name: &'static str, size: usize, rule: Option<DeviceMask>, own: BoundMaskMod) {
    let shape = problem.shape;
    let [rows, cols] = [shape.q_len, shape.kv_len].map(|n| n.div_ceil(size));
    let map = problem.bed.gpu.buffer(4 * rows * cols).expect("room");
    let blocks = Blocks::new(TensorView::new(&map, DType::U32, [1, 1, rows, cols]), [size, size]);
    let attention = problem.operator(None);
    let lengths = [1, shape.q_len, shape.kv_len];
    let own = Mask::none().mask_mod(own);
    problem.bed.gpu.submit(|encoder| attention.classify(encoder, &own, lengths, &blocks)).expect("a map");
    let own = problem.forward("mask_mod and the map", own.blocks(blocks), None);
    match rule {
        Some(rule) => {
            let alone = problem.forward("the rule", rule, None);
            let beside = problem.forward("the rule and the map", rule.blocks(blocks), None);
            problem.compare(name, &mut [alone, beside, own]);
        }
        None => problem.time(name, &mut [problem.forward("nothing", Mask::none(), None), own]),
    }
}

/// Compares the gradient of a table by the built-in rule with its gradient as input of a score
/// function.
fn gradients(problem: &Problem) {
    let gpu = &problem.bed.gpu;
    let shape = problem.shape;
    let heads = shape.heads;
    let [table, d_table] =
        [gpu.upload(&noise(heads * 129, 4)), gpu.buffer(4 * 129 * heads)].map(|b| b.expect("room"));
    let [table, d_table] = [&table, &d_table].map(|buffer| whole(buffer, [1, heads, 1, 129]));
    let d_out = gpu.upload(&noise(count(shape.out()), 5)).expect("room");
    let own = ScoreMod::capturing(TABLE, &[Captured::float("table")]).expect("a score function");
    let attention = problem.operator(None);
    let [q, k, v] = problem.qkv();
    let call = |mask| {
        let forward = Forward::new(q, k, v, whole(&problem.out, shape.out()));
        let forward = forward.lse(whole(&problem.lse, shape.lse())).mask(mask);
        Backward::new(forward, whole(&d_out, shape.out()))
    };
    let by_rule = call(Mask::none().relative(table)).d_relative(d_table);
    let read = call(Mask::none().score_mod(own.with(&[table]))).d_captured(&[Some(d_table)]);
    let mut forward = problem.forward("forward", Mask::none().relative(table), None);
    problem.bed.timer.time(&mut forward.record);
    let mut sums: Vec<Vec<f32>> = Vec::new();
    let mut runs = Vec::new();
    for (name, call) in [("Backward::d_relative", by_rule), ("Backward::d_captured", read)] {
        let size = attention.backward_scratch_size(&call).expect("a size");
        let (mut scratch, attention) = (Scratch::new(gpu.device(), size).expect("room"), &attention);
        let record = move |pass: &mut wgpu::ComputePass| {
            attention.backward(pass, &call, &mut scratch).expect("a call");
        };
        let mut run = Run { name, record: Box::new(record), least: f64::INFINITY };
        problem.bed.timer.time(&mut run.record);
        sums.push(gpu.download(d_table.buffer(), 129 * heads).expect("sums"));
        runs.push(run);
    }
    let off = sums[0].iter().zip(&sums[1]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(off < 1e-3, "off by {off}");
    problem.time("gradient of a table", &mut runs);
}

/// Measures how long the host takes to read, check and write a new text.
fn texts() {
    for (name, text) in [("ALiBi", ALIBI), ("softcap", SOFTCAP), ("a table", TABLE)] {
        let captured: Vec<_> = ["slopes", "table"]
            .into_iter()
            .filter(|name| text.contains(&format!("{name}_at")))
            .map(Captured::float)
            .collect();
        let mut all: Vec<f64> = (0..100)
            .map(|n| {
                let text = format!("{text}\n// {n}");
                let start = Instant::now();
                ScoreMod::capturing(&text, &captured).expect("a score function");
                start.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        all.sort_by(f64::total_cmp);
        println!("{:<28} {:<22} {:>8.2} ms, at most {:.2}", "a new text", name, all[50], all[99]);
    }
}

fn main() {
    texts();
    let Some(bed) = Bed::open() else { return };
    let problem = Problem::new(&bed, Shape::new(1, 8, if quick() { 128 } else { 1024 }, 64));
    masks(&problem);
    let own = |text| BoundMaskMod::from(MaskMod::new(text).expect("a mask"));
    let with = |text, n: u32| MaskMod::new(text).expect("a mask").uniforms(&n.to_ne_bytes());
    maps(&problem, "causal, map of 64", 64, Some(Mask::causal()), own(CAUSAL));
    maps(&problem, "window of 200, map of 32", 32, Some(Mask::causal().window(200, 0)), with(WINDOW, 200));
    maps(&problem, "bands, 9 of 10 hidden", 64, None, with(BANDS, 10));
    gradients(&problem);
}
