//! The forward pass of a ring. Keys and values travel round the ring, and each rank merges the
//! results of all blocks in f32.

use std::time::Instant;

use wgpu_attention::attention::{MergeForward, Partial};
use wgpu_attention::{DType, Forward, Scratch, ScratchSize, TensorView, wgpu};

use super::block::{Layout, count, mask_of, rows};
use super::{Kernels, Key, RingAttention, RingForward, begin_keys, since};
use crate::error::Error;
use crate::schedule::{Shares, Visit, visits};
use crate::staging::Staging;
use crate::transport::Tag;

/// Buffers and the plan of a call, reused by later calls with the same key.
pub(super) struct Memory {
    pub shares: Shares,
    pub visits: Vec<Visit>,
    numbers: Option<wgpu::Buffer>,
    scratch: Option<Scratch>,
    lse: wgpu::Buffer,
    /// The rank's queries, keys and values in f32, for calls in another type.
    wide: Option<[wgpu::Buffer; 3]>,
    keys: KeysMemory,
    /// The results of a step's parts, for each chunk of queries.
    parts: Vec<[Slot; 2]>,
    /// The results merged so far; the steps alternate between the two.
    merged: [Slot; 2],
}

/// The tensors that a visit reads and writes.
struct Tensors<'a> {
    q: TensorView<'a>,
    /// The rank's own keys and values. `None` for a block that arrived from another rank.
    kv: Option<[TensorView<'a>; 2]>,
    into: Partial<'a>,
}

/// An output and its log-sum-exp.
struct Slot {
    out: wgpu::Buffer,
    lse: wgpu::Buffer,
}

impl Slot {
    fn new(kernels: &Kernels, out: [usize; 4], lse: [usize; 4]) -> Self {
        Slot { out: kernels.buffer(4 * count(out)), lse: kernels.buffer(4 * count(lse)) }
    }

    fn view(&self, out: [usize; 4], lse: [usize; 4]) -> Partial<'_> {
        let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
        Partial { out: view(&self.out, out), lse: view(&self.lse, lse) }
    }
}

/// Buffers for keys and values that travel.
pub(super) struct KeysMemory {
    /// The rank's own keys and values, one after the other.
    packed: wgpu::Buffer,
    download: Staging,
    uploads: [Staging; 2],
    /// The keys and values of the arrived block, as received. `widened` has them in f32.
    arrived: wgpu::Buffer,
    widened: Option<wgpu::Buffer>,
    turn: usize,
}

impl KeysMemory {
    pub fn new(kernels: &Kernels, key: &Key, shares: &Shares, rank: usize) -> Self {
        let own = key.sizes.block(shares.tokens(rank), key.sizes.dtype).bytes;
        let most = key.sizes.block(shares.most_tokens(), key.sizes.dtype).bytes;
        let widest = key.sizes.block(shares.most_tokens(), DType::F32).bytes;
        KeysMemory {
            packed: kernels.buffer(own),
            download: Staging::download(&kernels.device, own),
            uploads: [0, 1].map(|_| Staging::upload(&kernels.device, most)),
            arrived: kernels.buffer(most),
            widened: (key.sizes.dtype != DType::F32).then(|| kernels.buffer(widest)),
            turn: 0,
        }
    }

    /// Starts to copy the rank's own keys and values to the host.
    pub fn pack(&self, kernels: &Kernels, layout: &Layout, [k, v]: [TensorView; 2]) -> Result<(), Error> {
        let mut encoder = kernels.encoder();
        kernels.copy(&mut encoder, k, layout.view(0, &self.packed))?;
        kernels.copy(&mut encoder, v, layout.view(1, &self.packed))?;
        encoder.copy_buffer_to_buffer(&self.packed, 0, &self.download.buffer, 0, layout.bytes as u64);
        kernels.submit(encoder);
        self.download.ask();
        Ok(())
    }

    /// Copies the rank's own keys and values to `bytes`, when they have reached the host.
    pub fn packed(&self, kernels: &Kernels, bytes: &mut [u8]) -> Result<(), Error> {
        self.download.read(&kernels.device, bytes.len(), |from| bytes.copy_from_slice(from))
    }

    /// Records the copies that bring a block to the device. Call [`submitted`](Self::submitted)
    /// after the submission, which maps the staging buffer again.
    pub fn arrive(
        &mut self,
        kernels: &Kernels,
        encoder: &mut wgpu::CommandEncoder,
        layout: &Layout,
        bytes: &[u8],
    ) -> Result<(), Error> {
        self.turn ^= 1;
        let upload = &self.uploads[self.turn];
        upload.write(&kernels.device, bytes)?;
        encoder.copy_buffer_to_buffer(&upload.buffer, 0, &self.arrived, 0, bytes.len() as u64);
        if let Some(widened) = &self.widened {
            let wide = Layout::new(DType::F32, &layout.shapes);
            for n in 0..2 {
                kernels.copy(encoder, layout.view(n, &self.arrived), wide.view(n, widened))?;
            }
        }
        Ok(())
    }

