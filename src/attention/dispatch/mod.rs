//! Sequences of kernels: from checked tensors to calls.

pub(crate) mod backward;
pub(crate) mod backward_problem;
pub(crate) mod fused;
mod problem;
pub(crate) mod score_gradients;
pub(crate) mod staged;

pub(crate) use backward_problem::{AddedGradients, BackwardProblem};
pub(crate) use problem::{Extras, Keys, Problem};

use super::plan::{self, Choice, Outline};
use crate::cache::dispatch::{CacheLayer, hadamard_rows};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Scratch, ScratchSize, Slot, fits, in_scratch};
use crate::tensor::{DType, Error, count};

/// The chosen path of a problem.
#[derive(Clone, Copy)]
pub(crate) struct Chosen {
    choice: Choice,
    /// Bytes of queries and outputs that are multiplied by a Walsh–Hadamard matrix, or 0.
    hadamard: [u64; 2],
}

/// The parts of the scratch that a path uses.
#[derive(Clone, Copy)]
pub(crate) struct Memory<'a> {
    /// Scores or partial sums.
    main: Option<&'a wgpu::Buffer>,
    /// Queries and outputs, times a Walsh–Hadamard matrix.
    hadamard: Option<[&'a wgpu::Buffer; 2]>,
}

/// Chooses the path of a problem.
pub(crate) fn choose(outline: &Outline, device: &DeviceFacts) -> Result<Chosen, Error> {
    let choice = plan::choose(outline, device)?;
    let bytes = |shape: [usize; 4]| match outline.keys.is_hadamard() {
        true => fits(count(shape) as u64, DType::F32.bytes() as u64, device),
        false => Ok(0),
    };
    Ok(Chosen { choice, hadamard: [bytes(outline.shape.q())?, bytes(outline.shape.out())?] })
}

/// Chooses the path of a problem: the measured one if `scratch` has room for it, else the rules'.
///
/// # Errors
/// Returns an error if the scratch is too small.
pub(crate) fn choose_within(
    outline: &Outline,
    device: &DeviceFacts,
    scratch: &Scratch,
) -> Result<Chosen, Error> {
    let chosen = |device: &DeviceFacts| {
        let chosen = choose(outline, device)?;
        scratch.check(chosen.scratch_size()).map(|()| chosen)
    };
    within(device, chosen)
}

/// Returns the result of `plan` for the device. If the scratch is too small, it plans for the
/// device without tuning instead.
///
/// # Errors
/// The errors of `plan` without tuning.
pub(crate) fn within<T>(
    device: &DeviceFacts,
    plan: impl Fn(&DeviceFacts) -> Result<T, Error>,
) -> Result<T, Error> {
    match plan(device) {
        Err(Error::ScratchTooSmall { .. }) if device.tuned.is_some() => {
            let [ruled, whole] = device.without_tuning();
            plan(&ruled).or_else(|error| plan(&whole).map_err(|_| error))
        }
        planned => planned,
    }
}

impl Chosen {
    /// The parts of the scratch that this path uses.
    pub fn memory<'a>(&self, scratch: &'a Scratch) -> Result<Memory<'a>, Error> {
        let needed = self.scratch_size();
        let used = [Slot::Scores, Slot::Partials].into_iter().find(|slot| needed.has(*slot));
        let main = used.map(|slot| scratch.buffer(slot)).transpose()?;
        let hadamard = match needed.has(Slot::HadamardQueries) {
            true => Some([scratch.buffer(Slot::HadamardQueries)?, scratch.buffer(Slot::HadamardOutputs)?]),
            false => None,
        };
        Ok(Memory { main, hadamard })
    }

    /// The temporary memory that this path needs.
    pub fn scratch_size(&self) -> ScratchSize {
        let (slot, bytes) = match self.choice {
            Choice::Fused(plan) => (Slot::Partials, plan.partial_bytes()),
            Choice::Staged { score_bytes } => (Slot::Scores, score_bytes),
        };
        let [queries, outputs] = self.hadamard;
        ScratchSize::default()
            .with(slot, bytes)
            .with(Slot::HadamardQueries, queries)
            .with(Slot::HadamardOutputs, outputs)
    }
}

/// Returns the dispatches of `problem`, with the memory of its path. If the cache holds products
/// with a Walsh–Hadamard matrix, queries and outputs are multiplied too.
pub(crate) fn dispatches<'a>(
    problem: &Problem<'a>,
    chosen: Chosen,
    memory: Memory<'a>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let (Keys::Cache(CacheLayer { hadamard: Some(block), .. }), Some([q, out])) =
        (problem.keys, memory.hadamard)
    else {
        return dispatches_of_path(problem, chosen.choice, memory.main, device);
    };
    let q = in_scratch(q, DType::F32, problem.shape.q(), 0);
    let out = in_scratch(out, DType::F32, problem.shape.out(), 0);
    let multiplied = Problem { q, extras: Extras { out, ..problem.extras }, ..*problem };
    let mut all = vec![hadamard_rows(problem.q, q, block, device)];
    all.extend(dispatches_of_path(&multiplied, chosen.choice, memory.main, device));
    all.push(hadamard_rows(out, problem.extras.out, block, device));
    all
}

fn dispatches_of_path<'a>(
    problem: &Problem<'a>,
    choice: Choice,
    memory: Option<&'a wgpu::Buffer>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    match choice {
        Choice::Fused(plan) => fused::dispatches(problem, &plan, memory, device),
        Choice::Staged { .. } => staged::dispatches(problem, memory, device),
    }
}
