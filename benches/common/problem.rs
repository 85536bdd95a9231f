//! An attention call with its buffers, and the comparison of rows of its result with the reference.

use half::{bf16, f16};
use wgpu_attention::mask::HostMask;
use wgpu_attention::reference;
use wgpu_attention::reference::compare::{
    Difference, EPSILON_BF16, EPSILON_F16, EPSILON_F32, Mismatch, Tolerance, compare,
};
use wgpu_attention::reference::{Options, widen};
use wgpu_attention::tuning::{Algorithm, MatrixUnits};
use wgpu_attention::{
    Alignment, Attention, Config, DType, Error, Forward, Gpu, HostTensor, KernelOptions, Mask, Scratch,
    Shape, TensorView, UploadedMask, wgpu,
};

#[cfg(not(target_arch = "wasm32"))]
use super::bed::{Bed, Checked};
use super::rows::{dtype_name, shape_name};
use super::share::Work;
use super::timer::noise;

/// The keys that a query sees, aligned bottom-right, and the change of its scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    None,
    Causal,
    /// This number of keys; the last one is the query's own position.
    Window(usize),
    /// One slope a head, with all keys visible.
    Alibi,
    Softcap,
    /// A number for every score of every head.
    Bias,
    /// A boolean for every pair. Half of the pairs are visible.
    Keep,
}

impl Rule {
    const SOFTCAP: f64 = 20.0;

    pub fn name(self) -> String {
        match self {
            Rule::None => "none".into(),
            Rule::Causal => "causal".into(),
            Rule::Window(keys) => format!("window {keys}"),
            Rule::Alibi => "alibi".into(),
            Rule::Softcap => "softcap".into(),
            Rule::Bias => "bias".into(),
            Rule::Keep => "keep".into(),
        }
    }

    fn softcap(self) -> Option<f64> {
        (self == Rule::Softcap).then_some(Self::SOFTCAP)
    }

    /// Returns the visible pairs of a query and a key in one head, as far as intervals determine
    /// them.
    fn pairs(self, q_len: usize, kv_len: usize) -> f64 {
        let window = if let Rule::Window(keys) = self { keys } else { kv_len };
        (1..=q_len).map(|n| self.keys(q_len, kv_len, n).min(window) as f64).sum()
    }

    /// Returns the keys up to the last one that the first `n` queries see.
    fn keys(self, q_len: usize, kv_len: usize, n: usize) -> usize {
        match self {
            Rule::Causal | Rule::Window(_) => kv_len - q_len + n,
            _ => kv_len,
        }
    }
}

/// The tensors of a rule.
#[derive(Default)]
struct RuleData {
    numbers: Vec<f32>,
    bools: Vec<bool>,
}

impl RuleData {
    fn new(rule: Rule, shape: Shape) -> Self {
        let Shape { heads, q_len, kv_len, .. } = shape;
        match rule {
            Rule::Alibi => {
                let slopes = (1..=heads).map(|n| (-8.0 * n as f32 / heads as f32).exp2());
                RuleData { numbers: slopes.collect(), ..Self::default() }
            }
            Rule::Bias => RuleData { numbers: noise(heads * q_len * kv_len, 4), ..Self::default() },
            Rule::Keep => {
                let bools = noise(q_len * kv_len, 4).into_iter().map(|x| x > 0.0);
                RuleData { bools: bools.collect(), ..Self::default() }
            }
            _ => Self::default(),
        }
    }

    /// Returns the data of `rows` queries from `first` on.
    fn cut(&self, rule: Rule, shape: Shape, first: usize, rows: usize) -> Self {
        let Shape { q_len, kv_len, .. } = shape;
        let numbers = match rule {
            Rule::Bias => cut(&self.numbers, q_len, kv_len, first, rows),
            _ => self.numbers.clone(),
        };
        RuleData { numbers, bools: cut(&self.bools, q_len, kv_len, first, rows) }
    }

