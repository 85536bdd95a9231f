//! Attention to what a cache holds.

use super::{Attention, check_extras, extra_inputs, outputs};
use crate::cache::Cache;
use crate::error::Error;
use crate::mask::DeviceMask;
use crate::path::{self, Keys, Problem};
use crate::problem::Shape;
use crate::record::{dispatch, pass};
use crate::scratch::{Scratch, ScratchSize};
use crate::tensor::{Access, TensorView, check_aliasing, check_apart, expect};

/// One call of attention to the keys and values in a cache.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q` | `[batch, heads, q_len, head_dim]` | the configured |
/// | `out` | `[batch, heads, q_len, value_dim]` | the configured |
/// | `lse` | `[batch, heads, q_len, 1]` | F32 |
///
/// `kv_len`, for a mask's tensors, is the cache's capacity; of a ring they can only repeat along it. A query stands at
/// the position of its token: with n queries in a sequence of length L, query `i` at L − n + i.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct CachedForward<'a> {
    /// Queries. Rotated already, where keys are: [`Positions::rotate`](crate::Positions::rotate) at
    /// [`Cache::starts`].
    pub q: TensorView<'a>,
    /// Where keys and values are.
    pub cache: &'a Cache,
    /// Which of its layers.
    pub layer: usize,
    /// Where the result goes.
    pub out: TensorView<'a>,
    /// Which keys a query may see, of those that its sequence has; usually causal. It cannot have block maps or packed
    /// sequences.
    pub mask: DeviceMask<'a>,
    /// Where the log-sum-exp goes, if wanted.
    pub lse: Option<TensorView<'a>>,
    /// Queries are the tokens of the last advance, which the default is: a sequence that advanced by fewer than q_len
    /// has as many queries, from row 0 on, and the rows after them give 0. Otherwise every sequence has q_len queries,
    /// the last at its last token.
    pub advanced: bool,
}

impl<'a> CachedForward<'a> {
    /// Queries of the last advance, layer 0, without mask.
    pub fn new(q: TensorView<'a>, cache: &'a Cache, out: TensorView<'a>) -> Self {
        CachedForward { q, cache, layer: 0, out, mask: DeviceMask::none(), lse: None, advanced: true }
    }

    /// Of another layer.
    pub fn layer(mut self, layer: usize) -> Self {
        self.layer = layer;
        self
    }

    /// With a mask.
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.mask = mask;
        self
    }

    /// Writes the log-sum-exp of every query's masked scores there.
    pub fn lse(mut self, lse: TensorView<'a>) -> Self {
        self.lse = Some(lse);
        self
    }

    /// Queries that are not the tokens of the last advance: those of cross-attention, whose keys are another
    /// sequence's, or of tokens asked again, as the last alone or after a rewind. Every sequence has q_len of them, the
    /// last at its last token. The scratch size, too, is asked for in this way before the first advance.
    pub fn not_advanced(mut self) -> Self {
        self.advanced = false;
        self
    }
}

impl Attention {
    /// The temporary memory that `call` needs: partial sums, where keys are split among workgroups. It depends on the
    /// shapes and on the device, is bounded whatever the capacity, and does not grow with lengths.
    ///
    /// # Errors
    /// As [`forward_cached`](Self::forward_cached), but for limits of the device that only its kernels meet.
    pub fn scratch_size_cached(&self, call: &CachedForward) -> Result<ScratchSize, Error> {
        let problem = self.check_cached(call)?;
        Ok(path::choose(&problem, self.pipelines.facts())?.scratch_size())
    }

    /// Records `call` into `encoder`, in a compute pass of its own. Nothing is submitted, copied or read back, and
    /// the same call serves every later length.
    ///
    /// # Errors
    /// A cache of other dimensions or another device, or with changes that are not recorded yet; everything that
    /// [`Error`] lists for tensors, masks and scratch. Then nothing has been recorded.
    pub fn forward_cached(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        call: &CachedForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        call.cache.check_recorded()?;
        let problem = self.check_cached(call)?;
        self.record(&problem, scratch, |bound| dispatch(&mut pass(encoder, "attention"), bound))
    }

