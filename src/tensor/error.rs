//! The errors of calls. Each message says what is wrong and what to do.

use super::DType;
use crate::device::Family;

/// The reason why a call was refused. Every check runs before anything is recorded. After an `Err`
/// the encoder is unchanged, and later calls are unaffected. `Debug` prints the same sentence as
/// `Display`: a `main` that returns an error then prints the advice.
#[non_exhaustive]
#[derive(thiserror::Error)]
pub enum Error {
    /// A dimension is zero. WebGPU cannot bind 0 bytes, and no operator accepts such a tensor: skip
    /// the call.
    ///
    /// PyTorch accepts it with these results. Outputs of an empty batch or length are empty.
    /// Attention to no keys returns 0, log-sum-exp −∞ and gradients of 0. Gradients of shared
    /// tensors, such as weights, are 0 for an empty batch. To get the same result, clear the
    /// buffers of these gradients, unless the call accumulates into them.
    #[error(
        "`{tensor}`: {axis} is 0, but every dimension must be at least 1; skip calls with an empty batch or length"
    )]
    ZeroSize {
        /// The tensor or option at fault.
        tensor: &'static str,
        /// The name of the dimension.
        axis: &'static str,
    },
    /// A slice of a tensor takes elements past the end of its axis.
    #[error(
        "`{tensor}`: `slice({axis}, {start}, {length})` ends past axis {axis} ({name}), which has {size} elements; \
         `start + length` may be at most {size}"
    )]
    Slice {
        /// The tensor at fault.
        tensor: &'static str,
        /// The axis of the slice, counted from 0.
        axis: usize,
        /// The name of that axis.
        name: &'static str,
        /// First index of the slice.
        start: usize,
        /// Indices of the slice.
        length: usize,
        /// Indices of the axis.
        size: usize,
    },
    /// A view was made with an axis that no tensor has.
    #[error("`{tensor}`: `{method}` got axis {axis}, but a tensor has only the axes 0 to 3")]
    Axis {
        /// The tensor at fault.
        tensor: &'static str,
        /// The method of the view.
        method: &'static str,
        /// The axis that was passed.
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
        /// The name of the dimension.
        axis: &'static str,
        /// The size that the call needs.
        expected: String,
        /// The size that the tensor has.
        got: usize,
        /// The shape of the tensor.
        shape: [usize; 4],
        /// The expected shape, with the names of its axes. Only present if the shape of a mask's
        /// tensor is wrong.
        wanted: Option<String>,
    },
    /// `heads` must be a multiple of `kv_heads`, and a width a multiple of the heads it is split
    /// into.
    #[error("{} is {value}; it must be a multiple of {divisor} ({})", code(what), code(by))]
    NotDivisible {
        /// The name of the dividend.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The name of the divisor.
        by: &'static str,
        /// The divisor's value.
        divisor: usize,
    },
    /// Two indices of a written tensor address the same element.
    #[error(
        "`{tensor}`: strides {strides:?} with shape {shape:?} let two elements share memory; \
         a written tensor needs a separate address for each element"
    )]
    Overlap {
        /// The tensor at fault.
        tensor: &'static str,
        /// Its shape.
        shape: [usize; 4],
        /// Its strides, in elements.
        strides: [usize; 4],
    },
    /// An element index does not fit in 32 bits, the size of an index in a kernel.
    #[error(
        "`{tensor}`: offset {offset} with strides {strides:?} and shape {shape:?} reaches past \
         2^32 elements, but kernel indices have 32 bits; use a smaller view or a smaller offset"
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
        "`{tensor}`: the view ends at byte {end} (rounded up to 4), but its buffer has {size} bytes; \
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
    /// A tensor that is written shares memory with another tensor of the same call.
    #[error(
        "`{tensor}` is written and shares its buffer with `{other}`, but their bindings overlap, which WebGPU \
         forbids; use a separate buffer for `{tensor}`, or begin it at a multiple of {alignment} bytes apart from `{other}`"
    )]
    Alias {
        /// The tensor that is written.
        tensor: &'static str,
        /// The tensor that it meets.
        other: &'static str,
        /// The bytes to which the device aligns a binding (`min_storage_buffer_offset_alignment`).
        alignment: u64,
    },
    /// Two tensors overlap in a buffer that one dispatch reads and writes. Inputs that overlap
    /// share a binding, unless the kernel reads one as vectors and the other by elements.
    #[error(
        "`{tensor}` and `{other}` of the kernel {kernel} overlap in a buffer that the call reads and writes, which \
         WebGPU forbids; use a separate buffer for the output"
    )]
    SharedOverlap {
        /// The label of the kernel.
        kernel: &'static str,
        /// One of the tensors, by its name in the kernel.
        tensor: String,
        /// The other tensor.
        other: String,
    },
    /// Two written tensors overlap in memory.
    #[error(
        "`{tensor}` and `{other}` are both written, but their memory ranges overlap (interleaved elements and \
         binding alignment count); use a separate range for each"
    )]
    OutputsOverlap {
        /// The first tensor.
        tensor: &'static str,
        /// The second tensor.
        other: &'static str,
    },
    /// A buffer was created without a usage that the call needs.
    #[error("`{tensor}`: its buffer lacks the usage `{missing:?}`; add it in `create_buffer`")]
    Usage {
        /// The tensor at fault.
        tensor: &'static str,
        /// The missing usage.
        missing: wgpu::BufferUsages,
    },
    /// The element type of a tensor is not the type that the call needs.
    #[error("`{tensor}`: dtype must be {expected}, got {got:?}")]
    Type {
        /// The tensor at fault.
        tensor: &'static str,
        /// The types that the call accepts.
        expected: String,
        /// The type of the tensor.
        got: DType,
    },
    /// A tensor is larger than the device can bind.
    #[error(
        "`{tensor}` needs a binding of {bytes} bytes, but the device allows {limit} \
         (`max_storage_buffer_binding_size`); request a higher limit or split the call"
    )]
    BindingLimit {
        /// The tensor at fault.
        tensor: &'static str,
        /// Bytes to bind.
        bytes: u64,
        /// The limit of the device.
        limit: u64,
    },
    /// The keys or the values of one layer of a cache are larger than the device can bind.
    #[error(
        "the {side} of a cache layer need a binding of {bytes} bytes, but the device allows {limit} \
         (`max_storage_buffer_binding_size`); request a higher limit, use a smaller storage, or create one cache \
         per group of heads (`CacheConfig::split_by_heads`)"
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
    #[error(
        "the call needs {needed} {what}, but {} is {limit}; raise the limit or make the call smaller",
        code(name)
    )]
    Limit {
        /// The name of the quantity.
        what: &'static str,
        /// The value that the call needs.
        needed: u64,
        /// The limit of the device.
        limit: u64,
        /// The limit's name in `wgpu::Limits`.
        name: &'static str,
    },
    /// A number among the options is out of its range.
    #[error("{} is {value}; it must be {expected}", code(option))]
    Option {
        /// The name of the option.
        option: &'static str,
        /// The value that was passed.
        value: f64,
        /// The accepted range.
        expected: &'static str,
    },
    /// An option that this call cannot honour.
    #[error("{}: {why}", code(what))]
    Unsupported {
        /// The name of the option or of the call.
        what: &'static str,
        /// The reason, and what to do.
        why: &'static str,
    },
    /// A user-defined score function or mask function is invalid.
    #[error("`{function}`: {message}")]
    Mod {
        /// `score_mod` or `mask_mod`.
        function: &'static str,
        /// The error, with line and column if it is in the text of the function.
        message: String,
    },
    /// The kernels that this call needs are disabled on this device, and no other kernel replaces
    /// them.
    #[error("{family}: these kernels are disabled on this device; `Pipelines::report` gives the reason")]
    Disabled {
        /// The family of the disabled kernels.
        family: Family,
    },
    /// The scratch memory is smaller than the call needs.
    #[error(
        "the `{slot}` part of the scratch has {got} bytes, but the call needs {needed}; create it with \
         `Scratch::new(device, operator.scratch_size(&call)?)`"
    )]
    ScratchTooSmall {
        /// The name of the part.
        slot: &'static str,
        /// Bytes that the call needs in this part.
        needed: u64,
        /// Bytes of this part.
        got: u64,
    },
    /// A sequence of a cache has no room for the rows.
    #[error(
        "sequence {sequence} of the cache has {len} of at most {capacity} tokens, so {rows} more do not fit; \
         truncate it, or use a ring or a larger capacity"
    )]
    CacheFull {
        /// The index of the sequence.
        sequence: usize,
        /// A lower bound of the sequence's length, in tokens.
        len: usize,
        /// Tokens that the call appends.
        rows: usize,
        /// The largest length of the sequence, in tokens.
        capacity: usize,
    },
    /// A paged cache has too few free pages.
    #[error(
        "the call needs {needed} pages, but the cache has {free} free; clear or truncate sequences, or use more pages"
    )]
    OutOfPages {
        /// Pages needed.
        needed: usize,
        /// Pages free.
        free: usize,
    },
    /// A mask or a rotation of one layer of a stack is invalid. Only returned if each layer has a
    /// separate one.
    #[error("`layer_calls[{layer}]`: {error}")]
    Layer {
        /// The index of the layer, counted from 0.
        layer: usize,
        /// The error of this layer's mask or rotation.
        error: Box<Error>,
    },
    /// The length of a slice does not match its shape.
    #[error("`{tensor}`: {expected} elements expected, got {got}")]
    Length {
        /// The slice at fault.
        tensor: &'static str,
        /// The number of elements of the shape.
        expected: usize,
        /// Its length.
        got: usize,
    },
    /// A tensor lies in a buffer that another device made. In browsers wgpu reports it to the
    /// application's error handler. wgpu does not detect buffers of another `wgpu::Instance`.
    #[error(
        "`{tensor}` of the kernel {kernel} lies in a buffer of another device; create the buffer on the device \
         of the operator's `Pipelines`"
    )]
    OtherDevice {
        /// The label of the kernel.
        kernel: &'static str,
        /// The tensor, by its name in the kernel.
        tensor: String,
    },
    /// wgpu refused a resource of this call. An example is a buffer that was destroyed.
    #[error("wgpu refused {what}: {description}")]
    Refused {
        /// The name of the resource.
        what: &'static str,
        /// The message of wgpu.
        description: String,
    },
    /// The device has no memory left for a buffer of this call.
    #[error("out of device memory for {what}: {description}")]
    OutOfMemory {
        /// The name of the resource.
        what: &'static str,
        /// The message of wgpu.
        description: String,
    },
    /// No adapter is usable.
    #[error(
        "no usable GPU adapter: {0}; install a Vulkan driver (Mesa's lavapipe runs on any CPU) or \
         pass your own device to `Gpu::with_device`"
    )]
    NoAdapter(String),
    /// The device is lost, or a result could not be read back from it. A call that creates no
    /// resource, such as a repeated one, may still return `Ok`, as wgpu's commands do.
    #[error("the device is lost or did not answer: {0}; create a new device and new buffers")]
    DeviceLost(String),
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Returns advice if the axes of heads and length are swapped.
fn swapped_axes(axis: &str, expected: &str, shape: &[usize; 4]) -> &'static str {
    if axis == "heads" && shape[2].to_string() == expected {
        "; for a tensor `[batch, length, heads, dim]` make the view with `TensorView::blhd`"
    } else {
        ""
    }
}

/// Returns `name` in backquotes if it is the name of a parameter, option or limit.
fn code(name: &str) -> std::borrow::Cow<'_, str> {
    let is_name = name.chars().all(|c| c.is_ascii_alphanumeric() || "_.:".contains(c));
    if is_name { format!("`{name}`").into() } else { name.into() }
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
