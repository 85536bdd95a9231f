//! Ulysses: an all-to-all exchange (Jacobs et al. 2023). The ranks exchange shares of the tokens
//! for shares of the heads, compute attention, and exchange back.

use std::ops::Range;
use std::time::Instant;

use wgpu_attention::{Attention, Backward, Config, DType, Forward, Scratch, TensorView, wgpu};

use super::block::{Layout, count, mask_of, width};
use super::forward::widen;
use super::{Kernels, Key, RingAttention, RingBackward, RingForward, since};
use crate::error::Error;
use crate::schedule::{Part, Shares, Visit};
use crate::staging::Staging;
use crate::timeline::Recorder;
use crate::transport::{Courier, Tag};

pub(super) struct Memory {
    /// Attention over the rank's share of the heads.
    attention: Attention,
    shares: Shares,
    numbers: Option<wgpu::Buffer>,
    scratch: Option<Scratch>,
    /// The inputs: all heads of the rank's tokens, then the rank's heads of all tokens. The outputs
    /// have the same two sides.
    inputs: [Side; 2],
    outputs: [Side; 2],
    /// Inputs in f32, for calls in another type.
    wide: Vec<wgpu::Buffer>,
}

/// The tensors of one side of the exchange, on the device and in staging buffers.
struct Side {
    layouts: Vec<Layout>,
    /// The first byte of each tensor in a staging buffer.
    starts: Vec<usize>,
    bytes: usize,
    buffers: Vec<wgpu::Buffer>,
    download: Staging,
    upload: Staging,
}

impl Side {
    /// Tensors of the given shapes and types.
    fn new(kernels: &Kernels, tensors: &[([usize; 4], DType)]) -> Self {
        let layouts: Vec<Layout> =
            tensors.iter().map(|(shape, dtype)| Layout::new(*dtype, &[*shape])).collect();
        let mut bytes = 0;
        let mut starts = Vec::new();
        for layout in &layouts {
            starts.push(bytes);
            bytes += layout.bytes;
        }
        Side {
            buffers: layouts.iter().map(|layout| kernels.buffer(layout.bytes)).collect(),
            layouts,
            starts,
            bytes,
            download: Staging::download(&kernels.device, bytes),
            upload: Staging::upload(&kernels.device, bytes),
        }
    }

    fn view(&self, n: usize) -> TensorView<'_> {
        self.layouts[n].view(0, &self.buffers[n])
    }

    fn record_download(&self, encoder: &mut wgpu::CommandEncoder) {
        for ((buffer, start), layout) in self.buffers.iter().zip(&self.starts).zip(&self.layouts) {
            let to = &self.download.buffer;
            encoder.copy_buffer_to_buffer(buffer, 0, to, *start as u64, layout.bytes as u64);
        }
    }

    fn record_upload(&self, encoder: &mut wgpu::CommandEncoder) {
        for ((buffer, start), layout) in self.buffers.iter().zip(&self.starts).zip(&self.layouts) {
            let from = &self.upload.buffer;
            encoder.copy_buffer_to_buffer(from, *start as u64, buffer, 0, layout.bytes as u64);
        }
    }

    /// Calls `copy` with the bytes of every run of rows, for the heads `share(heads)` and the
    /// tokens `tokens`.
    fn runs(
        &self,
        share: impl Fn(usize) -> Range<usize>,
        tokens: &Range<usize>,
        mut copy: impl FnMut(Range<usize>),
    ) {
        for (layout, start) in self.layouts.iter().zip(&self.starts) {
            let [batch, heads, length, dim] = layout.shapes[0];
            let row = dim * width(layout.dtype);
            for head in (0..batch).flat_map(|b| share(heads).map(move |h| b * heads + h)) {
                let first = start + (head * length + tokens.start) * row;
                copy(first..first + tokens.len() * row);
            }
        }
    }
}

