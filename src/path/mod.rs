//! Sequences of kernels: from checked tensors to calls.

pub(crate) mod classify;
pub(crate) mod fused;
pub(crate) mod project;
pub(crate) mod staged;

use crate::dropout::Dropout;
use crate::error::Error;
use crate::kernel::Call;
use crate::kernels::Stage;
use crate::mask::DeviceMask;
use crate::plan::{Path, Tuning};
use crate::problem::Shape;
use crate::scratch::ScratchSize;
use crate::tensor::{DType, DeviceFacts, Layout, TensorView, dense_strides};

pub(crate) type Calls<'a> = Vec<Call<'a, Stage>>;

/// A checked attention problem.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a> {
    pub shape: Shape,
    pub q: TensorView<'a>,
    pub k: TensorView<'a>,
    pub v: TensorView<'a>,
    pub out: TensorView<'a>,
    pub mask: DeviceMask<'a>,
    /// How many of the last keys stand outside of the mask.
    pub appended: usize,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub lse: Option<TensorView<'a>>,
    pub weights: Option<TensorView<'a>>,
    pub dropout: Option<Dropout<TensorView<'a>>>,
    pub tuning: Tuning,
}

impl Problem<'_> {
    /// The path that computes this.
    fn path(&self, device: &DeviceFacts) -> Result<Path, Error> {
        match self.tuning.path {
            Path::Fused if self.weights.is_some() => {
                let why = "only the staged path has them in memory; leave the path to Auto";
                Err(Error::Unsupported { what: "attention weights on the fused path", why })
            }
            Path::Auto => {
                let fits = fused::bindings(self) <= device.max_storage_buffers as usize;
                Ok(if self.weights.is_none() && fits { Path::Fused } else { Path::Staged })
            }
            path => Ok(path),
        }
    }

    /// The temporary memory it needs.
    pub fn scratch_size(&self, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        match self.path(device)? {
            Path::Fused => fused::check(self, device).map(|()| ScratchSize::default()),
            _ => staged::scratch_size(&self.shape, self.weights.as_ref(), device),
        }
    }
}

/// The dispatches of `problem`. `matrix` is the scratch's score buffer, if it has one.
pub(crate) fn calls<'a>(
    problem: &Problem<'a>,
    matrix: Option<&'a wgpu::Buffer>,
    device: &DeviceFacts,
) -> Result<Calls<'a>, Error> {
    match problem.path(device)? {
        Path::Fused => fused::calls(problem, device),
        _ => Ok(staged::calls(problem, matrix, device)),
    }
}

/// Workgroup counts as wgpu takes them; what does not fit is beyond every device's limit.
pub(crate) fn grid(counts: [usize; 3]) -> [u32; 3] {
    counts.map(|n| u32::try_from(n).unwrap_or(u32::MAX))
}

/// A dense tensor in a scratch buffer, from element `offset` on.
pub(crate) fn in_scratch(
    buffer: &wgpu::Buffer,
    dtype: DType,
    shape: [usize; 4],
    offset: usize,
) -> TensorView<'_> {
    TensorView { buffer, dtype, layout: Layout { shape, strides: dense_strides(shape), offset } }
}
