//! The operator: attention over disjoint sets of keys → attention over all of them.

mod backward;
pub(crate) mod kernels;
pub(crate) mod reference;

pub use backward::{MergeBackward, PartGradients};
use kernels::merge;

use std::sync::Arc;

use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, Dispatches, Pipelines, Prepared, Recorder, Several, View};
use crate::tensor::{Access, CallTensors, DType, Error, TensorView, check_float};

/// Attention over some of the keys: an output, and the log-sum-exp that gives its weight.
#[derive(Clone, Copy, Debug)]
pub struct Partial<'a> {
    /// `[batch, heads, q_len, value_dim]`, F32, F16 or BF16.
    pub out: TensorView<'a>,
    /// `[batch, heads, q_len, 1]`, F32, written by [`Forward::lse`](crate::Forward::lse).
    pub lse: TensorView<'a>,
}

/// One merge: attention over disjoint sets of keys, and the tensors for attention over their union.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct MergeForward<'a> {
    parts: &'a [Partial<'a>],
    into: Partial<'a>,
}

impl<'a> MergeForward<'a> {
    /// Merges `parts` into `into`, which may not overlap a part. With more than three parts,
    /// several dispatches accumulate in `into`, in its type: choose F32 for many parts.
    pub fn new(parts: &'a [Partial<'a>], into: Partial<'a>) -> Self {
        MergeForward { parts, into }
    }
}

/// Combines attention over disjoint sets of keys into attention over their union. The result is
/// exact: `lse = ln Σ exp(lseₙ)`, `out = Σ exp(lseₙ − lse) · outₙ`.
///
/// Use it to compute long key ranges in chunks. A shared prefix can be computed once for many
/// sequences (Juravsky et al. 2024, "Hydragen"). Several devices can compute a range each (Liu et
/// al. 2023, "Ring attention"). Every part has the same queries. A part in which a row saw no key
/// (lse −∞) adds nothing to that row. Attention sinks must be in the mask of one part only. Dropout
/// and masks that depend on positions apply to each part separately.
///
/// It caches the bindings of recent calls, so that repeating a call creates nothing. The bindings
/// keep some buffers alive: see [`forget`](Self::forget).
#[derive(Clone, Debug)]
pub struct Merge {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
}

impl Merge {
    /// Creates the operator with new pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Creates the operator with pipelines that other operators on the device share.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        Merge { pipelines: pipelines.clone(), bindings: Arc::default() }
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of this operator's calls and their references to buffers. Clones share
    /// the bindings.
    ///
    /// Without this call, unused bindings are dropped after a few calls, at most 64 calls. Until
    /// then they can keep buffers alive. These buffers have at most twice the bytes of the last
    /// call's buffers, or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// Records a merge into an encoder or a pass.
    ///
    /// # Errors
    /// Returns an error if there are no parts, or if shapes or types differ. A part may not overlap
    /// the result. It also returns the other errors that [`Error`] lists for tensors.
    /// After an error, nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &MergeForward) -> Result<(), Error> {
        self.prepare(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, and compiles and binds its kernels. [`Prepared::record`] then records it any
    /// number of times.
    ///
    /// # Errors
    /// The errors of [`forward`](Self::forward).
    pub fn prepare(&self, call: &MergeForward) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        call.check(device)?;
        self.pipelines.bind("merge", &call.dispatches(device), &self.bindings)
    }
}

impl<'a> MergeForward<'a> {
    fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let MergeForward { parts, into } = self;
        let Some(first) = parts.first() else {
            return Err(Error::ZeroSize { tensor: "parts", axis: "number" });
        };
        let [batch, heads, q_len, _] = into.out.shape();
        let mut tensors = CallTensors::new(device);
        let all = parts.iter().map(|part| ("parts.out", "parts.lse", part, Access::Read));
        for (out, lse, part, access) in all.chain([("out", "lse", into, Access::Write)]) {
            let typed = if access == Access::Read { &first.out } else { &into.out };
            check_float(out, typed)?;
            tensors.add(access, out, part.out, typed.dtype(), into.out.shape())?;
            tensors.add(access, lse, part.lse, DType::F32, [batch, heads, q_len, 1])?;
        }
        tensors.finish()
    }

    fn dispatches(&self, device: &DeviceFacts) -> Dispatches<'a> {
        let MergeForward { parts, into } = self;
        let view = |t: TensorView| View::of(t, device);
        let [batch, heads, q_len, value_dim] = into.out.shape();
        let call = |(n, parts): (usize, &[Partial<'a>])| {
            let mut places = [bytemuck::Zeroable::zeroed(); merge::PARTS];
            for (place, part) in places.iter_mut().zip(parts) {
                *place = merge::MergePart { out: view(part.out), lse: view(part.lse) };
            }
            let call = merge::MergeCall {
                out: into.out,
                lse: into.lse,
                part_out: Several::of(parts.iter().map(|part| part.out.window(device)), parts[0].out.dtype()),
                part_lse: Several::of(parts.iter().map(|part| part.lse.window(device)), DType::F32),
                parts: places,
                q_len: q_len as u32,
                value_dim: value_dim as u32,
                neg_inf: f32::NEG_INFINITY,
                accumulates: n > 0,
            };
            call.dispatch([q_len.div_ceil(merge::ROWS), heads, batch], device)
        };
        parts.chunks(merge::PARTS).enumerate().map(call).collect()
    }
}
