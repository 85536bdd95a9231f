//! The problems of a check. They are small, with ragged edges. The plan of a similar call computes
//! each problem.

use super::data::{FEW, Outcome, PREFILL, from_bits, halves_of, inputs, judge, noise, to_bits};
use super::{gradients, operators};
use crate::attention::{Attention, Config, Forward};
use crate::cache::{Append, Cache, CacheConfig, CacheRead, CacheStorage, ScaleGroup, Tokens};
use crate::device::{DeviceFacts, Family};
use crate::gpu::Gpu;
use crate::kernel::guard::Watch;
use crate::kernel::{KernelOptions, MatrixUnits, Scratch};
use crate::mask::{DeviceMask, HostMask};
use crate::matmul::{Linear, Projection, ProjectionForward};
use crate::reference::cache::stored;
use crate::reference::compare::{EPSILON_F16, Tolerance, compare};
use crate::reference::{self, Options};
use crate::tensor::{DType, Error, Shape, TensorView, count, widen};

#[derive(Clone, Copy, Debug)]
pub(super) enum Problem {
    /// Many queries.
    Prefill,
    /// Few queries and their weights. Only the staged path outputs weights.
    Weights,
    /// One query, and enough keys to split.
    Decode,
    /// Tensors of F16 or BF16, with many or few queries. On devices with matrix units: with or
    /// without them.
    Halves { dtype: DType, q_len: usize, units: MatrixUnits },
    /// One query and a cache.
    Cached(CacheStorage),
    /// `x Wᵀ + b` with `rows` rows.
    Product { rows: usize, dtype: DType },
    /// Gradients of q, k and v, which are tensors of that type.
    Gradients(DType),
    /// Gradients of biases and sinks.
    ScoreGradients,
    /// Gradients of a product's input and weight.
    ProductGradients,
    /// Sums over rows.
    RowSums,
    /// A call of an operator that uses the family.
    Operator(Family),
}

impl Problem {
    /// Returns all problems. A problem comes before the problems that build on it.
    pub fn all() -> impl Iterator<Item = Problem> {
        Self::FIRST.into_iter().chain(operators::OPERATORS.iter().copied().map(Problem::Operator))
    }

    const FIRST: [Problem; 27] = [
        Problem::Product { rows: FEW, dtype: DType::F32 },
        Problem::Product { rows: PREFILL.q_len, dtype: DType::F32 },
        Problem::Prefill,
        Problem::Weights,
        Problem::Decode,
        Problem::Halves { dtype: DType::F16, q_len: FEW, units: MatrixUnits::Never },
        Problem::Halves { dtype: DType::F16, q_len: PREFILL.q_len, units: MatrixUnits::Never },
        Problem::Halves { dtype: DType::F16, q_len: PREFILL.q_len, units: MatrixUnits::Auto },
        Problem::Halves { dtype: DType::BF16, q_len: FEW, units: MatrixUnits::Never },
        Problem::Halves { dtype: DType::BF16, q_len: PREFILL.q_len, units: MatrixUnits::Never },
        Problem::Product { rows: FEW, dtype: DType::F16 },
        Problem::Product { rows: PREFILL.q_len, dtype: DType::F16 },
        Problem::Product { rows: FEW, dtype: DType::BF16 },
        Problem::Operator(Family::CacheLengths),
        Problem::Cached(CacheStorage::F32),
        Problem::Cached(CacheStorage::F16),
        Problem::Cached(CacheStorage::BF16),
        Problem::Cached(CacheStorage::Q8(ScaleGroup::Row)),
        Problem::Cached(CacheStorage::Q4(ScaleGroup::Row)),
        Problem::Cached(CacheStorage::E4M3(ScaleGroup::Row)),
        Problem::Cached(CacheStorage::E5M2(ScaleGroup::Row)),
        Problem::Cached(CacheStorage::Gaussian4(ScaleGroup::Row)),
        Problem::Gradients(DType::F32),
        Problem::Gradients(DType::F16),
        Problem::ScoreGradients,
        Problem::ProductGradients,
        Problem::RowSums,
    ];

    /// True if `device` can compute the problem, and no other problem computes it in the same way.
    pub fn concerns(self, device: &DeviceFacts) -> bool {
        // Plans for software drivers do not use matrix units.
        let matrix = device.matrix.is_some() && !device.software;
        match self {
            Problem::Halves { units: MatrixUnits::Auto, .. } => matrix,
            Problem::Product { rows, dtype: DType::F16 } if rows > FEW => matrix,
            // Software drivers have one kernel for few and many rows.
            Problem::Halves { q_len: rows, .. } | Problem::Product { rows, .. } if rows > FEW => {
                !device.software
            }
            Problem::Gradients(DType::F16) => matrix,
            _ => true,
        }
    }

