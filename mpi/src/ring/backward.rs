//! The backward pass of a ring. Keys and values travel round the ring again, and their gradients
//! follow. Each rank's host adds its queries' contribution, in the order of the ring. The last rank
//! sends the sum to the block's owner. The device never waits for a sum.

use std::time::Instant;

use wgpu_attention::{Backward, DType, Forward, Scratch, ScratchSize, TensorView, wgpu};

use super::block::{count, mask_of, rows};
use super::forward::{KeysMemory, widen};
use super::{Kernels, Key, RingAttention, RingBackward, begin_keys, since};
use crate::error::Error;
use crate::schedule::{Shares, Visit, visits};
use crate::staging::Staging;
use crate::transport::{Courier, Tag};

pub(super) struct Memory {
    shares: Shares,
    visits: Vec<Visit>,
    numbers: Option<wgpu::Buffer>,
    scratch: Option<Scratch>,
    /// q, k, v, out and d_out in f32, for calls in another type.
    wide: Vec<wgpu::Buffer>,
    keys: KeysMemory,
    d_q: wgpu::Buffer,
    /// A visit's gradients of keys and values.
    d_keys: wgpu::Buffer,
    downloads: [Staging; 2],
    upload: Staging,
}

/// A visit's tensors.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    q: TensorView<'a>,
    out: TensorView<'a>,
    lse: TensorView<'a>,
    d_out: TensorView<'a>,
}

impl Memory {
    fn new(kernels: &Kernels, key: &Key, shares: Shares, rank: usize) -> Result<Self, Error> {
        let sizes = key.sizes;
        let (tokens, most) = (shares.tokens(rank), shares.most_tokens());
        let wide_shapes =
            [sizes.q(tokens), sizes.k(tokens), sizes.v(tokens), sizes.out(tokens), sizes.out(tokens)];
        let d_keys = sizes.block(most, DType::F32).bytes;
        let own = sizes.block(tokens, DType::F32).bytes;
        let visits = visits(&shares, &key.mask, rank);
        let mut memory = Memory {
            numbers: kernels.numbers(&key.mask, key.length),
            scratch: None,
            wide: wide_shapes.map(|shape| kernels.buffer(4 * count(shape))).into(),
            keys: KeysMemory::new(kernels, key, &shares, rank),
            d_q: kernels.buffer(4 * count(sizes.q(tokens))),
            d_keys: kernels.buffer(d_keys),
            downloads: [0, 1].map(|_| Staging::download(&kernels.device, d_keys)),
            upload: Staging::upload(&kernels.device, own),
            shares,
            visits,
        };
        let view = |n: usize| TensorView::new(&memory.wide[n], DType::F32, wide_shapes[n]);
        let lse = kernels.buffer(4 * count(sizes.lse(tokens)));
        let lse = TensorView::new(&lse, DType::F32, sizes.lse(tokens));
        let inputs = Inputs { q: view(0), out: view(3), lse, d_out: view(4) };
        let mut size = ScratchSize::default();
        for visit in &memory.visits {
            let layout = sizes.block(memory.shares.tokens(visit.owner), sizes.dtype);
            for call in memory.calls(key, visit, inputs, memory.keys.views(&layout)) {
                size = size.max(kernels.attention.backward_scratch_size(&call)?);
            }
        }
        memory.scratch = Some(Scratch::new(&kernels.device, size)?);
        Ok(memory)
    }

