//! The sort operator: computes the sorted order of rows of numbers.

pub(crate) mod dispatch;
pub(crate) mod kernels;

use dispatch::SortProblem;

use crate::device::DeviceFacts;
use crate::kernel::{Pipelines, Prepared, Recorder, Scratch, ScratchSize};
use crate::tensor::{CallTensors, DType, Error, TensorView};

/// A stable sort of U32 numbers, row by row, with four bits per pass.
/// [`LshAttention`](crate::lsh::LshAttention) sorts tokens by their buckets with it. There are no
/// atomics, so the bits are the same on every run.
#[derive(Clone, Debug)]
pub struct RadixSort {
    pipelines: Pipelines,
}

/// One sort. `keys` is `[batch, heads, rows, length]`, U32, and each row is sorted separately.
/// `order` has the same shape. It receives the index of the key at each sorted position.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Sort<'a> {
    pub(crate) keys: TensorView<'a>,
    pub(crate) order: TensorView<'a>,
    pub(crate) ranks: Option<TensorView<'a>>,
    pub(crate) bits: u32,
}

impl<'a> Sort<'a> {
    /// Sorts by all 32 bits.
    pub fn new(keys: TensorView<'a>, order: TensorView<'a>) -> Self {
        Sort { keys, order, ranks: None, bits: u32::BITS }
    }

    /// Sets the output for the sorted position of each key. It has the shape of `order` and is its
    /// inverse permutation.
    pub fn ranks(mut self, ranks: impl Into<Option<TensorView<'a>>>) -> Self {
        self.ranks = ranks.into();
        self
    }

    /// Sorts by the lowest bits only, 1 to 32, in `⌈bits / 4⌉` passes. If no key has higher bits,
    /// this is a sort by the whole key.
    pub fn bits(mut self, bits: u32) -> Self {
        self.bits = bits;
        self
    }

    fn check(&self, device: &DeviceFacts) -> Result<SortProblem<'a>, Error> {
        let Sort { keys, order, ranks, bits } = *self;
        if !(1..=u32::BITS).contains(&bits) {
            return Err(Error::Option { option: "bits", value: bits.into(), expected: "1 to 32" });
        }
        let mut tensors = CallTensors::new(device);
        tensors.read("keys", keys, DType::U32, keys.shape())?;
        tensors.write("order", order, DType::U32, keys.shape())?;
        tensors.write("ranks", ranks, DType::U32, keys.shape())?;
        tensors.finish()?;
        Ok(SortProblem { keys, order, ranks, bits })
    }
}

impl RadixSort {
    /// Creates the operator with separate pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Creates the operator with pipelines that other operators of the device share.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        RadixSort { pipelines: pipelines.clone() }
    }

    /// The pipelines of the operator, to share with other operators.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// The temporary memory that `call` needs: 64 bytes for every 1024 keys of a row, rounded up.
    /// With more than one pass it needs 4 more bytes for each key.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &Sort) -> Result<ScratchSize, Error> {
        let device = &self.pipelines.facts();
        call.check(device)?.scratch_size(device)
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Every [`Error`] of tensors and scratch. After an error nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &Sort, scratch: &mut Scratch) -> Result<(), Error> {
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn prepare(&self, call: &Sort, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let problem = call.check(device)?;
        let scratch: &Scratch = scratch;
        scratch.check(problem.scratch_size(device)?)?;
        let dispatches = problem.dispatches(|slot| scratch.buffer(slot), device)?;
        self.pipelines.bind("radix sort", &dispatches, scratch.bindings())
    }
}
