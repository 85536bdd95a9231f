//! The operator: attention with keys on several devices.

mod backward;
mod block;
mod call;
mod forward;
mod ulysses;

pub use call::{RingBackward, RingForward};

use std::time::{Duration, Instant};

use wgpu_attention::attention::Merge;
use wgpu_attention::rows::{Elementwise, ElementwiseForward};
use wgpu_attention::{Attention, Config, DType, Pipelines, TensorView, wgpu};

use crate::error::Error;
use crate::header::{self, Header};
use crate::schedule::{Schedule, SequenceMask, Shares, Visit};
use crate::staging::lost;
use crate::timeline::{Recorder, Timeline};
use crate::transport::{Courier, Tag, Wire};
use block::Sizes;

/// The time after which the other ranks report a silent rank as lost.
const PATIENCE: Duration = Duration::from_secs(5);

/// Attention over a sequence that the ranks share, each on its own device. Use it for sequences
/// that do not fit one device. Every rank makes the same calls, with the tensors of its share.
///
/// ```no_run
/// # use wgpu_attention::{Config, TensorView, wgpu};
/// # use wgpu_attention_mpi::{Error, RingAttention, RingForward, Schedule, SequenceMask, ThreadWire};
/// # fn f(device: &wgpu::Device, queue: &wgpu::Queue, wire: ThreadWire, tensors: [TensorView; 4]) -> Result<(), Error> {
/// # let [q, k, v, out] = tensors;
/// let mut ring = RingAttention::new(device, queue, Config::new(8, 64), Schedule::Zigzag, wire)?;
/// // `q`, `k`, `v`, `out`: `[batch, heads, tokens, dim]`, the tokens that `ring.shares(65536)?` gives this rank.
/// let mask = SequenceMask::causal();
/// ring.forward(&RingForward::new(q, k, v, out, 65536).mask(&mask))?;
/// # Ok(()) }
/// ```
///
/// Unlike the library's operators, it submits and waits, because results must reach the host
/// before messages can carry them. Attention and merges compute in f32. Keys and values travel in
/// the tensors' type.
///
/// An error that concerns all ranks reaches all of them. After an error during a call, the ring
/// cannot be used any more: every later call returns the same error.
pub struct RingAttention {
    kernels: Kernels,
    config: Config,
    schedule: Schedule,
    courier: Courier,
    forward: Option<(Key, forward::Memory)>,
    backward: Option<(Key, backward::Memory)>,
    ulysses: [Option<(Key, ulysses::Memory)>; 2],
    /// The sizes that the library has accepted in a dry run.
    looked_at: Option<Sizes>,
    timeline: Timeline,
}

/// The device and the operators.
pub(crate) struct Kernels {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub attention: Attention,
    pub merge: Merge,
    pub elementwise: Elementwise,
}

/// The properties of a call that its memory depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Key {
    sizes: Sizes,
    length: usize,
    mask: SequenceMask,
    backward: bool,
}

impl Kernels {
    pub fn encoder(&self) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("ring") })
    }

    pub fn submit(&self, encoder: wgpu::CommandEncoder) {
        // Poll before and after: a submission may block on the previous one, whose end must be
        // recorded in time.
        self.poll();
        self.queue.submit([encoder.finish()]);
        self.poll();
    }

    /// A storage buffer of at least 4 bytes.
    pub fn buffer(&self, bytes: usize) -> wgpu::Buffer {
        self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("ring"),
            size: bytes.max(4).next_multiple_of(4) as u64,
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    }

    /// Copies a tensor of any strides and float type into another.
    pub fn copy(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        from: TensorView,
        to: TensorView,
    ) -> Result<(), Error> {
        Ok(self.elementwise.forward(encoder, &ElementwiseForward::new(from, to))?)
    }

    /// Runs the device's callbacks that are due.
    pub fn poll(&self) {
        // A wait for results reports a lost device.
        let _ = self.device.poll(wgpu::PollType::Poll);
    }

    pub fn finish(&self) -> Result<(), Error> {
        self.device.poll(wgpu::PollType::wait_indefinitely()).map_err(|e| lost(&e))?;
        Ok(())
    }

    /// The document number of every position, if the mask has several documents.
    pub fn numbers(&self, mask: &SequenceMask, length: usize) -> Option<wgpu::Buffer> {
        mask.has_documents().then(|| {
            let buffer = self.buffer(4 * length);
            self.queue.write_buffer(&buffer, 0, bytemuck::cast_slice(&mask.numbers(length)));
            buffer
        })
    }
}