    /// Returns the mask of the queries that the data covers.
    fn mask(&self, rule: Rule, shape: Shape) -> HostMask<'_> {
        let Shape { heads, q_len, kv_len, .. } = shape;
        match rule {
            Rule::None | Rule::Softcap => Mask::none(),
            Rule::Causal => Mask::causal(),
            Rule::Window(keys) => Mask::causal().window(keys - 1, 0),
            Rule::Alibi => Mask::none().alibi(HostTensor::new(&self.numbers, [1, heads, 1, 1])),
            Rule::Bias => Mask::none().bias(HostTensor::new(&self.numbers, [1, heads, q_len, kv_len])),
            Rule::Keep => Mask::none().attn_mask(HostTensor::new(&self.bools, [1, 1, q_len, kv_len])),
        }
    }
}

/// The way to compute a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Staged,
    Fused,
    /// The fused path, on matrix units.
    Matrix,
    /// A call without any tuning options.
    Auto,
    /// A call with fixed tuning options.
    Ruled,
}

impl Way {
    pub fn name(self) -> &'static str {
        match self {
            Way::Staged => "staged",
            Way::Fused => "fused",
            Way::Matrix => "matrix",
            Way::Auto => "auto",
            Way::Ruled => "by the rules",
        }
    }
}

/// Queries, keys and values, with their mask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    pub shape: Shape,
    pub rule: Rule,
    pub dtype: DType,
    /// The offset of q, k and v in their buffers. If it is no multiple of four, loads are not
    /// vectorised.
    pub first: usize,
}

impl Case {
    pub fn new(shape: Shape, rule: Rule, dtype: DType) -> Self {
        Case { shape, rule, dtype, first: 0 }
    }

    /// Returns the name that criterion's filters match.
    pub fn id(&self) -> String {
        let (shape, dtype) = (shape_name(self.shape, "x"), dtype_name(self.dtype));
        let rule = if self.rule == Rule::None { String::new() } else { format!("{} ", self.rule.name()) };
        let first = if self.first == 0 { String::new() } else { format!("from {} ", self.first) };
        format!("{shape} {rule}{first}{dtype}")
    }

    /// Returns the arithmetic of the visible pairs, and the bytes of q, k, v and out.
    pub fn work(&self) -> Work {
        let Shape { batch, heads, q_len, kv_len, head_dim, value_dim, .. } = self.shape;
        let pairs = self.rule.pairs(q_len, kv_len) * (batch * heads) as f64;
        let tensors = [self.shape.q(), self.shape.k(), self.shape.v(), self.shape.out()];
        let elements: usize = tensors.iter().map(count).sum();
        Work {
            flops: 2.0 * pairs * (head_dim + value_dim) as f64,
            bytes: (elements * self.dtype.bytes()) as f64,
        }
    }
}

pub fn count(shape: &[usize; 4]) -> usize {
    shape.iter().product()
}

/// A case on the device.
pub struct Problem {
    case: Case,
    /// The inputs, rounded to the device's dtype.
    inputs: [Vec<f32>; 3],
    buffers: [wgpu::Buffer; 3],
    out: wgpu::Buffer,
    rule_data: RuleData,
    mask: UploadedMask,
}

impl Problem {
    /// # Errors
    /// The device has not enough memory.
    pub fn new(gpu: &Gpu, case: Case) -> Result<Self, Error> {
        let Case { shape, rule, dtype, first } = case;
        let data = |shape: [usize; 4], seed| rounded(noise(count(&shape), seed), dtype);
        let inputs = [data(shape.q(), 1), data(shape.k(), 2), data(shape.v(), 3)];
        let upload = |n: usize| upload(gpu, &[&vec![0.0; first], inputs[n].as_slice()].concat(), dtype);
        let buffers = [upload(0)?, upload(1)?, upload(2)?];
        let out = blank(gpu, count(&shape.out()), dtype)?;
        let rule_data = RuleData::new(rule, shape);
        let mask = UploadedMask::new(gpu.device(), gpu.queue(), &rule_data.mask(rule, shape))?;
        Ok(Problem { case, inputs, buffers, out, rule_data, mask })
    }

