//! Copies tensors of a file into buffers of a device, a chunk at a time.

use wgpu_attention::{DType, Gpu, TensorView};

use crate::error::Error;
use crate::storage::Storage;
use crate::tensor::TensorData;

/// Elements of a chunk: a multiple of every block size, and 32 MiB of f32. Host memory holds no
/// more than one chunk at a time.
const PIECE: usize = 8 << 20;

/// A dense tensor in a separate buffer, little-endian as in the file.
#[derive(Clone, Debug)]
pub struct DeviceTensor {
    /// A storage buffer of a multiple of 4 bytes that can be copied from and to.
    pub buffer: wgpu::Buffer,
    /// The number format of the elements.
    pub storage: Storage,
    /// The dimensions, the outermost first.
    pub shape: Vec<usize>,
    name: String,
}

impl DeviceTensor {
    /// The four-dimensional view that operators take as an argument. Missing outer dimensions
    /// are 1.
    ///
    /// # Errors
    /// [`Error::Type`] for types that operators do not read (blocks of Q8_0, Q4_0 and Q4_1),
    /// [`Error::Shape`] for more than four dimensions.
    pub fn view(&self) -> Result<TensorView<'_>, Error> {
        let dtype = match self.storage {
            Storage::F32 => DType::F32,
            Storage::F16 => DType::F16,
            Storage::BF16 => DType::BF16,
            got => {
                return Err(Error::Type {
                    name: self.name.clone(),
                    got,
                    needed_for: "an operator",
                    expected: "F32, F16 or BF16 (`upload_f32` converts to F32)",
                });
            }
        };
        let mut shape = [1; 4];
        let places = 4usize.checked_sub(self.shape.len()).and_then(|first| shape.get_mut(first..));
        let places = places.ok_or_else(|| Error::Shape {
            name: self.name.clone(),
            got: self.shape.clone(),
            expected: "at most four dimensions".into(),
        })?;
        places.copy_from_slice(&self.shape);
        Ok(TensorView::new(&self.buffer, dtype, shape))
    }
}

/// Copies a tensor into a buffer as stored.
///
/// # Errors
/// [`Error::TooLarge`], before a buffer is created; [`Error::Shape`] for a tensor without
/// elements; [`Error::Device`].
pub fn upload(gpu: &Gpu, tensor: &TensorData) -> Result<DeviceTensor, Error> {
    write(gpu, tensor, tensor.storage(), |piece, padded| {
        padded.clear();
        padded.extend(piece.bytes());
    })
}

/// Copies a tensor into a buffer as f32, and dequantises quantised types.
///
/// # Errors
/// The same as [`upload`].
pub fn upload_f32(gpu: &Gpu, tensor: &TensorData) -> Result<DeviceTensor, Error> {
    if tensor.storage() == Storage::F32 {
        return upload(gpu, tensor);
    }
    write(gpu, tensor, Storage::F32, |piece, padded| {
        padded.clear();
        padded.extend(piece.to_f32().into_iter().flat_map(f32::to_le_bytes));
    })
}

fn write(
    gpu: &Gpu,
    tensor: &TensorData,
    storage: Storage,
    bytes_of: impl Fn(&TensorData, &mut Vec<u8>),
) -> Result<DeviceTensor, Error> {
    let name = || tensor.name().to_owned();
    let bytes = storage.bytes(tensor.shape()).and_then(|bytes| bytes.checked_next_multiple_of(4));
    let limits = gpu.device().limits();
    for (limit, limit_name) in [
        (limits.max_buffer_size, "max_buffer_size"),
        (limits.max_storage_buffer_binding_size, "max_storage_buffer_binding_size"),
    ] {
        let bytes = bytes.map_or(u64::MAX, |bytes| bytes as u64);
        if bytes > limit {
            return Err(Error::TooLarge { name: name(), bytes, limit, limit_name });
        }
    }
    let Some(bytes) = bytes.filter(|bytes| *bytes > 0) else {
        return Err(tensor.wrong_shape("no dimension of 0".into()));
    };
    let buffer = gpu.buffer(bytes)?;
    let mut piece = Vec::new();
    let mut at = 0;
    for part in tensor.pieces(PIECE) {
        bytes_of(&part, &mut piece);
        // Only the last chunk can need padding: all others are multiples of 4 bytes.
        piece.resize(piece.len().next_multiple_of(4), 0);
        gpu.queue().write_buffer(&buffer, at, &piece);
        at += piece.len() as u64;
        if at < bytes as u64 {
            // Wait for the device: written data occupies staging memory until the device copies it.
            let sent = gpu.queue().submit([]);
            let _ = gpu.device().poll(wgpu::PollType::Wait { submission_index: Some(sent), timeout: None });
        }
    }
    Ok(DeviceTensor { buffer, storage, shape: tensor.shape().to_vec(), name: name() })
}
