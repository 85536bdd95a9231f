//! Attention of [`wgpu_attention`] for tensors of Burn, on Burn's device, without copies.
//!
//! ```no_run
//! use burn::tensor::{Device, Distribution, Tensor};
//!
//! // One line more than `Device::wgpu(..)`: Burn and the library share the device.
//! let device = wgpu_attention_burn::init(Device::wgpu_options())?;
//! let [q, k, v] = [(); 3].map(|()| Tensor::<4>::random([1, 8, 1024, 64], Distribution::Default, &device));
//! let out = wgpu_attention_burn::attention(q, k, v, None, None, Default::default())?;
//! # Ok::<(), wgpu_attention_burn::Error>(())
//! ```
//!
//! | you want | use |
//! |---|---|
//! | Burn's `attention`, with the same arguments | [`attention()`] |
//! | every mask and option, functions of scores | [`Attend`] |
//! | generation, token by token | [`Cache`] and [`Attend::step`] |
//! | a layer that loads the record of Burn's | [`MultiHeadAttention`] |
//! | linear attention | [`LinearAttend`] |
//!
//! # Order and memory
//!
//! Each call first submits what Burn has queued for its tensors, then submits its kernels to the
//! same queue. Burn's later work follows in that queue. Results are tensors of Burn's memory pool.

mod attention;
mod cache;
mod device;
mod error;
mod graph;
mod layer;
mod linear_attention;
mod mask;
mod primitive;
mod tensor;

pub use attention::{Attend, CapturedTensor, Mask, attention};
pub use cache::Cache;
#[cfg(not(target_family = "wasm"))]
pub use device::init;
pub use device::{init_async, pipelines, share};
pub use error::{Error, Result};
pub use layer::{MhaInput, MultiHeadAttention};
pub use linear_attention::LinearAttend;
pub use wgpu_attention;