    pub fn submitted(&self) {
        self.uploads[self.turn].ask();
    }

    /// Views of the arrived block's keys and values.
    pub fn views(&self, layout: &Layout) -> [TensorView<'_>; 2] {
        let wide = Layout::new(DType::F32, &layout.shapes);
        match &self.widened {
            Some(widened) => [0, 1].map(|n| wide.view(n, widened)),
            None => [0, 1].map(|n| layout.view(n, &self.arrived)),
        }
    }
}

/// Returns the tensors in f32. Tensors in another type are copied to `wide`.
pub(super) fn widen<'a, const N: usize>(
    kernels: &Kernels,
    encoder: &mut wgpu::CommandEncoder,
    views: [TensorView<'a>; N],
    wide: &'a [wgpu::Buffer],
) -> Result<[TensorView<'a>; N], Error> {
    let mut result = views;
    for (n, view) in views.into_iter().enumerate() {
        if view.dtype() != DType::F32 {
            let to = TensorView::new(&wide[n], DType::F32, view.shape());
            kernels.copy(encoder, view, to)?;
            result[n] = to;
        }
    }
    Ok(result)
}

impl Memory {
    fn new(kernels: &Kernels, key: &Key, shares: Shares, rank: usize) -> Result<Self, Error> {
        let sizes = key.sizes;
        let tokens = shares.tokens(rank);
        let visits = visits(&shares, &key.mask, rank);
        let wide = (sizes.dtype != DType::F32).then(|| {
            [sizes.q(tokens), sizes.k(tokens), sizes.v(tokens)].map(|shape| kernels.buffer(4 * count(shape)))
        });
        let slot = |tokens| Slot::new(kernels, sizes.out(tokens), sizes.lse(tokens));
        let chunks = shares.chunks(rank);
        let mut memory = Memory {
            visits,
            numbers: kernels.numbers(&key.mask, key.length),
            scratch: None,
            lse: kernels.buffer(4 * count(sizes.lse(tokens))),
            wide,
            keys: KeysMemory::new(kernels, key, &shares, rank),
            parts: chunks.iter().map(|chunk| [0, 1].map(|_| slot(chunk.len()))).collect(),
            merged: [0, 1].map(|_| slot(tokens)),
            shares,
        };
        let q = kernels.buffer(4 * count(sizes.q(tokens)));
        let q = TensorView::new(&q, DType::F32, sizes.q(tokens));
        let mut size = ScratchSize::default();
        for visit in &memory.visits {
            let layout = sizes.block(memory.shares.tokens(visit.owner), sizes.dtype);
            for call in memory.calls(key, visit, q, memory.keys.views(&layout)) {
                size = size.max(kernels.attention.scratch_size(&call)?);
            }
        }
        memory.scratch = Some(Scratch::new(&kernels.device, size)?);
        Ok(memory)
    }

    /// The attention calls of a visit's parts.
    fn calls<'a>(
        &'a self,
        key: &'a Key,
        visit: &'a Visit,
        q: TensorView<'a>,
        [k, v]: [TensorView<'a>; 2],
    ) -> impl Iterator<Item = Forward<'a>> {
        visit.parts.iter().enumerate().map(move |(n, part)| {
            let into = self.slot(key, visit, n);
            Forward::new(rows(q, &part.q), rows(k, &part.k), rows(v, &part.k), into.out)
                .lse(into.lse)
                .mask(mask_of(&key.mask, part, self.numbers.as_ref()))
        })
    }

    /// The output slot of a visit's part `n`.
    fn slot(&self, key: &Key, visit: &Visit, n: usize) -> Partial<'_> {
        let part = &visit.parts[n];
        let before = visit.parts[..n].iter().filter(|other| other.chunk == part.chunk).count();
        let slot = &self.parts[part.chunk][before];
        slot.view(key.sizes.out(part.q.len()), key.sizes.lse(part.q.len()))
    }

    /// Records a visit: attention to the block, then merges. The last merge of a chunk writes to
    /// `into`.
    fn record(
        &mut self,
        kernels: &Kernels,
        encoder: &mut wgpu::CommandEncoder,
        key: &Key,
        at: usize,
        tensors: Tensors,
    ) -> Result<(), Error> {
        let Tensors { q, kv, into } = tensors;
        let visit = &self.visits[at];
        let layout = key.sizes.block(self.shares.tokens(visit.owner), key.sizes.dtype);
        let kv = kv.unwrap_or_else(|| self.keys.views(&layout));
        // Take the scratch out, because the calls borrow the other fields.
        let Some(mut scratch) = self.scratch.take() else { return Ok(()) };
        let mut outcome = Ok(());
        for call in self.calls(key, visit, q, kv) {
            outcome = outcome.and_then(|()| kernels.attention.forward(encoder, &call, &mut scratch));
        }
        for chunk in 0..self.parts.len() {
            let mine: Vec<usize> =
                (0..visit.parts.len()).filter(|n| visit.parts[*n].chunk == chunk).collect();
            let Some(of_chunk) = mine.first().map(|n| visit.parts[*n].q.clone()) else { continue };
            let has = |visit: &&Visit| visit.parts.iter().any(|part| part.chunk == chunk);
            let before = self.visits[..at].iter().filter(has).count();
            let is_last = !self.visits[at + 1..].iter().any(|visit| has(&visit));
            let merged = |turn: usize| {
                let all = self.merged[turn % 2].view(into.out.shape(), into.lse.shape());
                Partial { out: rows(all.out, &of_chunk), lse: rows(all.lse, &of_chunk) }
            };
            let mut parts: Vec<Partial> = Vec::with_capacity(3);
            parts.extend((before > 0).then(|| merged(before - 1)));
            parts.extend(mine.iter().map(|n| self.slot(key, visit, *n)));
            let target = if is_last {
                Partial { out: rows(into.out, &of_chunk), lse: rows(into.lse, &of_chunk) }
            } else {
                merged(before)
            };
            let merge = MergeForward::new(&parts, target);
            outcome = outcome.and_then(|()| kernels.merge.forward(encoder, &merge));
        }
        self.scratch = Some(scratch);
        Ok(outcome?)
    }
}