    /// [`forward_cached`](Self::forward_cached) into a compute pass of the caller's, which is left with another
    /// pipeline and bind group 0.
    ///
    /// # Errors
    /// As [`forward_cached`](Self::forward_cached).
    pub fn forward_cached_in_pass(
        &self,
        pass: &mut wgpu::ComputePass,
        call: &CachedForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        call.cache.check_recorded()?;
        self.record(&self.check_cached(call)?, scratch, |bound| dispatch(pass, bound))
    }

    /// Compiles and binds what `call` needs, so that its first recording does neither.
    ///
    /// # Errors
    /// As [`forward_cached`](Self::forward_cached).
    pub fn prepare_cached(&self, call: &CachedForward, scratch: &mut Scratch) -> Result<(), Error> {
        self.record(&self.check_cached(call)?, scratch, |_| ())
    }

    fn check_cached<'a>(&self, call: &CachedForward<'a>) -> Result<Problem<'a>, Error> {
        let device = self.pipelines.facts();
        let CachedForward { q, cache, layer, out, mask, lse, advanced } = *call;
        let config = &self.config;
        if cache.device() != self.pipelines.device() {
            let why = "make it with `Cache::with_pipelines(attention.pipelines(), ..)`";
            return Err(Error::Unsupported { what: "a cache on another device", why });
        }
        let of_cache = cache.config();
        let sizes = [
            ("cache.kv_heads", config.kv_heads, of_cache.kv_heads),
            ("cache.head_dim", config.head_dim, of_cache.head_dim),
            ("cache.value_dim", config.value_dim, of_cache.value_dim),
        ];
        for (option, wanted, got) in sizes {
            if wanted != got {
                let expected = "as the attention is configured";
                return Err(Error::Option { option, value: got as f64, expected });
            }
        }
        for (tensor, view, access) in [("q", q, Access::Read), ("out", out, Access::Write)] {
            view.check_as(tensor, config.dtype, access, device)?;
        }
        if advanced && cache.advanced() == 0 {
            let why =
                "nothing was advanced since it was made or rewound: advance first, or say `not_advanced`";
            return Err(Error::Unsupported { what: "queries of a cache's last advance", why });
        }
        let shape = Shape {
            batch: of_cache.batch,
            heads: config.heads,
            kv_heads: config.kv_heads,
            q_len: if advanced { cache.advanced() } else { q.shape()[2] },
            kv_len: of_cache.longest(),
            head_dim: config.head_dim,
            value_dim: config.value_dim,
        };
        for (tensor, view, wanted) in [("q", q, shape.q()), ("out", out, shape.out())] {
            (0..4).try_for_each(|axis| expect(tensor, view.shape(), axis, wanted[axis]))?;
        }
        if mask.blocks.is_some() || mask.packed.is_some() {
            let why = "a cache has sequences of its own and grows; use other rules, or tensors";
            return Err(Error::Unsupported { what: "block maps and packed sequences with a cache", why });
        }
        let problem = Problem {
            shape,
            q,
            keys: Keys::Cache(cache.source(layer, advanced)?),
            out,
            mask,
            appended: 0,
            scale: config.scale_value(),
            softcap: config.softcap,
            lse,
            weights: None,
            dropout: None,
            tuning: config.tuning,
        };
        check_extras(&problem, device)?;
        let read: Vec<_> = [("q", q), ("cache", cache.lengths())]
            .into_iter()
            .chain(cache.tensors(layer))
            .chain(extra_inputs(&problem))
            .collect();
        check_aliasing(&outputs(&problem), &read)?;
        check_apart(&outputs(&problem), device)?;
        Ok(problem)
    }
}
