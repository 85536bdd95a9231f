//! A problem, its reference results, and its computation on ranks.

use std::sync::LazyLock;
use std::thread;

use wgpu_attention::mask::HostMask;
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, compare};
use wgpu_attention::reference::{
    Options, Real, attention, attention_backward, attention_backward_magnitudes, widen,
};
use wgpu_attention::{Config, DType, Gpu, HostTensor, Mask, Shape, TensorView};
use wgpu_attention_mpi::{
    Error, RingAttention, RingBackward, RingForward, Schedule, SequenceMask, Shares, ThreadWire, Wire,
};

/// One device for all tests, so that each kernel is compiled once.
pub static GPU: LazyLock<Gpu> = LazyLock::new(|| Gpu::new().expect("a device"));

#[derive(Clone, Debug)]
pub struct Rules {
    pub causal: bool,
    pub window: Option<[usize; 2]>,
    pub documents: Vec<usize>,
}

impl Rules {
    pub fn sequence(&self) -> SequenceMask {
        let mut mask = if self.causal { SequenceMask::causal() } else { SequenceMask::none() };
        if let Some([left, right]) = self.window {
            mask = mask.window(left, right);
        }
        mask.documents(self.documents.clone())
    }

    /// The same mask for the reference, as the library's type.
    fn host<'a>(&self, numbers: &'a [u32]) -> HostMask<'a> {
        let mut mask: HostMask = if self.causal { Mask::causal() } else { Mask::none() };
        if let Some([left, right]) = self.window {
            mask = mask.window(left, right);
        }
        if !self.documents.is_empty() {
            let n = numbers.len();
            mask = mask
                .documents(HostTensor::new(numbers, [1, 1, n, 1]), HostTensor::new(numbers, [1, 1, 1, n]));
        }
        mask
    }
}

#[derive(Clone, Debug)]
pub struct Problem {
    pub shape: Shape,
    pub rules: Rules,
    pub dtype: DType,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub d_out: Vec<f32>,
}

/// Masks of every kind, for a sequence of `length` tokens.
pub fn rules(length: usize) -> Vec<Rules> {
    let rule = |causal, window, documents: &[usize]| Rules { causal, window, documents: documents.into() };
    let documents = [0, 3, length / 2 + 1, length - 2, length];
    vec![
        rule(false, None, &[]),
        rule(true, None, &[]),
        rule(true, Some([5, 0]), &[]),
        rule(false, Some([4, 7]), &[]),
        rule(true, None, &documents),
        rule(false, Some([6, 6]), &documents),
    ]
}

pub fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    // A sum of four is closer to a normal distribution than one value.
    (0..n).map(|_| ((0..4).map(|_| next()).sum::<f32>() - 2.0) * 1.7).collect()
}

fn count(shape: [usize; 4]) -> usize {
    shape.into_iter().product()
}

const NAMES: [&str; 5] = ["out", "lse", "d_q", "d_k", "d_v"];

/// The results of all ranks together, in the order of the sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Results {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    pub gradients: [Vec<f32>; 3],
    pub bytes: u64,
    pub messages: u64,
    /// Bytes sent in the forward pass.
    pub forward_bytes: u64,
}

impl Problem {
    pub fn new(shape: Shape, rules: Rules, dtype: DType) -> Self {
        let stored = |seed, n| -> Vec<f32> {
            let values = random(seed, n);
            match dtype {
                DType::F16 => values.into_iter().map(|x| half::f16::from_f32(x).to_f32()).collect(),
                DType::BF16 => values.into_iter().map(|x| half::bf16::from_f32(x).to_f32()).collect(),
                _ => values,
            }
        };
        let [q, k, v, d_out] = [shape.q(), shape.k(), shape.v(), shape.out()].map(count);
        let [q, k, v, d_out] = [stored(1, q), stored(2, k), stored(3, v), stored(4, d_out)];
        Problem { shape, rules, dtype, q, k, v, d_out }
    }

    fn numbers(&self) -> Vec<u32> {
        let number = |at| self.rules.documents.iter().filter(|start| **start <= at).count() as u32;
        (0..self.shape.q_len).map(number).collect()
    }

