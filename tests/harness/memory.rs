//! Host images of device buffers: the place of a tensor, the poison around it, and a check of the
//! poison.

use half::{bf16, f16};
use wgpu_attention::{DType, Gpu, TensorView};

/// NaNs with payloads that no arithmetic makes. They fill outputs before a run, and surround
/// inputs.
const OUTPUT_F32: u32 = 0x7fc5_a5a5;
const OUTPUT_F16: u16 = 0x7e5a;
const OUTPUT_BF16: u16 = 0x7fd5;
/// A number that no index or length reaches, and that is not "none".
const OUTPUT_U32: u32 = 0xfffe_a5a5;
const INPUT_F32: u32 = 0x7fca_5a5b;
const INPUT_F16: u16 = 0x7eb5;
const INPUT_BF16: u16 = 0x7fda;

/// Guard elements after an output, and before it where its layout allows an offset.
pub const GUARD: usize = 64;

/// The place of a tensor in its buffer, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub shape: [usize; 4],
    pub strides: [usize; 4],
    pub offset: usize,
    /// The number of elements of the whole buffer.
    pub len: usize,
}

impl Place {
    /// Axes nested in `order`, outermost first. `pads[axis]` elements follow each round of `axis`.
    /// The innermost axis has stride `step`.
    pub fn nested(
        shape: [usize; 4],
        order: [usize; 4],
        pads: [usize; 4],
        step: usize,
        offset: usize,
    ) -> Self {
        let mut strides = [0; 4];
        let mut stride = step;
        for axis in order.into_iter().rev() {
            strides[axis] = stride;
            stride = stride * shape[axis] + pads[axis];
        }
        Place { shape, strides, offset, len: offset + stride + GUARD }
    }

    /// Row-major from the start of the buffer.
    pub fn dense(shape: [usize; 4]) -> Self {
        Self::nested(shape, [0, 1, 2, 3], [0; 4], 1, 0)
    }

    /// `[batch, length, heads, dim]` in memory.
    pub fn blhd(shape: [usize; 4]) -> Self {
        Self::nested(shape, [0, 2, 1, 3], [0; 4], 1, 0)
    }

    /// Part `n` of a packed `[batch, length, 3, heads, dim]` buffer.
    pub fn packed(shape: [usize; 4], n: usize) -> Self {
        let [b, h, l, d] = shape;
        let strides = [l * 3 * h * d, d, 3 * h * d, 1];
        Place { shape, strides, offset: n * h * d, len: b * l * 3 * h * d + GUARD }
    }

    /// `[length, batch, heads, dim]` in memory: sequence first.
    pub fn lbhd(shape: [usize; 4]) -> Self {
        Self::nested(shape, [2, 0, 1, 3], [0; 4], 1, GUARD)
    }

    /// The last two axes exchanged in memory: a matrix stored `[in, out]`.
    pub fn transposed(shape: [usize; 4]) -> Self {
        Self::nested(shape, [0, 1, 3, 2], [0; 4], 1, 0)
    }

    /// Returns the buffer indices of the elements in logical order.
    pub fn indices(&self) -> impl Iterator<Item = usize> + use<> {
        let Place { shape: [b, h, l, d], strides: s, offset, .. } = *self;
        (0..b * h * l * d).map(move |n| {
            let at = [n / (l * d) / h, n / (l * d) % h, n / d % l, n % d];
            offset + (0..4).map(|a| at[a] * s[a]).sum::<usize>()
        })
    }
}

