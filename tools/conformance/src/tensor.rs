//! Tensors of cases, on the host and on a device.

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorView as FileTensor;
use wgpu_attention::{DType, Error, Gpu, TensorView, wgpu};

/// A tensor of a file. Numbers are as f64, which holds every type of the files exactly.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<f64>,
}

impl Tensor {
    pub fn read(file: &FileTensor) -> Result<Self, String> {
        let bytes = file.data();
        let data = match file.dtype() {
            Dtype::F64 => numbers(bytes, f64::from_le_bytes),
            Dtype::F32 => numbers(bytes, |b| f32::from_le_bytes(b).into()),
            Dtype::F16 => numbers(bytes, |b| f16::from_le_bytes(b).into()),
            Dtype::BF16 => numbers(bytes, |b| bf16::from_le_bytes(b).into()),
            Dtype::I64 => numbers(bytes, |b| i64::from_le_bytes(b) as f64),
            Dtype::BOOL => numbers(bytes, |[b]: [u8; 1]| f64::from(b != 0)),
            other => return Err(format!("a tensor of type {other:?}")),
        };
        Ok(Tensor { dtype: file.dtype(), shape: file.shape().to_vec(), data })
    }

    /// Returns the shape with ones in front, up to four axes.
    pub fn four(&self) -> [usize; 4] {
        let mut four = [1; 4];
        four[4 - self.shape.len()..].copy_from_slice(&self.shape);
        four
    }

    /// Returns the type on the device, if the library has it.
    pub fn float(&self) -> Option<DType> {
        match self.dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::F16 => Some(DType::F16),
            Dtype::BF16 => Some(DType::BF16),
            _ => None,
        }
    }
}

fn numbers<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    bytes.chunks_exact(N).map(|b| number(b.try_into().expect("N bytes"))).collect()
}

/// A dense tensor in the memory of a device.
pub struct Placed {
    buffer: wgpu::Buffer,
    dtype: DType,
    shape: [usize; 4],
}

impl Placed {
    /// Uploads `data` as `dtype`.
    pub fn new(gpu: &Gpu, data: &[f64], dtype: DType, shape: [usize; 4]) -> Result<Self, Error> {
        let buffer = match dtype {
            DType::F16 => gpu.upload(&even(data.iter().map(|x| f16::from_f64(*x).to_bits()).collect()))?,
            DType::BF16 => gpu.upload(&even(data.iter().map(|x| bf16::from_f64(*x).to_bits()).collect()))?,
            DType::U32 => gpu.upload(&data.iter().map(|x| *x as u32).collect::<Vec<_>>())?,
            DType::Bool => gpu.upload_bools(&data.iter().map(|x| *x != 0.0).collect::<Vec<_>>())?,
            _ => gpu.upload(&data.iter().map(|x| *x as f32).collect::<Vec<_>>())?,
        };
        Ok(Placed { buffer, dtype, shape })
    }

    /// Makes an output. It holds NaN, so that an element that nothing writes is an error.
    pub fn output(gpu: &Gpu, dtype: DType, shape: [usize; 4]) -> Result<Self, Error> {
        Placed::new(gpu, &vec![f64::NAN; shape.iter().product()], dtype, shape)
    }

    pub fn view(&self) -> TensorView<'_> {
        TensorView::new(&self.buffer, self.dtype, self.shape)
    }

    /// A view of `[batch, heads, length, dim]`, stored as `[batch, length, heads, dim]`.
    pub fn blhd(&self, shape: [usize; 4]) -> TensorView<'_> {
        TensorView::blhd(&self.buffer, self.dtype, shape)
    }

    /// A view of other axes.
    pub fn viewed(&self, shape: [usize; 4]) -> TensorView<'_> {
        TensorView::new(&self.buffer, self.dtype, shape)
    }

    pub fn download(&self, gpu: &Gpu) -> Result<Vec<f64>, Error> {
        let n: usize = self.shape.iter().product();
        let bits = || gpu.download::<u16>(&self.buffer, n);
        Ok(match self.dtype {
            DType::F16 => bits()?.into_iter().map(|x| f16::from_bits(x).to_f64()).collect(),
            DType::BF16 => bits()?.into_iter().map(|x| bf16::from_bits(x).to_f64()).collect(),
            DType::U32 => gpu.download::<u32>(&self.buffer, n)?.iter().map(|x| f64::from(*x)).collect(),
            _ => gpu.download::<f32>(&self.buffer, n)?.iter().map(|x| f64::from(*x)).collect(),
        })
    }
}

/// Buffers hold whole words.
fn even<T: Copy + Default>(mut data: Vec<T>) -> Vec<T> {
    data.resize(data.len().next_multiple_of(2), T::default());
    data
}
