//! The operator: rows of numbers → the order in which they are sorted.

pub(crate) mod dispatch;
pub(crate) mod kernels;

use dispatch::SortProblem;

use crate::device::DeviceFacts;
use crate::kernel::{Pipelines, Prepared, Recorder, Scratch, ScratchSize};
use crate::tensor::{CallTensors, DType, Error, TensorView};

/// A stable sort of numbers, row by row: four bits a pass, each key after those of its digit that
/// stood before it. No atomics, the same bits on every run.
/// [`LshAttention`](crate::lsh::LshAttention) sorts tokens by their buckets with it.
#[derive(Clone, Debug)]
pub struct RadixSort {
    pipelines: Pipelines,
}

/// One sort: `keys` `[batch, heads, rows, length]`, U32, each row for itself; `order`, alike, takes
/// at each place which key stands there.
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

    /// Writes the place of each key there, shaped as `order`, which it inverts.
    pub fn ranks(mut self, ranks: impl Into<Option<TensorView<'a>>>) -> Self {
        self.ranks = ranks.into();
        self
    }

    /// Sorts by the lowest bits alone, 1 to 32, in `⌈bits / 4⌉` passes of four: where no key has
    /// higher ones, it is a sort by all.
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
    /// Sorts with pipelines of their own.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Sorts that share pipelines with other operators on the device.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        RadixSort { pipelines: pipelines.clone() }
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// The temporary memory that `call` needs: 64 bytes for every 1024 keys of a row, or fewer, and
    /// 4 for each key where there is more than one pass.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &Sort) -> Result<ScratchSize, Error> {
        let device = &self.pipelines.facts();
        call.check(device)?.scratch_size(device)
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors and scratch; then nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &Sort, scratch: &mut Scratch) -> Result<(), Error> {
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &Sort, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let problem = call.check(device)?;
        let scratch: &Scratch = scratch;
        scratch.check(problem.scratch_size(device)?)?;
        let dispatches = problem.dispatches(|slot| scratch.buffer(slot), device)?;
        self.pipelines.bind("radix sort", &dispatches, scratch.bindings())
    }
}
