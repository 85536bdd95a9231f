//! A projection with its buffers, and the comparison of rows of its result with the reference.

use wgpu_attention::matmul::ProjectionForward;
use wgpu_attention::reference;
use wgpu_attention::reference::compare::{Difference, Mismatch, compare};
use wgpu_attention::reference::widen;
use wgpu_attention::tuning::MatrixUnits;
use wgpu_attention::{DType, Gpu, KernelOptions, Linear, Projection, TensorView, wgpu};

use super::problem::{blank, read, rounded, tolerance, upload};
use super::timer::noise;

/// The product of rows by a square matrix.
pub struct Product {
    rows: usize,
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
    pub fn new(gpu: &Gpu, [rows, n]: [usize; 2], transposed: bool, dtype: DType) -> Self {
        let data = [(rows, 1), (n, 2)].map(|(m, seed)| rounded(noise(m * n, seed), dtype));
        let buffers = data.each_ref().map(|x| upload(gpu, x, dtype).expect("room for a matrix"));
        let out = blank(gpu, rows * n, dtype).expect("room for a matrix");
        Product { rows, n, transposed, dtype, data, buffers, out }
    }

    pub fn operator(&self, gpu: &Gpu, units: MatrixUnits) -> Projection {
        Projection::with_pipelines(gpu.pipelines()).kernel_options(KernelOptions::new().matrix_units(units))
    }

    pub fn call(&self) -> ProjectionForward<'_> {
        let Product { rows, n, transposed, dtype, .. } = *self;
        let [x, w] = &self.buffers;
        let matrix = TensorView::matrix(w, dtype, [n, n]);
        let weight = if transposed { matrix.transposed(2, 3) } else { matrix };
        ProjectionForward::new(
            TensorView::sequence(x, dtype, [1, rows, n]),
            Linear { weight, bias: None },
            TensorView::sequence(&self.out, dtype, [1, rows, n]),
        )
    }

    /// Compares some rows of the result.
    pub fn judge(&self, gpu: &Gpu) -> Result<Difference, Mismatch> {
        let Product { rows, n, transposed, dtype, data: [x, w], .. } = self;
        let (len, n, dtype) = (*rows, *n, *dtype);
        let rows = [0, len / 3, 2 * len / 3, len - 1];
        let take = |x: &[f32]| rows.iter().flat_map(|row| &x[row * n..][..n]).copied().collect::<Vec<f32>>();
        let stored = if *transposed { (0..n * n).map(|i| w[i % n * n + i / n]).collect() } else { w.clone() };
        let x = take(x);
        let want = reference::project::<f64>(&widen(&x), &widen(&stored), None, n, n).expect("it fits");
        let naive = rounded(reference::project::<f32>(&x, &stored, None, n, n).expect("it fits"), dtype);
        compare(&take(&read(gpu, &self.out, len * n, dtype)), &want, tolerance(&naive, &want, dtype))
    }
}
