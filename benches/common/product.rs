//! A projection with its buffers, and the comparison of rows of its result with the reference.

use wgpu_attention::matmul::ProjectionForward;
use wgpu_attention::reference;
use wgpu_attention::reference::compare::{Difference, Mismatch, compare};
use wgpu_attention::reference::widen;
use wgpu_attention::tuning::MatrixUnits;
use wgpu_attention::{DType, Gpu, KernelOptions, Linear, Projection, TensorView, wgpu};

use super::problem::{blank, read, rounded, tolerance, upload};
use super::timer::noise;

/// The product of two square matrices.
pub struct Product {
    n: usize,
    /// The weight is `[in, out]`.
    transposed: bool,
    dtype: DType,
    /// x and the weight, rounded to the device's dtype.
    data: [Vec<f32>; 2],
    buffers: [wgpu::Buffer; 2],
    out: wgpu::Buffer,
}

impl Product {
    pub fn new(gpu: &Gpu, n: usize, transposed: bool, dtype: DType) -> Self {
        let data = [1, 2].map(|seed| rounded(noise(n * n, seed), dtype));
        let buffers = data.each_ref().map(|x| upload(gpu, x, dtype).expect("room for a matrix"));
        let out = blank(gpu, n * n, dtype).expect("room for a matrix");
        Product { n, transposed, dtype, data, buffers, out }
    }

    pub fn operator(&self, gpu: &Gpu, units: MatrixUnits) -> Projection {
        Projection::with_pipelines(gpu.pipelines()).kernel_options(KernelOptions::new().matrix_units(units))
    }

    pub fn call(&self) -> ProjectionForward<'_> {
        let Product { n, transposed, dtype, .. } = *self;
        let [x, w] = &self.buffers;
        let matrix = TensorView::matrix(w, dtype, [n, n]);
        let weight = if transposed { matrix.transposed(2, 3) } else { matrix };
        ProjectionForward::new(
            TensorView::sequence(x, dtype, [1, n, n]),
            Linear { weight, bias: None },
            TensorView::sequence(&self.out, dtype, [1, n, n]),
        )
    }

    /// Compares some rows of the result.
    pub fn judge(&self, gpu: &Gpu) -> Result<Difference, Mismatch> {
        let Product { n, transposed, dtype, data: [x, w], .. } = self;
        let (n, dtype) = (*n, *dtype);
        let rows = [0, n / 3, 2 * n / 3, n - 1];
        let take = |x: &[f32]| rows.iter().flat_map(|row| &x[row * n..][..n]).copied().collect::<Vec<f32>>();
        let stored = if *transposed { (0..n * n).map(|i| w[i % n * n + i / n]).collect() } else { w.clone() };
        let x = take(x);
        let want = reference::project::<f64>(&widen(&x), &widen(&stored), None, n, n).expect("it fits");
        let naive = rounded(reference::project::<f32>(&x, &stored, None, n, n).expect("it fits"), dtype);
        compare(&take(&read(gpu, &self.out, n * n, dtype)), &want, tolerance(&naive, &want, dtype))
    }
}
