//! Everything that can be refused, each with what was wrong and what to do about it.

use super::DType;
use crate::device::Family;

/// Why a call was refused. Every check runs before anything is recorded: after an `Err` the
/// encoder is as it was and later calls are unaffected. `Debug` prints the same sentence as
/// `Display`, so that a `main` that returns an error says what to do.
#[non_exhaustive]
#[derive(thiserror::Error)]
pub enum Error {
    /// A dimension is zero. WebGPU binds no 0 bytes, and no operator takes such a tensor: skip the
    /// call. Where PyTorch takes it, outputs of an empty batch or length are empty; attention to no
    /// keys gives 0, log-sum-exp −∞ and gradients of 0; gradients of what an empty batch shares, as
    /// weights, are 0: clear their buffers, unless they are added to.
    #[error(
        "`{tensor}`: {axis} is 0; every dimension must be at least 1; skip a call of an empty batch or length"
    )]
    ZeroSize {
        /// The tensor or option at fault.
        tensor: &'static str,
        /// Which dimension.
        axis: &'static str,
    },
    /// A slice of a tensor takes elements past the end of its axis.
    #[error(
        "`{tensor}`: slice({axis}, {start}, {length}) takes {length} elements from {start} on, axis {axis} ({name}) has \
         {size}; start and length together may be at most {size}"
    )]
    Slice {
        /// The tensor at fault.
        tensor: &'static str,
        /// Which axis was cut, counted from 0.
        axis: usize,
        /// The name of that axis.
        name: &'static str,
        /// First index of the slice.
        start: usize,
        /// Indices of the slice.
        length: usize,
        /// Indices that the axis had.
        size: usize,
    },
    /// A view was made with an axis that no tensor has.
    #[error("`{tensor}`: {method} of axis {axis}; a tensor has the axes 0 to 3")]
    Axis {
        /// The tensor at fault.
        tensor: &'static str,
        /// The method of the view.
        method: &'static str,
        /// The axis that came.
        axis: usize,
    },
    /// A tensor's shape differs from what the call needs.
    #[error(
        "`{tensor}`: {axis} must be {expected}, got {got} (shape {shape:?}{}){}",
        wanted_shape(wanted),
        swapped_axes(axis, expected, shape)
    )]
    Shape {
        /// The tensor at fault.
        tensor: &'static str,
        /// Which dimension.
        axis: &'static str,
        /// What the call needs there.
        expected: String,
        /// What the tensor has there.
        got: usize,
        /// The whole shape that came.
        shape: [usize; 4],
        /// The whole shape that was wanted, by the names of its axes, where a mask's tensor
        /// differs.
        wanted: Option<String>,
    },
    /// `heads` must be a multiple of `kv_heads`, and a width a multiple of the heads it is split
    /// into.
    #[error("{what} {value} is not divisible by {by} {divisor}")]
    NotDivisible {
        /// What should be divisible.
        what: &'static str,
        /// Its value.
        value: usize,
        /// What it is divided by.
        by: &'static str,
        /// The divisor's value.
        divisor: usize,
    },
    /// Two indices of a tensor that is written meet in one element.
    #[error(
        "`{tensor}`: strides {strides:?} with shape {shape:?} let two elements share memory; \
         a tensor that is written needs distinct elements"
    )]
    Overlap {
        /// The tensor at fault.
        tensor: &'static str,
        /// Its shape.
        shape: [usize; 4],
        /// Its strides, in elements.
        strides: [usize; 4],
    },
    /// An element index does not fit in the 32 bits the kernels address with.
    #[error(
        "`{tensor}`: offset {offset} with strides {strides:?} and shape {shape:?} reaches past \
         2^32 elements, which kernels cannot address; use a smaller window or an offset nearer to it"
    )]
    Overflow {
        /// The tensor at fault.
        tensor: &'static str,
        /// Its shape.
        shape: [usize; 4],
        /// Its strides, in elements.
        strides: [usize; 4],
        /// Its offset, in elements.
        offset: usize,
    },
    /// A view reaches past the end of its buffer.
    #[error(
        "`{tensor}`: the view ends at byte {end} (rounded up to 4), its buffer has {size}; \
         lower the offset or use a larger buffer"
    )]
    OutOfBounds {
        /// The tensor at fault.
        tensor: &'static str,
        /// First byte after the view.
        end: u64,
        /// Bytes in the buffer.
        size: u64,
    },
    /// A tensor that is written shares memory with a tensor that the same call reads.
    #[error(
        "`{tensor}` is written and its binding meets that of `{other}` in one buffer; WebGPU forbids reading and writing \
         a range in one dispatch: give `{tensor}` another buffer, or a range of the buffer that begins at a multiple of \
         {alignment} bytes, with `{other}` outside of it"
    )]
    Alias {
        /// The tensor that is written.
        tensor: &'static str,
        /// The tensor that it meets.
        other: &'static str,
        /// The bytes to which the device aligns a binding (`min_storage_buffer_offset_alignment`).
        alignment: u64,
    },
    /// Two inputs overlap in a buffer that the same call writes to. Their bindings are then
    /// writable and must be apart, unless the inputs are the same.
    #[error(
        "`{tensor}` and `{other}` overlap in the buffer that `{written}` is written to; WebGPU forbids it: \
         give `{written}` another buffer"
    )]
    InputsOverlap {
        /// One of the inputs.
        tensor: &'static str,
        /// The other input.
        other: &'static str,
        /// The tensor that is written.
        written: &'static str,
    },
    /// Two tensors that are written reach over the same bytes.
    #[error(
        "`{tensor}` and `{other}` are both written and their windows overlap, element by element, interleaved or \
         in the bytes before the device's binding alignment; give each a range of its own"
    )]
    OutputsOverlap {
        /// One of them.
        tensor: &'static str,
        /// The other.
        other: &'static str,
    },
    /// A buffer was created without a usage that the call needs.
    #[error("`{tensor}`: its buffer lacks usage {missing:?}; add it in `create_buffer`")]
    Usage {
        /// The tensor at fault.
        tensor: &'static str,
        /// What is missing.
        missing: wgpu::BufferUsages,
    },
    /// A tensor has another element type than the call needs.
    #[error("`{tensor}`: dtype must be {expected}, got {got:?}")]
    Type {
        /// The tensor at fault.
        tensor: &'static str,
        /// What the call needs.
        expected: String,
        /// What came.
        got: DType,
    },
    /// A tensor is larger than the device can bind.
    #[error(
        "`{tensor}` needs a binding of {bytes} bytes, the device allows {limit} \
         (max_storage_buffer_binding_size); request a higher limit or split the call"
    )]
    BindingLimit {
        /// The tensor at fault.
        tensor: &'static str,
        /// Bytes to bind.
        bytes: u64,
        /// What the device allows.
        limit: u64,
    },
    /// The keys or the values of one layer of a cache are larger than the device can bind.
    #[error(
        "the {side} of a layer of the cache need a binding of {bytes} bytes, the device allows {limit} \
         (max_storage_buffer_binding_size); request a higher limit, choose a smaller storage, or make one cache for each group of \
         heads (`CacheConfig::split_by_heads`)"
    )]
    CacheBindingLimit {
        /// `keys` or `values`.
        side: &'static str,
        /// Bytes to bind.
        bytes: u64,
        /// The largest binding of the device.
        limit: u64,
    },
    /// The call needs more of something than the device's limits allow.
    #[error("{what} is {needed}, the device allows {limit} ({name})")]
    Limit {
        /// What is too large.
        what: &'static str,
        /// How much the call needs.
        needed: u64,
        /// What the device allows.
        limit: u64,
        /// The limit's name in `wgpu::Limits`.
        name: &'static str,
    },
    /// A number among the options is out of its range.
    #[error("{option} is {value}, it must be {expected}")]
    Option {
        /// Which option.
        option: &'static str,
        /// What came.
        value: f64,
        /// What it must be.
        expected: &'static str,
    },
    /// An option that this call cannot honour.
    #[error("{what}: {why}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// Why not, and what to do.
        why: &'static str,
    },
    /// A score function or mask of the caller's own that is not taken.
    #[error("{function}: {message}")]
    Mod {
        /// `score_mod` or `mask_mod`.
        function: &'static str,
        /// What is wrong, with line and column of the text where it is the text.
        message: String,
    },
    /// The kernels that this call takes were put aside on this device, and nothing replaces them.
    #[error("{family}: put aside on this device; `Pipelines::report` says why")]
    PutAside {
        /// Which kernels.
        family: Family,
    },
    /// The scratch memory is smaller than the call needs.
    #[error(
        "scratch has {got} bytes in its {slot} part, the call needs {needed}; make it with \
         `Scratch::new(device, operator.scratch_size(&call)?)`"
    )]
    ScratchTooSmall {
        /// Which part.
        slot: &'static str,
        /// Bytes the call needs there.
        needed: u64,
        /// Bytes it has there.
        got: u64,
    },
    /// A sequence of a cache has no room for the rows.
    #[error(
        "sequence {sequence} of the cache has {len} tokens of at most {capacity}, no room for {rows} more; truncate it, \
         use a ring or a cache of larger capacity"
    )]
    CacheFull {
        /// Which sequence.
        sequence: usize,
        /// Tokens it has, at least.
        len: usize,
        /// Tokens that were to come.
        rows: usize,
        /// Tokens it can have.
        capacity: usize,
    },
    /// A paged cache has too few free pages.
    #[error(
        "the cache needs {needed} pages and has {free} free; clear or truncate sequences, or give it more pages"
    )]
    OutOfPages {
        /// Pages needed.
        needed: usize,
        /// Pages free.
        free: usize,
    },
    /// A mask or a rotation of one layer of a stack is refused, where each layer has its own.
    #[error("layer_calls[{layer}]: {error}")]
    Layer {
        /// Which layer, counted from 0.
        layer: usize,
        /// The error of its mask or rotation.
        error: Box<Error>,
    },
    /// A slice has another length than its shape says.
    #[error("`{tensor}`: {expected} elements expected, got {got}")]
    Length {
        /// The slice at fault.
        tensor: &'static str,
        /// What its shape says.
        expected: usize,
        /// Its length.
        got: usize,
    },
    /// wgpu refused a resource of this call: a buffer from another device of the same
    /// `wgpu::Instance`, say. Those of another instance it cannot tell from its own.
    #[error("wgpu refused {what}: {description}")]
    Refused {
        /// What was being made.
        what: &'static str,
        /// wgpu's own words.
        description: String,
    },
    /// The device has no memory left for a buffer of this call.
    #[error("out of device memory for {what}: {description}")]
    OutOfMemory {
        /// What was being made.
        what: &'static str,
        /// wgpu's own words.
        description: String,
    },
    /// No adapter to run on.
    #[error(
        "no usable GPU adapter: {0}; install a Vulkan driver (Mesa's lavapipe runs on any CPU) or \
         pass your own device"
    )]
    NoAdapter(String),
    /// The device is lost or a result could not be read back from it. A call that creates nothing,
    /// as one recorded again, may still be accepted, as wgpu's own commands are.
    #[error("the device is lost or did not answer: {0}; create a new device and new buffers")]
    DeviceLost(String),
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Advice where the heads stand in the place of the length.
fn swapped_axes(axis: &str, expected: &str, shape: &[usize; 4]) -> &'static str {
    if axis == "heads" && shape[2].to_string() == expected {
        "; of a tensor [batch, length, heads, dim] make the view with `TensorView::blhd`"
    } else {
        ""
    }
}

fn wanted_shape(wanted: &Option<String>) -> String {
    wanted.as_ref().map_or(String::new(), |wanted| format!("; expected {wanted}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_gives_the_advice() {
        let error = Error::BindingLimit { tensor: "k", bytes: 9, limit: 8 };
        assert_eq!(format!("{error:?}"), error.to_string());
        assert!(format!("{error:?}").contains("request a higher limit"));
    }

    #[test]
    fn heads_in_the_place_of_the_length() {
        let error = |shape: [usize; 4]| {
            let (expected, got) = ("8".to_owned(), shape[1]);
            Error::Shape { tensor: "q", axis: "heads", expected, got, shape, wanted: None }.to_string()
        };
        assert!(error([2, 5, 8, 64]).ends_with("make the view with `TensorView::blhd`"));
        assert!(error([2, 5, 7, 64]).ends_with("(shape [2, 5, 7, 64])"));
    }
}
