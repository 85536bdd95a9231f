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
use crate::plan::{self, Path, Tuning};
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

/// The path that computes a problem, and what it needs.
#[derive(Clone, Copy)]
pub(crate) enum Chosen {
    Fused(plan::FusedPlan),
    Staged(ScratchSize),
}

impl Chosen {
    /// The temporary memory it takes.
    pub fn scratch_size(&self) -> ScratchSize {
        match self {
            Chosen::Fused(_) => ScratchSize::default(),
            Chosen::Staged(size) => *size,
        }
    }
}

/// Chooses the path of `problem`.
pub(crate) fn choose(problem: &Problem, device: &DeviceFacts) -> Result<Chosen, Error> {
    let Problem { shape, weights, tuning, .. } = problem;
    let fused = match tuning.path {
        Path::Fused if weights.is_some() => {
            let why = "only the staged path has them in memory; leave the path to Auto";
            return Err(Error::Unsupported { what: "attention weights on the fused path", why });
        }
        Path::Fused => true,
        Path::Auto => weights.is_none() && fused::bindings(problem) <= device.max_storage_buffers as usize,
        Path::Staged => false,
    };
    if fused {
        Ok(Chosen::Fused(plan::fused(shape, tuning, device)?))
    } else {
        Ok(Chosen::Staged(staged::scratch_size(shape, weights.as_ref(), device)?))
    }
}

/// The dispatches of `problem`. `matrix` is the scratch's score buffer, if it has one.
pub(crate) fn calls<'a>(
    problem: &Problem<'a>,
    chosen: Chosen,
    matrix: Option<&'a wgpu::Buffer>,
    device: &DeviceFacts,
) -> Calls<'a> {
    match chosen {
        Chosen::Fused(plan) => fused::calls(problem, &plan, device),
        Chosen::Staged(_) => staged::calls(problem, matrix, device),
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
