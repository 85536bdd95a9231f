//! The self-attention of a stack's layers: all rows in one call, or with a cache.

use super::call::StackForward;
use super::layer_call::LayerCalls;
use super::workspace::{Rows, Workspace};
use super::{Layer, Stack};
use crate::cache::Cache;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, ScratchSize};
use crate::layers::multi_head::{CachedPlan, MultiHeadForward, Plan};
use crate::tensor::Error;

/// The checked self-attention of all layers.
pub(crate) struct SelfAttention<'a> {
    plans: Plans<'a>,
    size: ScratchSize,
}

// One value lives for as long as a call is recorded, so a box would only cost an allocation.
#[allow(clippy::large_enum_variant)]
enum Plans<'a> {
    /// All rows in one call, with one plan for every layer.
    Whole(Plan),
    /// All rows in one call, with a plan for each layer.
    Each(Vec<Plan>),
    /// The cache, and a plan for each layer.
    Cached(&'a Cache, Vec<CachedPlan>),
}

impl<'a> SelfAttention<'a> {
    /// Plans the attention of all layers in a call. Layers without differences share a plan.
    pub fn of(
        stack: &Stack,
        call: &StackForward<'a>,
        rows: Rows,
        device: &DeviceFacts,
    ) -> Result<Self, Error> {
        let Stack { layers, shared, .. } = stack;
        let calls = &call.layers;
        let own = |n: usize| call.attention(n, [call.x, call.out]);
        let Rows { batch, length } = rows;
        shared.check(calls)?;
        let Some(cache) = call.cache else {
            let dims = [batch, length, length];
            let mut size = ScratchSize::default();
            if !shared.is_empty() {
                size = shared.forward_size(&layers[0].attention, rows, device.max_binding_bytes)?;
            }
            let of = |n: usize| {
                let (layer, call) = (&layers[n].attention, own(n));
                // There may be no scratch yet, so any buffer replaces it: plans read layouts only.
                let call =
                    shared.placed(n, call, (&layer.shape_of(dims), layer.dtype()), call.query.buffer());
                layer.plan_of(&call, dims, device).map_err(|e| calls.at(n, e))
            };
            if calls.each.is_none() && shared.is_empty() {
                let plan = of(0)?;
                return Ok(SelfAttention { size: plan.size, plans: Plans::Whole(plan) });
            }
            let plans = (0..layers.len()).map(of).collect::<Result<Vec<_>, _>>()?;
            let size = plans.iter().fold(size, |size, plan| size.max(plan.size));
            return Ok(SelfAttention { size, plans: Plans::Each(plans) });
        };
        let dims = [batch, length, cache.config().longest()];
        let of = |(n, layer): (usize, &Layer)| {
            let keys = (cache.source(shared.cache_layer(n), true)?, shared.source(n).is_none());
            layer.attention.cached_plan(&own(n), keys, dims, device).map_err(|e| calls.at(n, e))
        };
        let plans = layers.iter().enumerate().map(of).collect::<Result<Vec<_>, Error>>()?;
        let size = plans.iter().fold(ScratchSize::default(), |size, plan| size.max(plan.size));
        Ok(SelfAttention { size, plans: Plans::Cached(cache, plans) })
    }

    /// The scratch that serves each layer in turn.
    pub fn size(&self) -> ScratchSize {
        self.size
    }

    /// Returns the dispatches of layer `n`.
    pub fn dispatches(
        &self,
        stack: &'a Stack,
        n: usize,
        call: MultiHeadForward<'a>,
        work: &Workspace<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let (layer, shared) = (&stack.layers[n].attention, &stack.shared);
        match &self.plans {
            Plans::Whole(plan) => layer.dispatches(&call, plan, work.scratch, work.device),
            Plans::Each(plans) => {
                let plan = &plans[n];
                let call = shared.placed_in(n, call, (&plan.shape, layer.dtype()), work.scratch)?;
                layer.dispatches(&call, plan, work.scratch, work.device)
            }
            Plans::Cached(cache, plans) => {
                let source = cache.source(shared.cache_layer(n), true)?;
                layer.cached_dispatches(&call, source, &plans[n], work.scratch, work.device)
            }
        }
    }
}

/// Refuses a cache that does not fit the layers of `stack` and `rows`. For several rows it also
/// refuses a mask without an order.
pub(crate) fn check_cache(cache: &Cache, stack: &Stack, rows: Rows, calls: &LayerCalls) -> Result<(), Error> {
    let (layer, config) = (&stack.layers[0].attention, &stack.config.attention);
    if cache.device() != layer.pipelines().device() {
        let why = "create it with `Cache::with_pipelines` and the pipelines of the stack";
        return Err(Error::Unsupported { what: "a cache on another device", why });
    }
    if layer.appended_keys() > 0 {
        let why = "with a cache, every step would append them again; record all rows at once without a cache";
        return Err(Error::Unsupported { what: "`bias_kv` and `add_zero_attn` with a cache", why });
    }
    let of_cache = cache.config();
    let sizes = [
        ("cache.batch", rows.batch, of_cache.batch),
        ("cache.layers", stack.shared.cache_layers(), of_cache.layers),
        ("cache.kv_heads", config.kv_heads, of_cache.kv_heads),
        ("cache.head_dim", config.head_dim, of_cache.head_dim),
        ("cache.value_dim", config.value_dim, of_cache.value_dim),
    ];
    for (option, wanted, got) in sizes {
        if wanted != got {
            let expected = "the same as in the stack and `x`";
            return Err(Error::Option { option, value: got as f64, expected });
        }
    }
    if of_cache.latent {
        let why = "the layers of a stack project their values; use a cache that stores them";
        return Err(Error::Unsupported { what: "a cache with latent values", why });
    }
    let unordered = (0..calls.distinct()).find(|n| !calls.mask_of(*n).orders_rows());
    if let Some(n) = unordered.filter(|_| rows.length > 1) {
        let why = "rows would see later rows of the same call, but no rows of later calls; add `and_causal()` to the \
                   mask, or `window(usize::MAX, usize::MAX)` to allow this";
        let error = Error::Unsupported { what: "several rows with a cache and no causal rule", why };
        return Err(calls.at(n, error));
    }
    Ok(())
}

/// Refuses the gradients of a call with a cache.
pub(crate) fn check_no_cache(cache: Option<&Cache>) -> Result<(), Error> {
    match cache {
        None => Ok(()),
        Some(_) => {
            let why = "a cache does not store what gradients need; record all rows at once without a cache";
            Err(Error::Unsupported { what: "a backward pass of a forward call with a cache", why })
        }
    }
}