impl RingAttention {
    /// A ring over `wire` with this rank's device. The dtype of `config` is ignored: a call uses
    /// the dtype of its tensors.
    ///
    /// # Errors
    /// The configuration is invalid.
    pub fn new(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        config: Config,
        schedule: Schedule,
        wire: impl Wire,
    ) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), queue, config, schedule, wire)
    }

    /// A ring that shares pipelines with other operators on the device.
    ///
    /// # Errors
    /// The same as [`new`](Self::new).
    pub fn with_pipelines(
        pipelines: &Pipelines,
        queue: &wgpu::Queue,
        config: Config,
        schedule: Schedule,
        wire: impl Wire,
    ) -> Result<Self, Error> {
        let kernels = Kernels {
            device: pipelines.device().clone(),
            queue: queue.clone(),
            attention: Attention::with_pipelines(pipelines, config.dtype(DType::F32))?,
            merge: Merge::with_pipelines(pipelines),
            elementwise: Elementwise::with_pipelines(pipelines),
        };
        let courier = Courier::new(wire, PATIENCE);
        let timeline = Timeline::default();
        Ok(RingAttention {
            kernels,
            config,
            schedule,
            courier,
            forward: None,
            backward: None,
            ulysses: [None, None],
            looked_at: None,
            timeline,
        })
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.courier.rank()
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.courier.ranks()
    }

    /// The tokens of each rank, for a sequence of `length` tokens.
    ///
    /// # Errors
    /// The sequence has fewer tokens than chunks.
    pub fn shares(&self, length: usize) -> Result<Shares, Error> {
        Shares::new(self.schedule, length, self.ranks())
    }

    /// The timeline of the last call on this rank.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Collects on rank 0 the timelines of all ranks, for the last call. All ranks must call it,
    /// and all except rank 0 get `None`.
    ///
    /// # Errors
    /// A rank has ended or is lost.
    pub fn gather_timelines(&mut self) -> Result<Option<Vec<Timeline>>, Error> {
        let (own, ranks) = (self.rank(), self.ranks());
        let len = Timeline::bytes(ranks);
        if own != 0 {
            let mut bytes = self.courier.memory(len);
            self.timeline.write(&mut bytes);
            self.courier.send(0, Tag::Report, bytes);
            return Ok(None);
        }
        let mut all = vec![self.timeline.clone()];
        (1..ranks).for_each(|rank| self.courier.expect(rank, Tag::Report, len));
        for rank in 1..ranks {
            let bytes = self.courier.wait(rank, Tag::Report, || ())?;
            all.push(Timeline::read(&bytes));
            self.courier.recycle(bytes);
        }
        Ok(Some(all))
    }

    /// Computes attention of this rank's queries to the keys of all ranks.
    ///
    /// # Errors
    /// On all ranks, before any work: the arguments are invalid on one rank or differ between
    /// ranks. During the call: a rank dies, ends or gives up.
    pub fn forward(&mut self, call: &RingForward) -> Result<(), Error> {
        let checked = call.check(self.schedule, self.rank(), self.ranks());
        let (sizes, mask) = self.agree(checked, call.mask, call.length, false)?;
        let key = Key { sizes, length: call.length, mask, backward: false };
        let result = match self.schedule {
            Schedule::Ulysses => self.exchange_forward(call, &key),
            _ => self.ring_forward(call, &key),
        };
        self.told(result)
    }

    /// Computes the gradients of this rank's queries, keys and values.
    ///
    /// The gradients of keys and values are sums over the ranks that see them. The ranks add in
    /// the order of the ring, so the same inputs give the same bits.
    ///
    /// # Errors
    /// The same as [`forward`](Self::forward).
    pub fn backward(&mut self, call: &RingBackward) -> Result<(), Error> {
        let checked = call.check(self.schedule, self.rank(), self.ranks());
        let (sizes, mask) = self.agree(checked, call.mask, call.length, true)?;
        let key = Key { sizes, length: call.length, mask, backward: true };
        let result = match self.schedule {
            Schedule::Ulysses => self.exchange_backward(call, &key),
            _ => self.ring_backward(call, &key),
        };
        self.told(result)
    }

    /// Reports this rank's error to the other ranks.
    fn told(&mut self, result: Result<(), Error>) -> Result<(), Error> {
        if let Err(error) = &result {
            self.courier.give_up(error);
        }
        result
    }

    fn agree(
        &mut self,
        checked: Result<Sizes, Error>,
        mask: Option<&SequenceMask>,
        length: usize,
        backward: bool,
    ) -> Result<(Sizes, SequenceMask), Error> {
        let mask = mask.cloned().unwrap_or_default();
        // Check here for all errors that the library would otherwise return during the call.
        let checked = checked.and_then(|sizes| {
            mask.check(length)?;
            self.dry_run(&sizes)?;
            Ok(sizes)
        });
        let sizes = checked.as_ref().ok().copied();
        let of = |number: fn(&Sizes) -> usize| sizes.as_ref().map_or(0, number) as u64;
        let [left, right] = mask.window.map_or([u64::MAX; 2], |window| window.map(|n| n as u64));
        let documents = mask.documents.iter().flat_map(|start| (*start as u64).to_le_bytes());
        let header = Header::new(&[
            ("forward (0) or backward (1)", u64::from(backward)),
            ("the schedule", self.schedule as u64),
            ("the dtype (by its code)", of(|sizes| sizes.dtype as usize)),
            ("batch", of(|sizes| sizes.batch)),
            ("heads", of(|sizes| sizes.heads)),
            ("kv_heads", of(|sizes| sizes.kv_heads)),
            ("head_dim", of(|sizes| sizes.head_dim)),
            ("value_dim", of(|sizes| sizes.value_dim)),
            ("the length of the sequence", length as u64),
            ("causal", u64::from(mask.causal)),
            ("the window's left side", left),
            ("the window's right side", right),
            ("the number of documents", mask.documents.len() as u64),
            ("the documents (by a digest)", header::digest(documents)),
            (
                "the configuration (by a digest)",
                header::digest(format!("{:?}", self.config.dtype(DType::F32)).bytes()),
            ),
        ]);
        let kernels = &self.kernels;
        header::agree(&mut self.courier, &header, checked.as_ref().err(), || kernels.poll())?;
        // `agree` has reported this rank's error to the other ranks.
        checked.map(|sizes| (sizes, mask))
    }

    /// Checks a call of one token with these dimensions in the library.
    fn dry_run(&mut self, sizes: &Sizes) -> Result<(), Error> {
        if self.looked_at == Some(*sizes) {
            return Ok(());
        }
        let buffer = |shape| self.kernels.buffer(4 * block::count(shape));
        let shapes = [sizes.q(1), sizes.k(1), sizes.v(1), sizes.out(1)];
        let buffers = shapes.map(buffer);
        let [q, k, v, out] = std::array::from_fn(|n| TensorView::new(&buffers[n], DType::F32, shapes[n]));
        self.kernels.attention.scratch_size(&wgpu_attention::Forward::new(q, k, v, out))?;
        self.looked_at = Some(*sizes);
        Ok(())
    }

    fn recorder(&self) -> Recorder {
        Recorder::new(self.courier.sent())
    }
}

/// Prepares to receive the keys of `visit`, if another rank sends them.
fn begin_keys(courier: &mut Courier, sizes: &Sizes, shares: &Shares, visit: Option<&Visit>) {
    if let Some(Visit { from: Some(from), owner, .. }) = visit {
        let bytes = sizes.block(shares.tokens(*owner), sizes.dtype).bytes;
        courier.expect(*from, Tag::Keys, bytes);
    }
}

/// Seconds since `start`.
pub(crate) fn since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64()
}
