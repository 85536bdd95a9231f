//! `scripts/gpu cargo bench --bench matrix [-- LENGTH]`
//!
//! Prefill of f16 tensors on matrix units beside the same call without them, and beside what the device's units do at best
//! (see `ceilings`): the fastest of some runs on the device. The last queries are compared with the reference first.
//! Where a device has no matrix units there is nothing to time.

mod common;

use common::ceilings::Ceilings;
use common::device::{self, Opened};
use common::share::{Kind, Work};
use common::timer::{Timer, noise};
use half::f16;
use wgpu_attention::reference::{self, Options, compare::max_error};
use wgpu_attention::{
    Attention, Config, DType, Forward, Gpu, HostMask, Mask, MatrixUnits, Scratch, Shape, TensorView, wgpu,
};

struct Call {
    shape: Shape,
    mask: HostMask<'static>,
    /// Bits of halves.
    inputs: [Vec<u16>; 3],
    buffers: [wgpu::Buffer; 3],
    out: wgpu::Buffer,
}

impl Call {
    fn new(gpu: &Gpu, shape: Shape, mask: HostMask<'static>) -> Self {
        let size = |s: [usize; 4]| s.iter().product::<usize>();
        let halves =
            |n, seed| noise(n, seed).into_iter().map(|x| f16::from_f32(x).to_bits()).collect::<Vec<_>>();
        let inputs = [halves(size(shape.q()), 1), halves(size(shape.k()), 2), halves(size(shape.v()), 3)];
        let buffers = inputs.each_ref().map(|x| gpu.upload(x).expect("upload"));
        let out = gpu.buffer(size(shape.out()) * 2).expect("out");
        Call { shape, mask, inputs, buffers, out }
    }

    /// Compares the last queries of the first head: aligned bottom-right, they see what they see among all.
    fn validate(&self, gpu: &Gpu) {
        let Shape { q_len, kv_len, head_dim, value_dim, .. } = self.shape;
        let rows = q_len.min(4);
        let wide = |x: &[u16]| x.iter().map(|x| f16::from_bits(*x).to_f64()).collect::<Vec<_>>();
        let [q, k, v] = &self.inputs;
        let (q, k, v) = (&q[..q_len * head_dim], &k[..kv_len * head_dim], &v[..kv_len * value_dim]);
        let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: rows, ..self.shape };
        let options = Options { mask: self.mask, ..Default::default() };
        let want = reference::attention::<f64>(
            &wide(&q[(q_len - rows) * head_dim..]),
            &wide(k),
            &wide(v),
            &shape,
            &options,
        );
        let want = want.expect("reference").out;
        let got: Vec<u16> = gpu.download(&self.out, q_len * value_dim).expect("out");
        let got = wide(&got[(q_len - rows) * value_dim..]);
        let largest = want.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        // Weights and results are rounded to 11 bits.
        let error = max_error(&got, &want) / largest;
        assert!(error < 4e-3, "off by {error:e} of the largest element");
    }

    fn seconds(&self, gpu: &Gpu, timer: &Timer, units: MatrixUnits) -> f64 {
        let Shape { heads, kv_heads, head_dim, .. } = self.shape;
        let config = Config::new(heads, head_dim).kv_heads(kv_heads).dtype(DType::F16).matrix_units(units);
        let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("config");
        let view = |buffer, shape| TensorView::new(buffer, DType::F16, shape);
        let [q, k, v] = &self.buffers;
        let (q, k, v) = (view(q, self.shape.q()), view(k, self.shape.k()), view(v, self.shape.v()));
        let mask = self.mask.try_map(|_, _| Err(()), |_, _| Err(()), |_, _| Err(()));
        let call = Forward::new(q, k, v, view(&self.out, self.shape.out())).mask(mask.expect("no tensors"));
        let mut scratch =
            Scratch::new(gpu.device(), attention.scratch_size(&call).expect("size")).expect("scratch");
        let mut run = || {
            timer
                .time(|pass| attention.forward_in_pass(pass, &call, &mut scratch).expect("forward"))
                .as_secs_f64()
        };
        run();
        self.validate(gpu);
        (0..10).map(|_| run()).fold(f64::INFINITY, f64::min)
    }
}

fn main() {
    let Opened { gpu, fragments, .. } = device::open();
    let info = gpu.device().adapter_info();
    println!("device: {}, fragments: {fragments:?}", info.name);
    let timer = Timer::new(&gpu).expect("timestamp queries");
    if fragments.is_empty() {
        return println!("no matrix units: nothing to time");
    }
    let software = info.device_type == wgpu::DeviceType::Cpu;
    let given = std::env::args().skip(1).find_map(|arg| arg.parse().ok());
    let length: usize = given.unwrap_or(if software { 512 } else { 16384 });
    // 2048 channels in all, as in the papers on FlashAttention.
    let channels = if software { 256 } else { 2048 };
    let ceilings = Ceilings::measure(&gpu, &fragments, &timer);
    println!("{ceilings}");
    println!(
        "{:36} {:>10} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "", "ms", "GFLOP/s", "matrix", "exp2", "memory", "without", "its FMA"
    );
    for (head_dim, is_causal) in [(64, false), (64, true), (128, false), (128, true)] {
        let shape = Shape::new(1, channels / head_dim, length, head_dim);
        let mask = if is_causal { Mask::causal() } else { Mask::none() };
        let call = Call::new(&gpu, shape, mask);
        let seconds = call.seconds(&gpu, &timer, MatrixUnits::Always);
        let plain = call.seconds(&gpu, &timer, MatrixUnits::Never);
        let pairs = if is_causal { length * (length + 1) / 2 } else { length * length } * shape.heads;
        let work = Work { flops: 4.0 * (pairs * head_dim) as f64, bytes: 8.0 * (channels * length) as f64 };
        let share = ceilings.share(Kind::Matrix, work, seconds * 1e3).expect("matrix units");
        let without = ceilings.share(Kind::Plain, work, plain * 1e3).expect("any device");
        let name = format!("1x{}x{length}x{head_dim}{}", shape.heads, if is_causal { " causal" } else { "" });
        println!(
            "{name:36} {:10.3} {:10.1} {:8.1}% {:8.1}% {:8.1}% {:8.2}x {:8.1}%",
            seconds * 1e3,
            work.flops / seconds / 1e9,
            100.0 * share.arithmetic / share.ms,
            100.0 * pairs as f64 / ceilings.exp2_gps.giga / 1e9 / seconds,
            100.0 * share.memory / share.ms,
            plain / seconds,
            100.0 * without.arithmetic / without.ms,
        );
    }
    println!(
        "matrix, exp2, memory: what each ceiling allows at least, as a share of the time; without: that much slower"
    );
}
