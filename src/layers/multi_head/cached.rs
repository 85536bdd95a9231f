//! Calls of a stack whose keys and values are already projected, in a cache or a memory.

use super::{MultiHeadAttention, MultiHeadForward, heads_of, joined_heads};
use crate::attention::dispatch::{Chosen, Keys, Problem};
use crate::attention::{self, check_extras};
use crate::cache;
use crate::cache::dispatch::{CacheLayer, KeyRotation};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Scratch, ScratchSize, Slot, View, in_scratch};
use crate::matmul::projection;
use crate::position::{Rope, Rotary, Rotation, RowPositions};
use crate::tensor::{CallTensors, Error, Shape, TensorView};

/// A checked call whose keys and values are in a cache.
#[derive(Clone, Copy)]
pub(crate) struct CachedPlan {
    shape: Shape,
    chosen: Chosen,
    /// True if the call appends keys and values.
    appends: bool,
    pub size: ScratchSize,
}

/// Returns the rope of a call whose append can rotate keys and queries. Rows must be at their
/// positions in the cache.
fn rope_of_append<'a>(call: &MultiHeadForward<'a>, layer: &CacheLayer) -> Option<&'a Rope> {
    let Rotary { rotation: Rotation::Rope(rope), at: RowPositions::Tensor(at) } = call.rotary? else {
        return None;
    };
    (layer.has_starts(&at) && rope.config().sections.is_none()).then_some(rope)
}

impl MultiHeadAttention {
    /// Makes the plan of a call whose keys and values are in a layer of a cache. If `appends` is
    /// true, the call appends the keys and values of its rows. Otherwise another layer of the stack
    /// has appended them. Inputs and outputs are in the scratch of a stack, so only mask and
    /// positions are checked.
    pub(crate) fn cached_plan(
        &self,
        call: &MultiHeadForward,
        (layer, appends): (CacheLayer, bool),
        [batch, q_len, kv_len]: [usize; 3],
        device: &DeviceFacts,
    ) -> Result<CachedPlan, Error> {
        let shape = self.config.shape(batch, q_len, kv_len, 0);
        let extras = call.extras(call.out, 0);
        let tensors = &mut CallTensors::new(device);
        check_extras(&extras, &shape, tensors)?;
        call.mask.check_for_cache()?;
        if let Some(rotary) = call.rotary {
            if rotary.at.tensor().is_none() {
                let why =
                    "the cache sets the positions of the rows; pass `RowPositions::Tensor(cache.starts())`";
                return Err(Error::Unsupported { what: "rotary positions from a start, with a cache", why });
            }
            rotary.check(shape.q(), tensors)?;
        }
        let dtype = self.config.dtype;
        let rows = Shape { kv_len: q_len, ..shape };
        let size = self.projected_size(&rows, [true, appends, appends], dtype, Slot::Projected)?;
        let size = size.with(Slot::Context, self.context_bytes(&shape)).max(self.gate_size(&shape));
        let keys = Keys::Cache(layer).layout();
        let chosen =
            attention::dispatch::choose(&extras.outline(shape, dtype, keys, self.kernel_options), device)?;
        Ok(CachedPlan { shape, chosen, appends, size: size.max(chosen.scratch_size()) })
    }

    /// Returns the dispatches of a call with a [`CachedPlan`].
    pub(crate) fn cached_dispatches<'a>(
        &'a self,
        call: &MultiHeadForward<'a>,
        layer: CacheLayer<'a>,
        plan: &CachedPlan,
        scratch: &'a Scratch,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let CachedPlan { shape, chosen, appends, .. } = *plan;
        let dtype = self.config.dtype;
        let rows = Shape { kv_len: shape.q_len, ..shape };
        // A call that does not append reads its keys from the cache, not from a tensor.
        let call = &if appends { *call } else { call.projected_keys([call.key, call.value]) };
        let rope = if appends { rope_of_append(call, &layer) } else { None };
        let call = &MultiHeadForward { rotary: call.rotary.filter(|_| rope.is_none()), ..*call };
        let [q, k, v] = self.projected(call, &rows, scratch.buffer(Slot::Projected)?);
        let mut dispatches = self.project(call, &rows, 0, ([q, k, v], [None; 2]), device)?;
        if appends {
            let rotation = rope.map(|rope| KeyRotation::new(rope, Some(q)));
            dispatches.extend(cache::dispatch::append(&layer, [k, v], rotation, None, device));
        }
        let context = in_scratch(scratch.buffer(Slot::Context)?, dtype, joined_heads(&shape), 0);
        let extras = call.extras(heads_of(context, &shape), 0);
        let problem = Problem { keys: Keys::Cache(layer), ..self.problem(shape, [q; 3], extras) };
        dispatches.extend(attention::dispatch::dispatches(&problem, chosen, chosen.memory(scratch)?, device));
        dispatches.extend(self.finish(call, &shape, context, scratch, device)?);
        Ok(dispatches)
    }

    /// Computes the keys and values of `x`, and the appended ones, for later calls.
    pub(crate) fn key_products<'a>(
        &'a self,
        x: TensorView<'a>,
        [k, v]: [TensorView<'a>; 2],
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let ([batch, _, length, _], narrow) = (x.shape(), self.config.narrow);
        let given = |t: TensorView<'a>| t.slice(2, 0, length);
        let products = [self.key.product(x, given(k), narrow), self.value.product(x, given(v), narrow)];
        let mut dispatches = projection::dispatch::dispatches(&products, &self.kernel_options, device)?;
        dispatches.extend(self.normed(1, given(k), given(k), device));
        let appended = self.appended_keys();
        if appended > 0 {
            let shape = self.shape_of([batch, 1, length]);
            let of_keys = (k, [Some(View::of(k, device)), None]);
            let of_values = (v, [None, Some(View::of(v, device))]);
            dispatches.extend([of_keys, of_values].map(|to| self.append(to, &shape, appended, device)));
        }
        Ok(dispatches)
    }
}