    pub fn operator(&self, gpu: &Gpu, way: Way) -> Result<Attention, Error> {
        let Case { shape, rule, dtype, .. } = self.case;
        let Shape { heads, kv_heads, head_dim, value_dim, .. } = shape;
        let (path, units) = match way {
            Way::Staged => (Algorithm::Staged, MatrixUnits::Never),
            Way::Fused => (Algorithm::Fused, MatrixUnits::Never),
            Way::Matrix => (Algorithm::Fused, MatrixUnits::Always),
            Way::Auto | Way::Ruled => (Algorithm::Auto, MatrixUnits::Auto),
        };
        let kernel_options = if way == Way::Ruled { KernelOptions::fixed() } else { KernelOptions::new() };
        let config =
            Config::new(heads, head_dim).kv_heads(kv_heads).value_dim(value_dim).softcap(rule.softcap());
        Attention::with_pipelines(
            gpu.pipelines(),
            config.dtype(dtype).kernel_options(kernel_options.algorithm(path).matrix_units(units)),
        )
    }

    pub fn call(&self) -> Forward<'_> {
        let Case { shape, dtype, first, .. } = self.case;
        let view = |buffer, shape| TensorView::new(buffer, dtype, shape).with_offset(first);
        let [q, k, v] = &self.buffers;
        let (q, k, v) = (view(q, shape.q()), view(k, shape.k()), view(v, shape.v()));
        let out = TensorView::new(&self.out, dtype, shape.out());
        Forward::new(q, k, v, out).mask(self.mask.view())
    }

    /// Compares rows at the beginning, in the middle and at the end of all heads with the
    /// reference. The reference computes only these rows, at their positions.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn judge(&self, gpu: &Gpu) -> Result<Difference, Mismatch> {
        pollster::block_on(self.judge_async(gpu))
    }

    /// The async variant of `judge`.
    pub async fn judge_async(&self, gpu: &Gpu) -> Result<Difference, Mismatch> {
        let Case { shape, rule, dtype, .. } = self.case;
        let Shape { q_len, kv_len, head_dim, value_dim, .. } = shape;
        let got = read_async(gpu, &self.out, count(&shape.out()), dtype).await;
        let [q, k, v] = &self.inputs;
        let rows = q_len.min(2);
        let mut worst = Difference::default();
        for first in [0, q_len / 3, q_len * 2 / 3, q_len - rows] {
            let first = first.min(q_len - rows);
            let keys = rule.keys(q_len, kv_len, first + rows);
            let q = cut(q, q_len, head_dim, first, rows);
            let (k, v) = (cut(k, kv_len, head_dim, 0, keys), cut(v, kv_len, value_dim, 0, keys));
            let rule_data = self.rule_data.cut(rule, shape, first, rows);
            let stands = Alignment::Offset((kv_len + first) as i64 - q_len as i64);
            let shape = Shape { q_len: rows, kv_len: keys, ..shape };
            let mask = rule_data.mask(rule, shape).aligned(stands);
            let options = Options::new().mask(mask).softcap(rule.softcap());
            let got = cut(&got, q_len, value_dim, first, rows);
            let difference = compare_attention(&got, [&q, &k, &v], shape, &options, dtype)?;
            worst.absolute = worst.absolute.max(difference.absolute);
            worst.relative = worst.relative.max(difference.relative);
        }
        Ok(worst)
    }

    /// Returns a pass that computes the case in that way, with its scratch. Its result has been
    /// compared.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn check<'a>(&'a self, bed: &Bed, way: Way, mut scratch: Scratch) -> Checked<'a> {
        let attention = self.operator(&bed.gpu, way).expect("an operator");
        let record = move |pass: &mut wgpu::ComputePass| {
            attention.forward(pass, &self.call(), &mut scratch).expect("a call");
        };
        bed.check(&format!("{} {}", way.name(), self.case.id()), record, || self.judge(&bed.gpu))
    }

    /// Returns scratch to compute the case in that way.
    ///
    /// # Errors
    /// The operator refuses the case, or the device has not enough memory.
    pub fn scratch(&self, gpu: &Gpu, way: Way) -> Result<Scratch, Error> {
        Scratch::new(gpu.device(), self.operator(gpu, way)?.scratch_size(&self.call())?)
    }
}