/// One exchange, from the side `from` to the side `to`.
struct Exchange<'a> {
    kernels: &'a Kernels,
    shares: &'a Shares,
    from: &'a Side,
    to: &'a Side,
    /// True from shares of tokens to shares of heads; false for the way back.
    gathers: bool,
}

impl Exchange<'_> {
    /// Runs the exchange. The download of `from` must be requested before. Afterwards, the upload
    /// buffer of `to` holds the result.
    fn run(&self, courier: &mut Courier) -> Result<(), Error> {
        let Exchange { kernels, shares, from, to, gathers } = self;
        let (rank, ranks) = (courier.rank(), courier.ranks());
        let tokens = |rank: usize| shares.chunks(rank)[0].clone();
        // On one side, a rank has its tokens and all heads; on the other, all tokens and its heads.
        let of_rank = |peer: usize| move |heads: usize| heads / ranks * peer..heads / ranks * (peer + 1);
        let all = |heads: usize| 0..heads;
        let own_tokens = 0..tokens(rank).len();
        let outgoing = |peer: usize, copy: &mut dyn FnMut(Range<usize>)| match gathers {
            true => from.runs(of_rank(peer), &own_tokens, copy),
            false => from.runs(all, &tokens(peer), copy),
        };
        let incoming = |peer: usize, copy: &mut dyn FnMut(Range<usize>)| match gathers {
            true => to.runs(all, &tokens(peer), copy),
            false => to.runs(of_rank(peer), &own_tokens, copy),
        };
        let others = || (0..ranks).filter(move |peer| *peer != rank);
        for peer in others() {
            let mut len = 0;
            incoming(peer, &mut |run| len += run.len());
            courier.expect(peer, Tag::Exchange, len);
        }
        let mut messages: Vec<Vec<u8>> = Vec::with_capacity(ranks);
        for peer in 0..ranks {
            let mut len = 0;
            outgoing(peer, &mut |run| len += run.len());
            let mut bytes = courier.memory(len);
            bytes.clear();
            messages.push(bytes);
        }
        from.download.read(&kernels.device, from.bytes, |mapped| {
            for (peer, message) in messages.iter_mut().enumerate() {
                outgoing(peer, &mut |run| message.extend_from_slice(&mapped[run]));
            }
        })?;
        let mut whole = courier.memory(to.bytes);
        let mut own = Vec::new();
        for (peer, message) in messages.into_iter().enumerate() {
            if peer == rank {
                own = message;
            } else {
                courier.send(peer, Tag::Exchange, message);
            }
        }
        for peer in 0..ranks {
            let came = if peer == rank {
                std::mem::take(&mut own)
            } else {
                courier.wait(peer, Tag::Exchange, || kernels.poll())?
            };
            let mut at = 0;
            incoming(peer, &mut |run| {
                let len = run.len();
                whole[run].copy_from_slice(&came[at..at + len]);
                at += len;
            });
            courier.recycle(came);
        }
        to.upload.write(&kernels.device, &whole)?;
        courier.recycle(whole);
        Ok(())
    }
}