impl RingAttention {
    pub(super) fn ring_forward(&mut self, call: &RingForward, key: &Key) -> Result<(), Error> {
        if self.forward.as_ref().is_none_or(|(made_for, _)| made_for != key) {
            let shares = self.shares(key.length)?;
            self.forward = None;
            let memory = Memory::new(&self.kernels, key, shares, self.rank())?;
            self.forward = Some((key.clone(), memory));
        }
        let mut recorder = self.recorder();
        let RingAttention { kernels, courier, forward, timeline, .. } = self;
        let Some((_, memory)) = forward else { return Ok(()) };
        let (sizes, rank) = (key.sizes, courier.rank());
        let tokens = memory.shares.tokens(rank);

        let own = sizes.block(tokens, sizes.dtype);
        let goes_on = memory.visits[0].to;
        if goes_on.is_some() {
            memory.keys.pack(kernels, &own, [call.k, call.v])?;
        }
        begin_keys(courier, &sizes, &memory.shares, memory.visits.get(1));
        // Buffers are handles: clone the handle, so that `memory` can still be borrowed mutably.
        let unwanted = memory.lse.clone();
        let lse = call.lse.unwrap_or(TensorView::new(&unwanted, DType::F32, sizes.lse(tokens)));
        let into = Partial { out: call.out, lse };

        let mut encoder = kernels.encoder();
        let wide = memory.wide.clone().map_or_else(Vec::new, Vec::from);
        let [q, k, v] = widen(kernels, &mut encoder, [call.q, call.k, call.v], &wide)?;
        memory.record(kernels, &mut encoder, key, 0, Tensors { q, kv: Some([k, v]), into })?;
        kernels.submit(encoder);
        recorder.submitted(&kernels.queue, &memory.visits[0], 0.0, 0.0);
        if let Some(to) = goes_on {
            let mut bytes = courier.memory(own.bytes);
            memory.keys.packed(kernels, &mut bytes)?;
            courier.send(to, Tag::Keys, bytes);
        }
        recorder.sent(courier.sent());

        for at in 1..memory.visits.len() {
            let visit = memory.visits[at].clone();
            let Some(from) = visit.from else { continue };
            let start = Instant::now();
            let bytes = courier.wait(from, Tag::Keys, || kernels.poll())?;
            let waited = since(start);
            begin_keys(courier, &sizes, &memory.shares, memory.visits.get(at + 1));
            let start = Instant::now();
            let mut encoder = kernels.encoder();
            let layout = sizes.block(memory.shares.tokens(visit.owner), sizes.dtype);
            memory.keys.arrive(kernels, &mut encoder, &layout, &bytes)?;
            match visit.to {
                Some(to) => courier.send(to, Tag::Keys, bytes),
                None => courier.recycle(bytes),
            }
            memory.record(kernels, &mut encoder, key, at, Tensors { q, kv: None, into })?;
            let staged = since(start);
            kernels.submit(encoder);
            memory.keys.submitted();
            recorder.submitted(&kernels.queue, &visit, waited, staged);
            recorder.sent(courier.sent());
        }
        kernels.finish()?;
        *timeline = recorder.end(courier.sent());
        Ok(())
    }
}
