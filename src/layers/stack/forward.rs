//! The forward calls of a stack: all stages of all layers, one after the other.

use super::call::StackForward;
use super::config::NormOrder;
use super::hidden::Hidden;
use super::self_attention::{SelfAttention, check_cache};
use super::workspace::{Rows, Workspace, check_rows_of, forward_size};
use super::{Layer, Stack};
use crate::attention::dispatch;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Prepared, Scratch, ScratchSize, Slot};
use crate::layers::multi_head::{MultiHeadAttention, Plan as AttentionPlan};
use crate::rows::norm::OwnedNorm;
use crate::tensor::{Access, Error, TensorView, check_aliasing, check_apart, expect, expect_shape};

/// A checked call.
pub(super) struct Plan<'a> {
    pub rows: Rows,
    attention: SelfAttention<'a>,
    /// The attention of each layer to a memory, in a decoder.
    cross: Vec<AttentionPlan>,
    pub size: ScratchSize,
}

impl Stack {
    /// The temporary memory that `call` needs.
    pub fn scratch_size(&self, call: &StackForward) -> Result<ScratchSize, Error> {
        Ok(self.check(call, &self.pipelines.facts())?.size)
    }

    /// Checks `call`, compiles its pipelines and binds its tensors.
    pub fn prepare(
        &self,
        label: &'static str,
        call: &StackForward,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let plan = dispatch::within(device, |device| {
            let plan = self.check(call, device)?;
            scratch.check(plan.size).map(|()| plan)
        })?;
        let (config, rows, kernel_options) = (&self.config, plan.rows, &self.kernel_options);
        let work = Workspace { config, rows, scratch, kernel_options, device, accumulates: false };
        self.pipelines.bind(label, &self.dispatches(call, &work, &plan)?, scratch.bindings())
    }

    pub(super) fn dispatches<'a>(
        &'a self,
        call: &StackForward<'a>,
        work: &Workspace<'a>,
        plan: &Plan<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let pass = Pass { stack: self, call, work, plan };
        match self.config.order {
            NormOrder::Post => pass.post(),
            NormOrder::Pre => pass.pre(),
        }
    }

    fn check<'a>(&self, call: &StackForward<'a>, device: &DeviceFacts) -> Result<Plan<'a>, Error> {
        let mut plan = self.check_inputs(call, device)?;
        check_rows_of("out", &call.out, &self.config.attention, Access::Write, device)?;
        expect_shape("out", call.out.shape(), call.x.shape())?;
        let mut written = vec![("out", call.out)];
        if let Some(hidden) = call.hidden {
            Hidden::of(self, &plan.rows).check(&hidden, &self.config, Access::Write, device)?;
            // The next layer reads `hidden`, and one dispatch may write `hidden` and `out`.
            check_aliasing(&[("out", call.out)], &[("hidden", hidden)], device)?;
            written.push(("hidden", hidden));
        }
        if let Some(weights) = call.weights {
            weights.check("weights", Access::Write, device)?;
            written.push(("weights", weights));
        }
        check_aliasing(&written, &self.inputs(call), device)?;
        check_apart(&written, device)?;
        let (pre, cross) = (self.config.order == NormOrder::Pre, call.memory.is_some());
        let normed = (pre || cross).then_some(Slot::Normed);
        let stream = (call.hidden.is_none() || pre && cross).then_some(Slot::Stream);
        let streams = [Slot::Middle, Slot::Branch].into_iter().chain(normed).chain(stream);
        plan.size = plan.size.max(forward_size(&self.config, &plan.rows, false, streams));
        Ok(plan)
    }

    /// Checks the inputs of a call. The plan's size is the size of attention only.
    pub(super) fn check_inputs<'a>(
        &self,
        call: &StackForward<'a>,
        device: &DeviceFacts,
    ) -> Result<Plan<'a>, Error> {
        let StackForward { x, cache, weights, .. } = *call;
        let rows = self.check_rows("x", &x, device)?;
        let Rows { batch, length } = rows;
        if let Some(weights) = &weights {
            expect("weights", weights.shape(), 0, self.layers.len().saturating_mul(batch))?;
        }
        let mut memory_len = 0;
        if let Some(memory) = &call.memory {
            memory_len = self.memory_len(&memory.projected)?;
            self.check_memory(&memory.projected, batch, memory_len, Access::Read, device)?;
        }
        call.layers.check(self.layers.len())?;
        if let Some(cache) = cache {
            check_cache(cache, self, rows, &call.layers)?;
            if weights.is_some() {
                let why = "a cache has no fixed number of keys; record all rows at once without a cache";
                return Err(Error::Unsupported { what: "attention weights with a cache", why });
            }
        }
        let attention = SelfAttention::of(self, call, rows, device)?;
        let cross = |(n, layer): (usize, &Layer)| {
            let (cross, memory) = layer.cross.as_ref().zip(call.memory.as_ref())?;
            Some(cross.plan_of(&memory.attention(n, [x; 2]), [batch, length, memory_len], device))
        };
        let cross: Vec<AttentionPlan> =
            self.layers.iter().enumerate().filter_map(cross).collect::<Result<_, _>>()?;
        let size = cross.iter().fold(attention.size(), |size, plan| size.max(plan.size));
        Ok(Plan { rows, attention, cross, size })
    }

    /// Returns all tensors that a call reads.
    pub(super) fn inputs<'a>(&'a self, call: &StackForward<'a>) -> Vec<(&'static str, TensorView<'a>)> {
        let mut read = vec![("x", call.x)];
        read.extend(call.memory.iter().flat_map(|memory| memory.projected.tensors()));
        read.extend(call.layers.tensors());
        read.extend(call.memory.iter().flat_map(|memory| memory.mask.tensors()));
        for layer in &self.layers {
            read.extend(layer.attention.weights());
            read.extend(layer.cross.iter().flat_map(MultiHeadAttention::weights));
            read.extend(layer.feed_forward.tensors());
            read.extend(layer.norms.iter().flat_map(OwnedNorm::tensors));
        }
        read.extend(self.final_norm.iter().flat_map(OwnedNorm::tensors));
        read
    }
}