    /// # Errors
    /// An error that refuses the call, and a lost device.
    pub async fn run(self, gpu: &Gpu) -> Result<Outcome, Error> {
        match self {
            Problem::Prefill => attention(gpu, PREFILL, false).await,
            Problem::Weights => attention(gpu, Shape { q_len: FEW, ..PREFILL }, true).await,
            Problem::Decode => attention(gpu, DECODE, false).await,
            Problem::Halves { dtype, q_len, units } => {
                halves(gpu, dtype, Shape { q_len, ..PREFILL }, units).await
            }
            Problem::Cached(storage) => cached(gpu, storage).await,
            Problem::Product { rows, dtype } => product(gpu, rows, dtype).await,
            Problem::Gradients(dtype) => gradients::attention(gpu, dtype, false).await,
            Problem::ScoreGradients => gradients::attention(gpu, DType::F32, true).await,
            Problem::ProductGradients => gradients::product(gpu).await,
            Problem::RowSums => gradients::row_sums(gpu).await,
            Problem::Operator(family) => operators::run(family, gpu).await,
        }
    }
}

/// Enough keys for two splits on software drivers.
const DECODE: Shape = Shape { q_len: 1, kv_len: 600, ..PREFILL };
/// The shape of the cache problem. It is longer than any kernel's block of keys.
const CACHED: Shape =
    Shape { heads: PREFILL.kv_heads, q_len: 1, kv_len: 77, value_dim: PREFILL.head_dim, ..PREFILL };

/// Compares a result of attention on `q`, `k` and `v`.
fn judge_attention(
    got: &[f32],
    [q, k, v]: [&[f32]; 3],
    shape: Shape,
    options: &Options,
    dtype: DType,
) -> Result<Outcome, Error> {
    let want = reference::attention::<f64>(&widen(q), &widen(k), &widen(v), shape, options)?;
    let naive = reference::attention::<f32>(q, k, v, shape, options)?;
    Ok(judge(got, &want.out, &naive.out, dtype))
}

async fn attention(gpu: &Gpu, shape: Shape, weights: bool) -> Result<Outcome, Error> {
    let [q, k, v] = inputs(&shape);
    let options = Options::new().mask(HostMask::causal()).weights(weights);
    let got = gpu.attention_async(&q, &k, &v, shape, &options).await?;
    let want = reference::attention::<f64>(&widen(&q), &widen(&k), &widen(&v), shape, &options)?;
    let naive = reference::attention::<f32>(&q, &k, &v, shape, &options)?;
    let mut pairs = vec![(got.out, want.out, naive.out), (got.lse, want.lse, naive.lse)];
    if let (Some(got), Some(want), Some(naive)) = (got.weights, want.weights, naive.weights) {
        pairs.push((got, want, naive));
    }
    let shares = pairs.iter().map(|(got, want, naive)| judge(got, want, naive, DType::F32));
    Ok(shares.collect::<Result<Vec<_>, _>>().map(|shares| shares.into_iter().fold(0.0, f64::max)))
}

async fn halves(gpu: &Gpu, dtype: DType, shape: Shape, units: MatrixUnits) -> Result<Outcome, Error> {
    let data = inputs(&shape).map(|x| to_bits(&x, dtype));
    let watch = Watch::begin(gpu.device());
    let [q, k, v] = [&data[0], &data[1], &data[2]].map(|x| gpu.upload(x));
    let (q, k, v, out) = (q?, k?, v?, gpu.buffer(2 * count(shape.out()))?);
    let config = Config::of(&shape);
    let config = config.dtype(dtype).kernel_options(KernelOptions::new().matrix_units(units));
    let attention = Attention::with_pipelines(gpu.pipelines(), config)?;
    let call = Forward::new(
        TensorView::new(&q, dtype, shape.q()),
        TensorView::new(&k, dtype, shape.k()),
        TensorView::new(&v, dtype, shape.v()),
        TensorView::new(&out, dtype, shape.out()),
    )
    .mask(DeviceMask::causal());
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch))?;
    watch.end("attention").await?;
    let got = halves_of(gpu, dtype, &out, count(shape.out())).await?;
    let [q, k, v] = data.map(|x| from_bits(&x, dtype));
    judge_attention(&got, [&q, &k, &v], shape, &Options::new().mask(HostMask::causal()), dtype)
}