    /// The attention calls of a visit. With the log-sum-exp over all keys, a part's weights are
    /// already final, so the gradients only need sums, no merge.
    fn calls<'a>(
        &'a self,
        key: &'a Key,
        visit: &'a Visit,
        inputs: Inputs<'a>,
        [k, v]: [TensorView<'a>; 2],
    ) -> impl Iterator<Item = Backward<'a>> {
        let tokens = self.shares.tokens(visit.owner);
        let d_q = TensorView::new(&self.d_q, DType::F32, inputs.q.shape());
        let gradients = key.sizes.block(tokens, DType::F32);
        visit.parts.iter().map(move |part| {
            let [d_k, d_v] = [0, 1].map(|n| rows(gradients.view(n, &self.d_keys), &part.k));
            let of_queries = |view| rows(view, &part.q);
            let Inputs { q, out, lse, d_out } = inputs;
            let [k, v] = [k, v].map(|view| rows(view, &part.k));
            let mask = mask_of(&key.mask, part, self.numbers.as_ref());
            let forward = Forward::new(of_queries(q), k, v, of_queries(out)).lse(of_queries(lse)).mask(mask);
            Backward::new(forward, of_queries(d_out))
                .d_q(of_queries(d_q))
                .d_k(d_k)
                .d_v(d_v)
                .accumulate(true)
                .partial(true)
        })
    }

    /// Records a visit. Also records the copy of its gradients for the host, if they travel.
    fn record(
        &mut self,
        kernels: &Kernels,
        encoder: &mut wgpu::CommandEncoder,
        key: &Key,
        at: usize,
        inputs: Inputs,
        kv: Option<[TensorView; 2]>,
    ) -> Result<(), Error> {
        let visit = &self.visits[at];
        let tokens = self.shares.tokens(visit.owner);
        let layout = key.sizes.block(tokens, key.sizes.dtype);
        let kv = kv.unwrap_or_else(|| self.keys.views(&layout));
        encoder.clear_buffer(&self.d_keys, 0, None);
        let Some(mut scratch) = self.scratch.take() else { return Ok(()) };
        let mut outcome = Ok(());
        for call in self.calls(key, visit, inputs, kv) {
            outcome = outcome.and_then(|()| kernels.attention.backward(encoder, &call, &mut scratch));
        }
        self.scratch = Some(scratch);
        outcome?;
        if self.travels(at) {
            let bytes = key.sizes.block(tokens, DType::F32).bytes as u64;
            encoder.copy_buffer_to_buffer(&self.d_keys, 0, &self.downloads[at % 2].buffer, 0, bytes);
        }
        Ok(())
    }

    fn travels(&self, at: usize) -> bool {
        at > 0 || self.visits[0].to.is_some()
    }

    /// Adds the gradients of visit `at` to the sum of earlier ranks, and sends the new sum on.
    fn pass_on(&self, kernels: &Kernels, courier: &mut Courier, key: &Key, at: usize) -> Result<(), Error> {
        let Visit { owner, from, to, .. } = self.visits[at];
        let len = key.sizes.block(self.shares.tokens(owner), DType::F32).bytes;
        let mut sum = match from {
            Some(from) => courier.wait(from, Tag::Gradients, || kernels.poll())?,
            None => courier.memory(len),
        };
        self.downloads[at % 2].read(&kernels.device, len, |mine| match from {
            Some(_) => add(&mut sum, mine),
            None => sum.copy_from_slice(mine),
        })?;
        match to {
            Some(to) => courier.send(to, Tag::Gradients, sum),
            None => courier.send(owner, Tag::Home, sum),
        }
        Ok(())
    }
}

/// Adds f32 values, element by element.
fn add(sum: &mut [u8], mine: &[u8]) {
    for (sum, mine) in sum.chunks_exact_mut(4).zip(mine.chunks_exact(4)) {
        let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap_or_default());
        let total = number(sum) + number(mine);
        sum.copy_from_slice(&total.to_le_bytes());
    }
}

