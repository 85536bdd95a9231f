//! Tensors of one small call, and the comparison of its results.

use std::ops::Deref;

use super::data::{Outcome, judge, judge_gradient, noise};
use crate::gpu::Gpu;
use crate::kernel::guard::Watch;
use crate::kernel::{Scratch, ScratchSize};
use crate::reference::compare::{Tolerance, compare};
use crate::tensor::{DType, Error, Shape, TensorView, count};

/// Results of the reference in f64, and in f32 for the tolerance.
pub(super) type Both<const N: usize> = ([Vec<f64>; N], [Vec<f32>; N]);

/// The results of an expression over slices of the inputs, in f64 and in f32.
macro_rules! both {
    (|$($x:ident),*| $results:expr) => {{
        let naive = { $(let $x: &[f32] = &$x[..];)* $results };
        let want = { $(let $x: &[f64] = &$crate::tensor::widen::<f64>(&$x[..])[..];)* $results };
        (want, naive)
    }};
}
pub(super) use both;

/// Elements of a tensor, and their type on the device.
pub(super) trait Element: bytemuck::NoUninit + bytemuck::AnyBitPattern {
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for u32 {
    const DTYPE: DType = DType::U32;
}

/// A dense tensor in a separate buffer, and the numbers that were uploaded to it.
pub(super) struct Tensor<T = f32> {
    buffer: wgpu::Buffer,
    shape: [usize; 4],
    data: Vec<T>,
}

impl<T> Deref for Tensor<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.data
    }
}

impl<T: Element> Tensor<T> {
    pub fn view(&self) -> TensorView<'_> {
        TensorView::new(&self.buffer, T::DTYPE, self.shape)
    }

    /// The elements on the device.
    pub async fn read(&self, gpu: &Gpu) -> Result<Vec<T>, Error> {
        gpu.download_async(&self.buffer, count(self.shape)).await
    }
}

/// A call in preparation.
pub(super) struct Bench<'a> {
    gpu: &'a Gpu,
    watch: Watch,
}

impl<'a> Bench<'a> {
    pub fn new(gpu: &'a Gpu) -> Self {
        Bench { gpu, watch: Watch::begin(gpu.device()) }
    }

    pub fn tensor<T: Element>(&self, shape: [usize; 4], data: Vec<T>) -> Result<Tensor<T>, Error> {
        Ok(Tensor { buffer: self.gpu.upload(&data)?, shape, data })
    }

    pub fn zeros<T: Element>(&self, shape: [usize; 4]) -> Result<Tensor<T>, Error> {
        self.tensor(shape, vec![T::zeroed(); count(shape)])
    }

    pub fn noise(&self, shape: [usize; 4], seed: u32) -> Result<Tensor, Error> {
        self.tensor(shape, noise(count(shape), seed))
    }

    /// Queries, keys and values.
    pub fn inputs(&self, shape: &Shape) -> Result<[Tensor; 3], Error> {
        Ok([self.noise(shape.q(), 1)?, self.noise(shape.k(), 2)?, self.noise(shape.v(), 3)?])
    }

    pub fn scratch(&self, size: ScratchSize) -> Result<Scratch, Error> {
        Scratch::new(self.gpu.device(), size)
    }

    /// Computes the work that `record` records.
    pub async fn run(
        self,
        what: &'static str,
        record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.gpu.submit(record)?;
        self.watch.end(what).await
    }
}

/// Compares tensors with the results of the reference.
pub(super) async fn judged<const N: usize>(
    gpu: &Gpu,
    tensors: [&Tensor; N],
    (want, naive): Both<N>,
) -> Result<Outcome, Error> {
    let mut worst = Ok(0.0);
    for ((tensor, want), naive) in tensors.into_iter().zip(&want).zip(&naive) {
        worst = worse(worst, judge(&tensor.read(gpu).await?, want, naive, DType::F32));
    }
    Ok(worst)
}

/// Compares gradients as [`judged`] does. `terms`: the sums of absolute values, from plain loops.
pub(super) async fn judged_gradients<const N: usize>(
    gpu: &Gpu,
    tensors: [&Tensor; N],
    (want, naive): Both<N>,
    terms: [Vec<f32>; N],
) -> Result<Outcome, Error> {
    let mut worst = Ok(0.0);
    for (((tensor, want), naive), terms) in tensors.into_iter().zip(&want).zip(&naive).zip(&terms) {
        worst = worse(worst, judge_gradient(&tensor.read(gpu).await?, want, naive, terms, DType::F32));
    }
    Ok(worst)
}

/// Returns the larger share, or the first mismatch.
pub(super) fn worse(a: Outcome, b: Outcome) -> Outcome {
    Ok(a?.max(b?))
}

/// Compares whole numbers.
pub(super) fn equal(got: &[u32], want: &[u32]) -> Outcome {
    let wide = |x: &[u32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    compare(&wide(got), &wide(want), Tolerance { absolute: 0.0 }).map(|_| 0.0)
}