async fn cached(gpu: &Gpu, storage: CacheStorage) -> Result<Outcome, Error> {
    let shape = CACHED;
    let dtype = DType::F32;
    let data = inputs(&shape);
    let watch = Watch::begin(gpu.device());
    let [q, k, v] = [&data[0], &data[1], &data[2]].map(|x| gpu.upload(x));
    let (q, k, v, out) = (q?, k?, v?, gpu.buffer(4 * count(shape.out()))?);
    let (kept_k, kept_v) = (gpu.buffer(4 * count(shape.k()))?, gpu.buffer(4 * count(shape.v()))?);
    let config = CacheConfig::new(shape.kv_heads, shape.head_dim, shape.kv_len + 3).storage(storage);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config)?;
    let rows = Append::new(TensorView::new(&k, dtype, shape.k()), TensorView::new(&v, dtype, shape.v()));
    gpu.submit(|encoder| {
        cache.advance(encoder, Tokens::All(shape.kv_len))?;
        cache.append(encoder, 0, &rows)
    })?;
    let config = Config::new(shape.heads, shape.head_dim).kv_heads(shape.kv_heads);
    let attention = Attention::with_pipelines(gpu.pipelines(), config)?;
    let (q, o) = (TensorView::new(&q, dtype, shape.q()), TensorView::new(&out, dtype, shape.out()));
    let call = Forward::with_cache(q, &cache, o).at_end().mask(DeviceMask::causal());
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    let (k, v) = (TensorView::new(&kept_k, dtype, shape.k()), TensorView::new(&kept_v, dtype, shape.v()));
    gpu.submit(|encoder| {
        attention.forward(encoder, &call, &mut scratch)?;
        cache.read(encoder, 0, &CacheRead::new(k, v))
    })?;
    watch.end("a cache").await?;
    let got: Vec<f32> = gpu.download_async(&out, count(shape.out())).await?;
    let k: Vec<f32> = gpu.download_async(&kept_k, count(shape.k())).await?;
    let v: Vec<f32> = gpu.download_async(&kept_v, count(shape.v())).await?;
    for (kept, given) in [(&k, &data[1]), (&v, &data[2])] {
        let want = given.chunks(shape.head_dim).flat_map(|row| stored(storage, row)).map(f64::from);
        // A device may round to the level next to the reference's. No scale is larger than the
        // scale of 1.
        let absolute = match storage {
            CacheStorage::F32 => 0.0,
            CacheStorage::F16 => EPSILON_F16,
            // Exact, because the conversion works on bits.
            CacheStorage::BF16 => 0.0,
            CacheStorage::Q8(_) | CacheStorage::Q8_0 => 1.01 / 127.0,
            CacheStorage::E4M3(_) => 1.01 * 32.0 / 448.0,
            CacheStorage::E5M2(_) => 1.01 * 8192.0 / 57344.0,
            CacheStorage::Q4(_) | CacheStorage::Q4_0 => 1.01 / 7.0,
            // The gap of the two largest levels, times a root mean square of at most 1.
            CacheStorage::Gaussian4(_) => 1.01 * 0.6275,
        };
        if let Err(wrong) = compare(kept, &want.collect::<Vec<_>>(), Tolerance { absolute }) {
            return Ok(Err(wrong));
        }
    }
    judge_attention(&got, [&data[0], &k, &v], shape, &Options::new(), dtype)
}

async fn product(gpu: &Gpu, rows: usize, dtype: DType) -> Result<Outcome, Error> {
    let [features, dim] = [44, 52];
    let data = [noise(rows * features, 4), noise(dim * features, 5), noise(dim, 6)];
    let halves = dtype != DType::F32;
    let data = data.map(|x| if halves { from_bits(&to_bits(&x, dtype), dtype) } else { x });
    let upload = |x: &Vec<f32>| if halves { gpu.upload(&to_bits(x, dtype)) } else { gpu.upload(x) };
    let watch = Watch::begin(gpu.device());
    let (x, weight, bias) = (upload(&data[0])?, upload(&data[1])?, upload(&data[2])?);
    let out = gpu.buffer(dtype.bytes() * rows * dim)?;
    let linear = Linear {
        weight: TensorView::matrix(&weight, dtype, [dim, features]),
        bias: Some(TensorView::vector(&bias, dtype, dim)),
    };
    let x = TensorView::sequence(&x, dtype, [1, rows, features]);
    let call = ProjectionForward::new(x, linear, TensorView::sequence(&out, dtype, [1, rows, dim]));
    let projection = Projection::with_pipelines(gpu.pipelines());
    gpu.submit(|encoder| projection.forward(encoder, &[call]))?;
    watch.end("a projection").await?;
    let n = rows * dim;
    let got =
        if halves { halves_of(gpu, dtype, &out, n).await? } else { gpu.download_async(&out, n).await? };
    let wide = data.each_ref().map(|x| widen::<f64>(x));
    let want = reference::project(&wide[0], &wide[1], Some(&wide[2]), features, dim)?;
    let naive = reference::project::<f32>(&data[0], &data[1], Some(&data[2]), features, dim)?;
    Ok(judge(&got, &want, &naive, dtype))
}