impl RingAttention {
    pub(super) fn ring_backward(&mut self, call: &RingBackward, key: &Key) -> Result<(), Error> {
        if self.backward.as_ref().is_none_or(|(made_for, _)| made_for != key) {
            let shares = self.shares(key.length)?;
            self.backward = None;
            let memory = Memory::new(&self.kernels, key, shares, self.rank())?;
            self.backward = Some((key.clone(), memory));
        }
        let mut recorder = self.recorder();
        let RingAttention { kernels, courier, backward, timeline, .. } = self;
        let Some((_, memory)) = backward else { return Ok(()) };
        let (sizes, rank) = (key.sizes, courier.rank());
        let tokens = memory.shares.tokens(rank);

        let own = sizes.block(tokens, sizes.dtype);
        let [_, k, v] = call.inputs;
        let goes_on = memory.visits[0].to;
        if goes_on.is_some() {
            memory.keys.pack(kernels, &own, [k, v])?;
        }
        begin_keys(courier, &sizes, &memory.shares, memory.visits.get(1));

        let mut encoder = kernels.encoder();
        encoder.clear_buffer(&memory.d_q, 0, None);
        let wide = memory.wide.clone();
        let [q, k, v] = call.inputs;
        let [q, k, v, out, d_out] = widen(kernels, &mut encoder, [q, k, v, call.out, call.d_out], &wide)?;
        let inputs = Inputs { q, out, lse: call.lse, d_out };
        memory.record(kernels, &mut encoder, key, 0, inputs, Some([k, v]))?;
        let [to_q, to_k, to_v] = call.gradients;
        let total = sizes.block(tokens, DType::F32);
        if goes_on.is_none() {
            // No other rank sees these keys, so the gradients are complete.
            for (n, to) in [to_k, to_v].into_iter().enumerate() {
                kernels.copy(&mut encoder, total.view(n, &memory.d_keys), to)?;
            }
        }
        kernels.submit(encoder);
        recorder.submitted(&kernels.queue, &memory.visits[0], 0.0, 0.0);
        if let Some(to) = goes_on {
            memory.downloads[0].ask();
            let mut bytes = courier.memory(own.bytes);
            memory.keys.packed(kernels, &mut bytes)?;
            courier.send(to, Tag::Keys, bytes);
            let block = key.sizes.block(tokens, DType::F32).bytes;
            let last = crate::schedule::visitors(&memory.shares, &key.mask, rank).pop().unwrap_or(rank);
            courier.expect(last, Tag::Home, block);
        }
        recorder.sent(courier.sent());

        for at in 1..memory.visits.len() {
            let visit = memory.visits[at].clone();
            let Some(from) = visit.from else { continue };
            let start = Instant::now();
            let bytes = courier.wait(from, Tag::Keys, || kernels.poll())?;
            let waited = since(start);
            begin_keys(courier, &sizes, &memory.shares, memory.visits.get(at + 1));
            let block = memory.shares.tokens(visit.owner);
            courier.expect(from, Tag::Gradients, sizes.block(block, DType::F32).bytes);
            let start = Instant::now();
            let mut encoder = kernels.encoder();
            let layout = sizes.block(block, sizes.dtype);
            memory.keys.arrive(kernels, &mut encoder, &layout, &bytes)?;
            match visit.to {
                Some(to) => courier.send(to, Tag::Keys, bytes),
                None => courier.recycle(bytes),
            }
            memory.record(kernels, &mut encoder, key, at, inputs, None)?;
            let staged = since(start);
            kernels.submit(encoder);
            memory.keys.submitted();
            memory.downloads[at % 2].ask();
            recorder.submitted(&kernels.queue, &visit, waited, staged);
            // While the device computes this block, send on the gradients of the block before.
            if memory.travels(at - 1) {
                memory.pass_on(kernels, courier, key, at - 1)?;
            }
            recorder.sent(courier.sent());
        }
        let last = memory.visits.len() - 1;
        if memory.travels(last) {
            memory.pass_on(kernels, courier, key, last)?;
        }

        let mut encoder = kernels.encoder();
        let d_q = TensorView::new(&memory.d_q, DType::F32, sizes.q(tokens));
        kernels.copy(&mut encoder, d_q, to_q)?;
        if goes_on.is_some() {
            let home = crate::schedule::visitors(&memory.shares, &key.mask, rank).pop().unwrap_or(rank);
            let bytes = courier.wait(home, Tag::Home, || kernels.poll())?;
            memory.upload.write(&kernels.device, &bytes)?;
            let len = bytes.len() as u64;
            courier.recycle(bytes);
            encoder.copy_buffer_to_buffer(&memory.upload.buffer, 0, &memory.d_keys, 0, len);
            for (n, to) in [to_k, to_v].into_iter().enumerate() {
                kernels.copy(&mut encoder, total.view(n, &memory.d_keys), to)?;
            }
        }
        kernels.submit(encoder);
        if goes_on.is_some() {
            memory.upload.ask();
        }
        kernels.finish()?;
        *timeline = recorder.end(courier.sent());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_of_f32() {
        let mut sum: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let mine: Vec<u8> = [0.25f32, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        add(&mut sum, &mine);
        assert_eq!(sum, [1.75f32, 0.0].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    }
}
