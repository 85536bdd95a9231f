//! The errors of calls.

use burn::tensor::wgpu::WgpuInitError;

/// The reason why a call was refused. A refused call computes nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library refused the call: a shape, a dtype, an option, a limit of the device.
    #[error(transparent)]
    Attention(#[from] wgpu_attention::Error),
    /// Burn's device is unknown to this crate.
    #[error(
        "`{tensor}` is on {device}, which this crate does not know; create the device with `wgpu_attention_burn::init`, \
         or pass it and its `WgpuSetup` to `wgpu_attention_burn::share`"
    )]
    UnknownDevice {
        /// The tensor at fault.
        tensor: &'static str,
        /// Its device.
        device: String,
    },
    /// Two tensors of a call are on different devices.
    #[error("`{tensor}` is on {device}, but the call's first tensor is on {first}; move it with `to_device`")]
    Devices {
        /// The tensor at fault.
        tensor: &'static str,
        /// Its device.
        device: String,
        /// The device of the first tensor.
        first: String,
    },
    /// The tensor is on a backend other than wgpu, or its elements are quantized.
    #[error("`{tensor}` is {found}; this crate takes float, int and bool tensors of Burn's wgpu backend")]
    Backend {
        /// The tensor at fault.
        tensor: &'static str,
        /// The kind of the tensor.
        found: String,
    },
    /// The tensor's element type has no equivalent in the library.
    #[error("`{tensor}`: the library does not store {dtype}; cast it to {accepted}")]
    DType {
        /// The tensor at fault.
        tensor: &'static str,
        /// Its element type.
        dtype: &'static str,
        /// The types that this tensor may have.
        accepted: &'static str,
    },
    /// Two tensors of a call have different strategies of gradient checkpointing.
    #[error("`{tensor}` has another strategy of gradient checkpointing than the call's first tensor")]
    Checkpointing {
        /// The tensor at fault.
        tensor: &'static str,
    },
    /// An option of Burn that the module cannot honour.
    #[error("{what}: {why}")]
    Unsupported {
        /// The option.
        what: &'static str,
        /// The reason, and what to do.
        why: &'static str,
    },
    /// Burn could not create the device.
    #[error("Burn could not create the device: {0}")]
    Init(#[from] WgpuInitError),
    /// Burn's runtime reported an error, for example a lost device.
    #[error("Burn's runtime: {0}")]
    Runtime(String),
}

/// The result of a call.
pub type Result<T> = std::result::Result<T, Error>;