/// Returns `rows` rows of `dim` from `first` on, of each head of `length` rows.
fn cut<T: Copy>(x: &[T], length: usize, dim: usize, first: usize, rows: usize) -> Vec<T> {
    x.chunks_exact(length * dim).flat_map(|head| &head[first * dim..][..rows * dim]).copied().collect()
}

/// Returns numbers rounded to `dtype`.
pub fn rounded(x: Vec<f32>, dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F16 => x.into_iter().map(|x| f16::from_f32(x).to_f32()).collect(),
        DType::BF16 => x.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect(),
        _ => x,
    }
}

/// # Errors
/// The device has not enough memory.
pub fn upload(gpu: &Gpu, x: &[f32], dtype: DType) -> Result<wgpu::Buffer, Error> {
    match dtype {
        DType::F16 => gpu.upload(&x.iter().map(|x| f16::from_f32(*x).to_bits()).collect::<Vec<u16>>()),
        DType::BF16 => gpu.upload(&x.iter().map(|x| bf16::from_f32(*x).to_bits()).collect::<Vec<u16>>()),
        _ => gpu.upload(x),
    }
}

/// Returns a buffer for `n` elements of a result. They are NaN until they are written.
///
/// # Errors
/// The device has not enough memory.
pub fn blank(gpu: &Gpu, n: usize, dtype: DType) -> Result<wgpu::Buffer, Error> {
    gpu.upload(&vec![0xffu8; n * dtype.bytes()])
}

/// Reads `n` elements of a result.
#[cfg(not(target_arch = "wasm32"))]
pub fn read(gpu: &Gpu, buffer: &wgpu::Buffer, n: usize, dtype: DType) -> Vec<f32> {
    pollster::block_on(read_async(gpu, buffer, n, dtype))
}

/// The async variant of `read`.
pub async fn read_async(gpu: &Gpu, buffer: &wgpu::Buffer, n: usize, dtype: DType) -> Vec<f32> {
    let bits = async || gpu.download_async::<u16>(buffer, n).await.expect("a result").into_iter();
    match dtype {
        DType::F16 => bits().await.map(|x| f16::from_bits(x).to_f32()).collect(),
        DType::BF16 => bits().await.map(|x| bf16::from_bits(x).to_f32()).collect(),
        _ => gpu.download_async(buffer, n).await.expect("a result"),
    }
}

/// Compares a result of attention with the reference, with the tolerance of `dtype`.
pub fn compare_attention(
    got: &[f32],
    [q, k, v]: [&[f32]; 3],
    shape: Shape,
    options: &Options,
    dtype: DType,
) -> Result<Difference, Mismatch> {
    let want = reference::attention::<f64>(&widen(q), &widen(k), &widen(v), shape, options)
        .expect("the reference knows the shape")
        .out;
    let naive =
        reference::attention::<f32>(q, k, v, shape, options).expect("the reference knows the shape").out;
    compare(got, &want, tolerance(&rounded(naive, dtype), &want, dtype))
}

/// Returns the tests' tolerance for inputs in (−1, 1). For f16 and bf16 it is relative to the
/// largest result, not the largest value. The mean of thousands of keys is small, and a tolerance
/// relative to the values would exceed it.
pub fn tolerance(naive: &[f32], want: &[f64], dtype: DType) -> Tolerance {
    let largest = want.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    let magnitude = if dtype == DType::F32 { largest.max(1.0) } else { largest };
    Tolerance::from_naive(&widen::<f64>(naive), want, magnitude, epsilon(dtype))
}

/// The spacing of a type at 1.
pub fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => EPSILON_F16,
        DType::BF16 => EPSILON_BF16,
        _ => EPSILON_F32,
    }
}