impl Memory {
    fn new(kernels: &Kernels, config: Config, key: &Key, shares: Shares, rank: usize) -> Result<Self, Error> {
        let (sizes, length, ranks) = (key.sizes, key.length, shares.ranks());
        let tokens = shares.tokens(rank);
        let f32 = DType::F32;
        // Shapes and types of inputs and outputs with all heads, for a number of tokens.
        let of_tokens = |tokens| {
            let sets: [Vec<([usize; 4], DType)>; 2] = if key.backward {
                [
                    vec![
                        (sizes.q(tokens), sizes.dtype),
                        (sizes.k(tokens), sizes.dtype),
                        (sizes.v(tokens), sizes.dtype),
                        (sizes.out(tokens), f32),
                        (sizes.lse(tokens), f32),
                        (sizes.out(tokens), f32),
                    ],
                    vec![(sizes.q(tokens), f32), (sizes.k(tokens), f32), (sizes.v(tokens), f32)],
                ]
            } else {
                [
                    vec![
                        (sizes.q(tokens), sizes.dtype),
                        (sizes.k(tokens), sizes.dtype),
                        (sizes.v(tokens), sizes.dtype),
                    ],
                    vec![(sizes.out(tokens), f32), (sizes.lse(tokens), f32)],
                ]
            };
            sets
        };
        let by_heads = |set: &[([usize; 4], DType)]| -> Vec<([usize; 4], DType)> {
            set.iter().map(|([b, h, l, d], dtype)| ([*b, h / ranks, *l, *d], *dtype)).collect()
        };
        let ([ins, outs], [all_ins, all_outs]) = (of_tokens(tokens), of_tokens(length));
        let inputs = [Side::new(kernels, &ins), Side::new(kernels, &by_heads(&all_ins))];
        let outputs = [Side::new(kernels, &outs), Side::new(kernels, &by_heads(&all_outs))];
        let wide = by_heads(&all_ins).iter().map(|(shape, _)| kernels.buffer(4 * count(*shape))).collect();
        let numbers = kernels.numbers(&key.mask, length);
        let config = config.dtype(f32).heads(sizes.heads / ranks).kv_heads(sizes.kv_heads / ranks);
        let attention = Attention::with_pipelines(kernels.attention.pipelines(), config)?;
        Ok(Memory { attention, shares, numbers, scratch: None, inputs, outputs, wide })
    }

    /// A visit of all queries and all keys of the rank's heads.
    fn whole(&self, key: &Key) -> Visit {
        let all = 0..key.length;
        let sight = key.mask.sight(&all, &all);
        let part = Part {
            chunk: 0,
            q: all.clone(),
            k: all,
            q_at: 0,
            k_at: 0,
            all: sight == crate::schedule::Sight::All,
        };
        Visit { step: 0, owner: 0, from: None, to: None, parts: vec![part] }
    }
}

impl RingAttention {
    fn ulysses_memory(&mut self, key: &Key) -> Result<(), Error> {
        let place = usize::from(key.backward);
        if self.ulysses[place].as_ref().is_none_or(|(made_for, _)| made_for != key) {
            let shares = self.shares(key.length)?;
            self.ulysses[place] = None;
            let memory = Memory::new(&self.kernels, self.config, key, shares, self.rank())?;
            self.ulysses[place] = Some((key.clone(), memory));
        }
        Ok(())
    }

    pub(super) fn exchange_forward(&mut self, call: &RingForward, key: &Key) -> Result<(), Error> {
        self.ulysses_memory(key)?;
        let mut recorder = self.recorder();
        let RingAttention { kernels, courier, ulysses, timeline, .. } = self;
        let Some((_, memory)) = &mut ulysses[usize::from(key.backward)] else { return Ok(()) };
        let views = [call.q, call.k, call.v];
        let wait = gather(kernels, courier, memory, &views)?;

        let visit = memory.whole(key);
        let start = Instant::now();
        let mut encoder = kernels.encoder();
        memory.inputs[1].record_upload(&mut encoder);
        let [q, k, v] =
            widen(kernels, &mut encoder, [0, 1, 2].map(|n| memory.inputs[1].view(n)), &memory.wide)?;
        let forward = Forward::new(q, k, v, memory.outputs[1].view(0))
            .lse(memory.outputs[1].view(1))
            .mask(mask_of(&key.mask, &visit.parts[0], memory.numbers.as_ref()));
        if memory.scratch.is_none() {
            memory.scratch = Some(Scratch::new(&kernels.device, memory.attention.scratch_size(&forward)?)?);
        }
        if let Some(scratch) = &mut memory.scratch {
            memory.attention.forward(&mut encoder, &forward, scratch)?;
        }
        memory.outputs[1].record_download(&mut encoder);
        kernels.submit(encoder);
        memory.inputs[1].upload.ask();
        memory.outputs[1].download.ask();
        recorder.submitted(&kernels.queue, &visit, wait, since(start));

        let outputs = [Some(call.out), call.lse];
        scatter(kernels, courier, memory, &outputs, &mut recorder)?;
        *timeline = recorder.end(courier.sent());
        Ok(())
    }

