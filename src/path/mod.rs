//! Sequences of kernels: from checked tensors to calls.

pub(crate) mod cache;
pub(crate) mod classify;
pub(crate) mod fused;
pub(crate) mod project;
pub(crate) mod staged;

use crate::device::DeviceFacts;
use crate::dropout::Dropout;
use crate::error::Error;
use crate::kernel::Dispatch;
use crate::kernels::KernelVariant;
use crate::kernels::cache::StorageKind;
use crate::mask::DeviceMask;
use crate::plan::{self, MatrixUnits, Path, Tuning};
use crate::problem::Shape;
use crate::scratch::{Scratch, ScratchSize, Slot};
use crate::tensor::{DType, Layout, TensorView, dense_strides};
use cache::CacheLayer;

pub(crate) type Dispatches<'a> = Vec<Dispatch<'a, KernelVariant>>;

/// Where keys and values are.
// One lives for as long as a call is recorded: a box would be an allocation for nothing.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy)]
pub(crate) enum Keys<'a> {
    Tensors { k: TensorView<'a>, v: TensorView<'a> },
    Cache(CacheLayer<'a>),
}

impl<'a> Keys<'a> {
    /// How they are stored.
    fn storage_kind(&self) -> StorageKind {
        match self {
            Keys::Tensors { k, .. } if k.dtype == DType::F16 => StorageKind::F16,
            Keys::Tensors { .. } => StorageKind::F32,
            Keys::Cache(layer) => layer.cached.storage,
        }
    }

    /// Whether kernels can load them as vectors of words that hold several channels each.
    fn in_words(&self) -> bool {
        match self {
            Keys::Tensors { k, v } => {
                [k, v].iter().all(|t| t.dtype == DType::F16 && t.layout.in_groups(3, 8))
            }
            Keys::Cache(_) => true,
        }
    }

    fn cache(&self) -> Option<&CacheLayer<'a>> {
        match self {
            Keys::Tensors { .. } => None,
            Keys::Cache(layer) => Some(layer),
        }
    }
}

/// A checked attention problem.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a> {
    pub shape: Shape,
    pub q: TensorView<'a>,
    pub keys: Keys<'a>,
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
    /// F16 if all that is multiplied is.
    fn operands(&self) -> DType {
        let halves = self.q.dtype == DType::F16 && self.keys.storage_kind() == StorageKind::F16;
        if halves { DType::F16 } else { DType::F32 }
    }
}

/// The path that computes a problem, and what it needs.
#[derive(Clone, Copy)]
pub(crate) enum Chosen {
    Fused(plan::FusedPlan),
    Staged(ScratchSize),
}

impl Chosen {
    /// The part of the scratch that it takes, of those that hold scores or partial sums.
    pub fn memory(&self, scratch: &Scratch) -> Result<Option<wgpu::Buffer>, Error> {
        let needed = self.scratch_size();
        let used = [Slot::Scores, Slot::Partials].into_iter().find(|slot| needed.has(*slot));
        used.map(|slot| scratch.buffer(slot)).transpose()
    }

    /// The temporary memory it takes.
    pub fn scratch_size(&self) -> ScratchSize {
        match self {
            Chosen::Fused(plan) => ScratchSize::default().with(Slot::Partials, plan.partial_bytes()),
            Chosen::Staged(size) => *size,
        }
    }
}

/// Chooses the path of `problem`.
pub(crate) fn choose(problem: &Problem, device: &DeviceFacts) -> Result<Chosen, Error> {
    let Problem { shape, weights, tuning, .. } = problem;
    let insists = tuning.matrix_units == MatrixUnits::Always;
    let fused = match tuning.path {
        Path::Fused if weights.is_some() => {
            let why = "only the staged path has them in memory; leave the path to Auto";
            return Err(Error::Unsupported { what: "attention weights on the fused path", why });
        }
        Path::Staged if problem.keys.cache().is_some() => {
            let why = "only the fused path reads a cache; leave the path to Auto";
            return Err(Error::Unsupported { what: "a cache on the staged path", why });
        }
        Path::Fused => true,
        Path::Auto if problem.keys.cache().is_some() => true,
        Path::Auto => weights.is_none() && fused::bindings(problem) <= device.max_storage_buffers as usize,
        Path::Staged => false,
    };
    if insists && !fused {
        let why =
            "only the fused path uses them, which writes no weights and has room for fewer mask tensors";
        return Err(Error::Unsupported { what: "matrix units for this call", why });
    }
    if fused {
        let keys = plan::KeySource {
            most: problem.keys.cache().map_or(shape.kv_len, |cache| cache.kept),
            storage: problem.keys.storage_kind(),
            words: problem.keys.in_words(),
            simple: problem.mask.blocks.is_none() && problem.dropout.is_none(),
            operands: problem.operands(),
        };
        Ok(Chosen::Fused(plan::fused(shape, &keys, tuning, device)?))
    } else {
        Ok(Chosen::Staged(staged::scratch_size(shape, weights.as_ref(), device)?))
    }
}

/// The dispatches of `problem`. `memory` is the scratch's part for scores or partial sums, if it has one.
pub(crate) fn dispatches<'a>(
    problem: &Problem<'a>,
    chosen: Chosen,
    memory: Option<&'a wgpu::Buffer>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    match chosen {
        Chosen::Fused(plan) => fused::dispatches(problem, &plan, memory, device),
        Chosen::Staged(_) => staged::dispatches(problem, memory, device),
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