    fn attended<R: Real>(&self) -> [Vec<f64>; 2] {
        let numbers = self.numbers();
        let options = Options::new().mask(self.rules.host(&numbers));
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| widen::<R>(x));
        let got = attention::<R>(&q, &k, &v, self.shape, &options).expect("a problem");
        [got.out, got.lse].map(|x| x.into_iter().map(Real::f64).collect())
    }

    fn gradients<R: Real>(&self, magnitudes: bool) -> [Vec<f64>; 3] {
        let numbers = self.numbers();
        let options = Options::new().mask(self.rules.host(&numbers));
        let [q, k, v, d_out] = [&self.q, &self.k, &self.v, &self.d_out].map(|x| widen::<R>(x));
        let f = if magnitudes { attention_backward_magnitudes::<R> } else { attention_backward::<R> };
        let got = f(&q, &k, &v, &d_out, None, self.shape, &options).expect("a problem");
        [got.d_q, got.d_k, got.d_v].map(|x| x.into_iter().map(Real::f64).collect())
    }

    /// The expected `[out, lse, d_q, d_k, d_v]`, each with its tolerance.
    fn truth(&self) -> [(Vec<f64>, Tolerance); 5] {
        let most = |x: &[f64]| x.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let (want, naive) = (self.attended::<f64>(), self.attended::<f32>());
        let largest = self.v.iter().fold(0.0, |most: f64, x| most.max(f64::from(x.abs())));
        let magnitudes = [largest, most(&want[1])];
        let of = |n: usize| Tolerance::from_naive(&naive[n], &want[n], magnitudes[n], EPSILON_F32);
        let forward = [of(0), of(1)];
        let (gradients, naive) = (self.gradients::<f64>(false), self.gradients::<f32>(false));
        let magnitudes = self.gradients::<f64>(true);
        let of = |n: usize| Tolerance::gradient(&naive[n], &gradients[n], most(&magnitudes[n]), EPSILON_F32);
        let backward = [of(0), of(1), of(2)];
        let [out, lse] = want;
        let [d_q, d_k, d_v] = gradients;
        let mut tolerances = forward.into_iter().chain(backward);
        [out, lse, d_q, d_k, d_v].map(|want| (want, tolerances.next().expect("five")))
    }

    /// Compares the results of all ranks with the reference, within the tolerance of one device.
    pub fn judge(&self, got: &Results) {
        let whole = Shares::new(Schedule::Contiguous, self.shape.q_len, 1).expect("one piece");
        let [d_q, d_k, d_v] = got.gradients.clone();
        let all = [got.out.clone(), got.lse.clone(), d_q, d_k, d_v];
        self.judge_rank(&all, &whole, 0).unwrap_or_else(|e| panic!("{e}"));
    }

    /// Compares the results of one rank with the reference.
    pub fn judge_rank(&self, got: &[Vec<f32>; 5], shares: &Shares, rank: usize) -> Result<(), String> {
        let shape = self.shape;
        let shapes = [shape.out(), shape.lse(), shape.q(), shape.k(), shape.v()];
        for (n, (want, tolerance)) in self.truth().into_iter().enumerate() {
            let want = take(&want, shapes[n], shares, rank);
            compare(&got[n], &want, tolerance).map_err(|e| format!("{}: {e} ({self})", NAMES[n]))?;
        }
        Ok(())
    }

    /// Computes the problem on ranks that are threads.
    pub fn on_threads(&self, schedule: Schedule, ranks: usize) -> Results {
        self.on(schedule, ThreadWire::all(ranks)).expect("no rank fails")
    }

    /// Computes the problem on ranks with these wires. Returns the first error.
    pub fn on<W: Wire>(&self, schedule: Schedule, wires: Vec<W>) -> Result<Results, Error> {
        let shares = Shares::new(schedule, self.shape.q_len, wires.len())?;
        let of_rank = |(rank, wire): (usize, W)| {
            let problem = self.clone();
            thread::spawn(move || problem.on_rank(schedule, rank, wire))
        };
        let threads: Vec<_> = wires.into_iter().enumerate().map(of_rank).collect();
        let mut results = Results::default();
        let shape = self.shape;
        let whole = [shape.out(), shape.lse(), shape.q(), shape.k(), shape.v()];
        let mut all = whole.map(|shape| vec![f32::NAN; count(shape)]);
        for (rank, thread) in threads.into_iter().enumerate() {
            let (own, sent) = thread.join().expect("no rank panics")?;
            results.bytes += sent[0];
            results.messages += sent[1];
            results.forward_bytes += sent[2];
            for ((own, all), shape) in own.iter().zip(&mut all).zip(whole) {
                place(all, shape, own, &shares, rank);
            }
        }
        let [out, lse, d_q, d_k, d_v] = all;
        Ok(Results { out, lse, gradients: [d_q, d_k, d_v], ..results })
    }

    /// Computes one rank's share. Returns its results, and the bytes and messages that it sent.
    pub fn on_rank(
        &self,
        schedule: Schedule,
        rank: usize,
        wire: impl Wire,
    ) -> Result<([Vec<f32>; 5], [u64; 3]), Error> {
        let Shape { heads, kv_heads, q_len: length, head_dim, value_dim, .. } = self.shape;
        let config = Config::new(heads, head_dim).kv_heads(kv_heads).value_dim(value_dim);
        let mut ring = RingAttention::with_pipelines(GPU.pipelines(), GPU.queue(), config, schedule, wire)?;
        let shares = ring.shares(length)?;
        let upload = |x: &[f32], shape| {
            let own = take(x, shape, &shares, rank);
            // NaN after the last element shows reads out of bounds.
            let halves = |bits: fn(f32) -> u16| {
                let own: Vec<u16> = own.iter().copied().chain([f32::NAN; 2]).map(bits).collect();
                GPU.upload(&own)
            };
            match self.dtype {
                DType::F16 => halves(|x| half::f16::from_f32(x).to_bits()),
                DType::BF16 => halves(|x| half::bf16::from_f32(x).to_bits()),
                _ => GPU.upload(&own.iter().copied().chain([f32::NAN]).collect::<Vec<f32>>()),
            }
            .expect("memory")
        };
        let tokens = shares.tokens(rank);
        let own = |[b, h, _, d]: [usize; 4]| [b, h, tokens, d];
        let shape = self.shape;
        let ins = [upload(&self.q, shape.q()), upload(&self.k, shape.k()), upload(&self.v, shape.v())];
        let d_out = upload(&self.d_out, shape.out());
        let shapes = [shape.out(), shape.lse(), shape.q(), shape.k(), shape.v()].map(own);
        let poison = |shape| GPU.upload(&vec![f32::NAN; count(shape)]).expect("memory");
        let outs = shapes.map(poison);
        let view = |n: usize| TensorView::new(&outs[n], DType::F32, shapes[n]);
        let [q, k, v] = [0, 1, 2].map(|n| {
            let shape = [shape.q(), shape.k(), shape.v()].map(own)[n];
            TensorView::new(&ins[n], self.dtype, shape)
        });
        let d_out = TensorView::new(&d_out, self.dtype, own(shape.out()));
        let mask = self.rules.sequence();
        ring.forward(&RingForward::new(q, k, v, view(0), length).lse(view(1)).mask(&mask))?;
        let forward = ring.timeline().sent();
        let gradients = [view(2), view(3), view(4)];
        let call = RingBackward::new([q, k, v], view(0), view(1), d_out, gradients, length);
        ring.backward(&call.mask(&mask))?;
        let backward = ring.timeline().sent();
        let sent = [forward[0] + backward[0], forward[1] + backward[1], forward[0]];
        let download = |n: usize| GPU.download::<f32>(&outs[n], count(shapes[n])).expect("results");
        Ok((std::array::from_fn(download), sent))
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{:?} {:?} {:?}", self.shape, self.rules, self.dtype)
    }
}

/// Returns a rank's rows of a tensor.
pub fn take<T: Copy>(x: &[T], [b, h, l, d]: [usize; 4], shares: &Shares, rank: usize) -> Vec<T> {
    let mut own = Vec::new();
    for bh in 0..b * h {
        for at in shares.positions(rank) {
            let start = (bh * l + at) * d;
            own.extend_from_slice(&x[start..start + d]);
        }
    }
    own
}

fn place(all: &mut [f32], [b, h, l, d]: [usize; 4], own: &[f32], shares: &Shares, rank: usize) {
    let mut rows = own.chunks_exact(d);
    for bh in 0..b * h {
        for at in shares.positions(rank) {
            let start = (bh * l + at) * d;
            all[start..start + d].copy_from_slice(rows.next().expect("as many rows"));
        }
    }
}