/// One forward pass.
struct Pass<'t, 'a> {
    stack: &'a Stack,
    call: &'t StackForward<'a>,
    work: &'t Workspace<'a>,
    plan: &'t Plan<'a>,
}

impl<'a> Pass<'_, 'a> {
    /// Records `x = norm(x + f(x))` for each part f.
    fn post(&self) -> Result<Dispatches<'a>, Error> {
        let Pass { stack: Stack { layers, final_norm, .. }, call, work, .. } = *self;
        let branch = work.features(Slot::Branch)?;
        let mut dispatches = Dispatches::new();
        let mut x = call.x;
        for (n, layer) in layers.iter().enumerate() {
            let last = n + 1 == layers.len() && final_norm.is_none();
            for (part, norm) in layer.norms.iter().enumerate() {
                let to = match call.hidden {
                    _ if part + 1 < layer.norms.len() => work.features([Slot::Middle, Slot::Normed][part])?,
                    _ if last => call.out,
                    Some(hidden) => work.given(hidden, n),
                    None => work.features(Slot::Stream)?,
                };
                dispatches.extend(self.part(n, part, [x, branch])?);
                dispatches.push(work.norm(norm, x, Some(branch), to, None));
                x = to;
            }
        }
        dispatches.extend(final_norm.iter().map(|norm| work.norm(norm, x, None, call.out, None)));
        Ok(dispatches)
    }

    /// Records `x = x + f(norm(x))` for each part f. The dispatch of the next norm also computes
    /// the sum.
    fn pre(&self) -> Result<Dispatches<'a>, Error> {
        let Pass { stack: Stack { layers, final_norm, .. }, call, work, .. } = *self;
        let [branch, normed] = [work.features(Slot::Branch)?, work.features(Slot::Normed)?];
        let middle = work.features(Slot::Middle)?;
        // The next sum's tensor. The dispatch still reads `x`, the sum before it.
        let next =
            |x: TensorView| if x.buffer == middle.buffer { work.features(Slot::Stream) } else { Ok(middle) };
        let mut dispatches = Dispatches::new();
        let mut x = call.x;
        for (n, layer) in layers.iter().enumerate() {
            for (part, norm) in layer.norms.iter().enumerate() {
                if n + part == 0 {
                    dispatches.push(work.norm(norm, x, None, normed, None));
                } else {
                    let sum = match call.hidden {
                        Some(hidden) if part == 0 => work.given(hidden, n - 1),
                        _ => next(x)?,
                    };
                    dispatches.push(work.norm(norm, x, Some(branch), normed, Some(sum)));
                    x = sum;
                }
                dispatches.extend(self.part(n, part, [normed, branch])?);
            }
        }
        dispatches.push(match final_norm {
            Some(norm) => {
                // The last sum is not needed. With it, all these norms have one pipeline.
                let last = match call.hidden {
                    Some(hidden) => work.given(hidden, layers.len() - 1),
                    None => next(x)?,
                };
                work.norm(norm, x, Some(branch), call.out, Some(last))
            }
            None => work.sum(x, branch, call.out),
        });
        Ok(dispatches)
    }

    /// Returns the dispatches of a part of layer `n`, from `x` into `out`.
    fn part(&self, n: usize, part: usize, [x, out]: [TensorView<'a>; 2]) -> Result<Dispatches<'a>, Error> {
        let Pass { stack, call, work, plan } = *self;
        let layer = &stack.layers[n];
        match (part, layer.cross.as_ref().zip(call.memory.as_ref())) {
            (0, _) => plan.attention.dispatches(stack, n, call.attention(n, [x, out]), work),
            (1, Some((cross, memory))) => {
                let call = memory.attention(n, [x, out]);
                cross.dispatches(&call, &plan.cross[n], work.scratch, work.device)
            }
            _ => work.feed_forward(&layer.feed_forward, x, out, false),
        }
    }
}
