//! Tensors of a file into buffers of a device, a piece at a time.

use wgpu_attention::{DType, Gpu, TensorView};

use crate::error::Error;
use crate::storage::Storage;
use crate::tensor::TensorData;

/// Elements of a piece: a multiple of every block, and 32 MiB of f32. While a piece is copied,
/// nothing larger lies in memory.
const PIECE: usize = 8 << 20;

/// A dense tensor in a buffer of its own, little-endian as in the file.
#[derive(Clone, Debug)]
pub struct DeviceTensor {
    /// The buffer, a storage buffer of a multiple of 4 bytes that can be copied from and to.
    pub buffer: wgpu::Buffer,
    /// How its elements are stored.
    pub storage: Storage,
    /// Its dimensions, the outermost first.
    pub shape: Vec<usize>,
    name: String,
}

impl DeviceTensor {
    /// What operators take: dimensions that a tensor of four lacks are 1 and come first.
    ///
    /// # Errors
    /// [`Error::Type`] for types that operators do not read (blocks of Q8_0, Q4_0 and Q4_1), [`Error::Shape`] for more than four
    /// dimensions.
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

/// Copies a tensor into a buffer as it is stored.
///
/// # Errors
/// [`Error::TooLarge`] before anything is made; [`Error::Shape`] for a tensor without elements; [`Error::Device`].
pub fn upload(gpu: &Gpu, tensor: &TensorData) -> Result<DeviceTensor, Error> {
    write(gpu, tensor, tensor.storage(), |piece, padded| {
        padded.clear();
        padded.extend(piece.bytes());
    })
}

/// Copies a tensor into a buffer as f32, dequantised where it is quantised.
///
/// # Errors
/// As [`upload`].
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
        // Only the last can need it: pieces are multiples of 4 bytes.
        piece.resize(piece.len().next_multiple_of(4), 0);
        gpu.queue().write_buffer(&buffer, at, &piece);
        at += piece.len() as u64;
        if at < bytes as u64 {
            // What is written waits in memory of its own until the device has copied it.
            let sent = gpu.queue().submit([]);
            let _ = gpu.device().poll(wgpu::PollType::Wait { submission_index: Some(sent), timeout: None });
        }
    }
    Ok(DeviceTensor { buffer, storage, shape: tensor.shape().to_vec(), name: name() })
}