    pub(super) fn exchange_backward(&mut self, call: &RingBackward, key: &Key) -> Result<(), Error> {
        self.ulysses_memory(key)?;
        let mut recorder = self.recorder();
        let RingAttention { kernels, courier, ulysses, timeline, .. } = self;
        let Some((_, memory)) = &mut ulysses[usize::from(key.backward)] else { return Ok(()) };
        let [q, k, v] = call.inputs;
        let wait = gather(kernels, courier, memory, &[q, k, v, call.out, call.lse, call.d_out])?;

        let visit = memory.whole(key);
        let start = Instant::now();
        let mut encoder = kernels.encoder();
        let [inputs, outputs] = [&memory.inputs[1], &memory.outputs[1]];
        inputs.record_upload(&mut encoder);
        let all = widen(kernels, &mut encoder, [0, 1, 2, 3, 4, 5].map(|n| inputs.view(n)), &memory.wide)?;
        let [q, k, v, out, lse, d_out] = all;
        let mask = mask_of(&key.mask, &visit.parts[0], memory.numbers.as_ref());
        let backward = Backward::new(Forward::new(q, k, v, out).lse(lse).mask(mask), d_out)
            .d_q(outputs.view(0))
            .d_k(outputs.view(1))
            .d_v(outputs.view(2));
        if memory.scratch.is_none() {
            let size = memory.attention.backward_scratch_size(&backward)?;
            memory.scratch = Some(Scratch::new(&kernels.device, size)?);
        }
        if let Some(scratch) = &mut memory.scratch {
            memory.attention.backward(&mut encoder, &backward, scratch)?;
        }
        outputs.record_download(&mut encoder);
        kernels.submit(encoder);
        inputs.upload.ask();
        outputs.download.ask();
        recorder.submitted(&kernels.queue, &visit, wait, since(start));

        scatter(kernels, courier, memory, &call.gradients.map(Some), &mut recorder)?;
        *timeline = recorder.end(courier.sent());
        Ok(())
    }
}

/// Collects the rank's heads of all tokens in the staging buffer for the device. Returns the time
/// in seconds.
fn gather(
    kernels: &Kernels,
    courier: &mut Courier,
    memory: &Memory,
    views: &[TensorView],
) -> Result<f64, Error> {
    let start = Instant::now();
    let [from, to] = &memory.inputs;
    let mut encoder = kernels.encoder();
    for (n, view) in views.iter().enumerate() {
        kernels.copy(&mut encoder, *view, from.view(n))?;
    }
    from.record_download(&mut encoder);
    kernels.submit(encoder);
    from.download.ask();
    Exchange { kernels, shares: &memory.shares, from, to, gathers: true }.run(courier)?;
    Ok(since(start))
}

/// Writes all heads of the rank's tokens to the call's tensors.
fn scatter(
    kernels: &Kernels,
    courier: &mut Courier,
    memory: &Memory,
    into: &[Option<TensorView>],
    recorder: &mut Recorder,
) -> Result<(), Error> {
    let [to, from] = &memory.outputs;
    Exchange { kernels, shares: &memory.shares, from, to, gathers: false }.run(courier)?;
    recorder.sent(courier.sent());
    let mut encoder = kernels.encoder();
    to.record_upload(&mut encoder);
    for (n, view) in into.iter().enumerate() {
        if let Some(view) = view {
            kernels.copy(&mut encoder, to.view(n), *view)?;
        }
    }
    kernels.submit(encoder);
    to.upload.ask();
    kernels.finish()
}