/// The elements of an input.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    Floats(&'a [f32]),
    Numbers(&'a [u32]),
    Bools(&'a [bool]),
}

/// The contents of a buffer before a run.
#[derive(Clone, Debug)]
pub struct Image {
    pub dtype: DType,
    pub bytes: Vec<u8>,
}

impl Image {
    /// Makes `len` elements that must not reach a result: NaN, true, or the largest length.
    fn poisoned(dtype: DType, len: usize, output: bool) -> Self {
        let element: Vec<u8> = match (dtype, output) {
            (DType::F32, true) => OUTPUT_F32.to_le_bytes().to_vec(),
            (DType::F32, false) => INPUT_F32.to_le_bytes().to_vec(),
            (DType::F16, true) => OUTPUT_F16.to_le_bytes().to_vec(),
            (DType::F16, false) => INPUT_F16.to_le_bytes().to_vec(),
            (DType::BF16, true) => OUTPUT_BF16.to_le_bytes().to_vec(),
            (DType::BF16, false) => INPUT_BF16.to_le_bytes().to_vec(),
            (DType::U32, true) => OUTPUT_U32.to_le_bytes().to_vec(),
            (DType::U32, false) => u32::MAX.to_le_bytes().to_vec(),
            (DType::Bool, _) => vec![0xa5],
            _ => unreachable!("{dtype:?} is new"),
        };
        let mut bytes = element.repeat(len);
        bytes.resize(bytes.len().next_multiple_of(4), 0x5a);
        Image { dtype, bytes }
    }

    /// Makes an output before the run.
    pub fn output(dtype: DType, place: &Place) -> Self {
        Self::poisoned(dtype, place.len, true)
    }

    /// Makes an input at `place`, with poison everywhere else.
    pub fn input(values: Values, dtype: DType, place: &Place) -> Self {
        Self::inputs(&[(values, *place)], dtype)
    }

    /// Makes several inputs in one buffer.
    pub fn inputs(parts: &[(Values, Place)], dtype: DType) -> Self {
        let len = parts.iter().map(|(_, place)| place.len).max().unwrap_or(0);
        let mut image = Self::poisoned(dtype, len, false);
        for (values, place) in parts {
            image.write(*values, place);
        }
        image
    }

    /// Puts `values` at `place`.
    pub fn write(&mut self, values: Values, place: &Place) {
        let size = self.dtype.bytes();
        let mut put = |n: usize, element: &[u8]| self.bytes[n * size..][..size].copy_from_slice(element);
        let count = match values {
            Values::Floats(x) => {
                for (x, n) in x.iter().zip(place.indices()) {
                    match self.dtype {
                        DType::F16 => put(n, &f16::from_f32(*x).to_le_bytes()),
                        DType::BF16 => put(n, &bf16::from_f32(*x).to_le_bytes()),
                        _ => put(n, &x.to_le_bytes()),
                    }
                }
                x.len()
            }
            Values::Numbers(x) => {
                x.iter().zip(place.indices()).for_each(|(x, n)| put(n, &x.to_le_bytes()));
                x.len()
            }
            Values::Bools(x) => {
                // Any byte except 0 is true.
                x.iter().zip(place.indices()).for_each(|(x, n)| put(n, &[if *x { 1 << (n % 8) } else { 0 }]));
                x.len()
            }
        };
        assert_eq!(count, place.shape.iter().product::<usize>(), "the case's data does not fit its shape");
    }

    pub fn upload(&self, gpu: &Gpu) -> wgpu::Buffer {
        gpu.upload(&self.bytes).expect("an upload")
    }

    /// Returns a view of `buffer` at `place`.
    pub fn view<'a>(&self, buffer: &'a wgpu::Buffer, place: &Place) -> TensorView<'a> {
        TensorView::new(buffer, self.dtype, place.shape).with_strides(place.strides).with_offset(place.offset)
    }

    /// Reads an output back; `self` is what the buffer held before the run.
    pub async fn download_async(
        &self,
        gpu: &Gpu,
        buffer: &wgpu::Buffer,
        place: &Place,
    ) -> Result<Vec<f64>, String> {
        let after = gpu.download_async::<u8>(buffer, self.bytes.len()).await.map_err(|e| e.to_string())?;
        self.collect(&after, place)
    }

    /// Returns the elements at `place` of an output after the run. Every element must have been
    /// written, and everything else must be unchanged.
    pub fn collect(&self, after: &[u8], place: &Place) -> Result<Vec<f64>, String> {
        if after.len() != self.bytes.len() {
            return Err(format!("{} bytes came back of {}", after.len(), self.bytes.len()));
        }
        let size = self.dtype.bytes();
        let mut inside = vec![false; after.len()];
        let mut values = Vec::new();
        for (logical, n) in place.indices().enumerate() {
            inside[n * size..][..size].fill(true);
            let (value, poison) = match self.dtype {
                DType::F16 => {
                    let bits = u16::from_le_bytes([after[n * 2], after[n * 2 + 1]]);
                    (f16::from_bits(bits).to_f64(), bits == OUTPUT_F16)
                }
                DType::BF16 => {
                    let bits = u16::from_le_bytes([after[n * 2], after[n * 2 + 1]]);
                    (bf16::from_bits(bits).to_f64(), bits == OUTPUT_BF16)
                }
                DType::U32 => {
                    let number = u32::from_le_bytes(std::array::from_fn(|c| after[n * 4 + c]));
                    (f64::from(number), number == OUTPUT_U32)
                }
                _ => {
                    let bits = u32::from_le_bytes(std::array::from_fn(|c| after[n * 4 + c]));
                    (f64::from(f32::from_bits(bits)), bits == OUTPUT_F32)
                }
            };
            if poison {
                return Err(format!("element {logical} was never written"));
            }
            values.push(value);
        }
        let touched = (0..after.len()).find(|n| !inside[*n] && after[*n] != self.bytes[*n]);
        match touched {
            Some(n) => Err(format!("element {} outside of the window was written", n / size)),
            None => Ok(values),
        }
    }
}

/// Returns the largest relative error of a stored number.
pub fn stored_error(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => 0.0,
    }
}

/// Returns the nearest values of `dtype`.
pub fn stored(x: &[f32], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F16 => x.iter().map(|x| f16::from_f32(*x).to_f32()).collect(),
        DType::BF16 => x.iter().map(|x| bf16::from_f32(*x).to_f32()).collect(),
        _ => x.to_vec(),
    }
}
