//! Which keys a query may see, and what is added to its score.

pub(crate) mod ask_mask;
pub mod block_map;
mod builder;
mod check;
pub(crate) mod classify;
pub(crate) mod dropout;
pub(crate) mod kernels;
pub(crate) mod mods;
pub(crate) mod pattern;
pub(crate) mod reference;
mod rule;
mod rules;
mod settings;

pub use block_map::Blocks;
pub(crate) use check::{check_map, check_whole_map};
pub use dropout::Dropout;
pub use mods::{
    At, BoundMaskMod, BoundScoreMod, Captured, DeviceMods, FeatureMod, HostMods, MaskMod, ScoreMod,
};
pub use pattern::{Pattern, PatternPart};
use rule::Tensor;
pub(crate) use rule::{Adds, Ask, Turn};
pub(crate) use rules::{BY_SLOT, Id, RULES, RuleSet, TENSORS, slot};
pub use settings::Alignment;
pub(crate) use settings::Settings;

use crate::tensor::{HostTensor, TensorView};

/// A mask: a set of rules that must all permit a pair, and what is added to the scores.
///
/// Every tensor broadcasts to the shape its method names where its own size is 1. The order is
/// `scale · q·k`, then [`score_mod`](Mask::score_mod), softcap, bias, ALiBi and relative bias, then
/// permission. A query that may see no key has output 0 and lse −∞.
///
/// The score and what is added to it are summed in f32, one after the other. A sum below `f32::MIN`
/// is −∞ and hides the pair; `f32::MIN` itself is finite. The reference has the same rule.
///
/// Each tensor of a mask takes a storage buffer, as do tensors that mods capture and a tensor of
/// dropout. Documents and packed sequences take one buffer if queries and keys are the same bytes,
/// as in self-attention. A kernel has 8 buffers by WebGPU's default limits: a forward call with lse
/// has 6 left for these tensors, a backward call 2, and sinks need none there. A call with more is
/// an
/// [`Error::Limit`](crate::Error::Limit): request a larger `max_storage_buffers_per_shader_stage`, or combine masks into one `bias` or
/// [`mask_mod`](Mask::mask_mod).
///
/// A pair must be permitted by all of `lengths`, `attn_mask`, `key_padding_mask`, `tree`,
/// `documents`, `packed`, `exclude_self` and [`mask_mod`](Mask::mask_mod), and stand before
/// `prefix` or be permitted by the causal rule and by `window` and `pattern`; `globals` lifts the
/// latter two. `blocks` goes before: what it calls hidden is hidden, what it calls full is asked
/// only for `lengths`, `packed`, the causal rule and `prefix`.
///
/// On a device the parts are [`TensorView`]s ([`DeviceMask`]), on the host slices ([`HostMask`]); a
/// mask that is made apart from its call may need one of these as its type.
///
/// ```
/// use wgpu_attention::Mask;
/// use wgpu_attention::mask::HostMask;
/// let mask: HostMask = Mask::causal().window(128, 0);
/// ```
///
/// Functions of your own, as FlexAttention takes: [`ScoreMod`] and [`MaskMod`].
#[doc(alias = "mask_mod")]
#[doc(alias = "score_mod")]
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Mask<Lengths, Keep, Bias, Mods = ()> {
    rules: RuleSet,
    settings: Settings,
    /// The tensors of the rules, by slot.
    tensors: [Option<Part<Lengths, Keep, Bias>>; TENSORS],
    /// The caller's own functions.
    mods: Mods,
}

/// A tensor of a mask, by what its elements are.
#[derive(Clone, Copy, Debug)]
enum Part<L, K, B> {
    Number(L),
    Bool(K),
    Float(B),
}

/// A mask whose parts are in device memory.
pub type DeviceMask<'a> = Mask<TensorView<'a>, TensorView<'a>, TensorView<'a>, DeviceMods<'a>>;

/// A mask whose parts are slices.
pub type HostMask<'a> = Mask<HostTensor<'a, u32>, HostTensor<'a, bool>, HostTensor<'a, f32>, HostMods<'a>>;

impl<L, K, B, M: Default> Default for Mask<L, K, B, M> {
    fn default() -> Self {
        Self::none()
    }
}

impl<L, K, B, M: Default> Mask<L, K, B, M> {
    /// Every query sees every key.
    pub fn none() -> Self {
        Mask {
            rules: RuleSet::NONE,
            settings: Settings::default(),
            tensors: [const { None }; TENSORS],
            mods: M::default(),
        }
    }
}

impl<L, K, B, M> Mask<L, K, B, M> {
    /// The same rules with other tensors: each is given with its name, in a fixed order. Without
    /// the functions of
    /// [`score_mod`](Mask::score_mod) and [`mask_mod`](Mask::mask_mod), [`score_fn`](Mask::score_fn) and [`mask_fn`](Mask::mask_fn), which
    /// host and device do not share.
    ///
    /// # Errors
    /// The first that a function returns.
    pub fn try_map<L2, K2, B2, M2: Default, E>(
        self,
        mut lengths: impl FnMut(&'static str, L) -> Result<L2, E>,
        mut bools: impl FnMut(&'static str, K) -> Result<K2, E>,
        mut bias: impl FnMut(&'static str, B) -> Result<B2, E>,
    ) -> Result<Mask<L2, K2, B2, M2>, E> {
        let mut tensors = [const { None }; TENSORS];
        for ((to, from), Tensor { name, .. }) in tensors.iter_mut().zip(self.tensors).zip(BY_SLOT) {
            *to = match from {
                None => None,
                Some(Part::Number(t)) => Some(Part::Number(lengths(name, t)?)),
                Some(Part::Bool(t)) => Some(Part::Bool(bools(name, t)?)),
                Some(Part::Float(t)) => Some(Part::Float(bias(name, t)?)),
            };
        }
        Ok(Mask { rules: self.rules, settings: self.settings, tensors, mods: M2::default() })
    }

    /// The same rules by reference, without the functions of [`score_mod`](Mask::score_mod) and
    /// [`mask_mod`](Mask::mask_mod).
    pub fn as_ref(&self) -> Mask<&L, &K, &B> {
        let tensors = self.tensors.each_ref().map(|part| {
            part.as_ref().map(|part| match part {
                Part::Number(t) => Part::Number(t),
                Part::Bool(t) => Part::Bool(t),
                Part::Float(t) => Part::Float(t),
            })
        });
        Mask { rules: self.rules, settings: self.settings, tensors, mods: () }
    }

    pub(crate) fn rules(&self) -> RuleSet {
        self.rules
    }

    pub(crate) fn has(&self, id: Id) -> bool {
        self.rules.has(id)
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The `n`-th tensor of a rule, which has numbers.
    pub(crate) fn numbers(&self, id: Id, n: usize) -> Option<&L> {
        match &self.tensors[slot(id, n)] {
            Some(Part::Number(t)) => Some(t),
            _ => None,
        }
    }

    /// The tensor of a rule, which has booleans.
    pub(crate) fn bools(&self, id: Id) -> Option<&K> {
        match &self.tensors[slot(id, 0)] {
            Some(Part::Bool(t)) => Some(t),
            _ => None,
        }
    }

    /// The tensor of a rule, which has floats.
    pub(crate) fn floats(&self, id: Id) -> Option<&B> {
        match &self.tensors[slot(id, 0)] {
            Some(Part::Float(t)) => Some(t),
            _ => None,
        }
    }
}

impl<'a> HostMask<'a> {
    /// A score function of the caller's own: what the [`ScoreMod`] of the device computes, given
    /// scale · q·k and its pair.
    pub fn score_fn(mut self, score: &'a (dyn Fn(f64, &At) -> f64 + Sync)) -> Self {
        self.mods.score = Some(score);
        self
    }

    /// The derivative of [`score_fn`](Self::score_fn) by its score, which the backward pass needs;
    /// without it the reference takes differences.
    pub fn score_fn_slope(mut self, slope: &'a (dyn Fn(f64, &At) -> f64 + Sync)) -> Self {
        self.mods.slope = Some(slope);
        self
    }

    /// A mask of the caller's own: what the [`MaskMod`] of the device computes, `true` for pairs
    /// that are seen.
    pub fn mask_fn(mut self, sees: &'a (dyn Fn(&At) -> bool + Sync)) -> Self {
        self.mods.pairs = Some(sees);
        self
    }

    pub(crate) fn mods(&self) -> &HostMods<'a> {
        &self.mods
    }
}

impl<'a> DeviceMask<'a> {
    /// A score function of the caller's own, and what it captures.
    pub fn score_mod(mut self, score_mod: impl Into<BoundScoreMod<'a>>) -> Self {
        self.mods.set_score(score_mod.into());
        self
    }

    /// A mask of the caller's own, and what it captures.
    pub fn mask_mod(mut self, mask_mod: impl Into<BoundMaskMod<'a>>) -> Self {
        self.mods.set_pairs(mask_mod.into());
        self
    }

    pub(crate) fn mods(&self) -> &DeviceMods<'a> {
        &self.mods
    }

    /// Whether it says nothing.
    pub(crate) fn is_none(&self) -> bool {
        self.rules == RuleSet::NONE && self.mods.all().next().is_none()
    }

    /// The tensor in a slot, whatever its elements are.
    pub(crate) fn tensor(&self, slot: usize) -> Option<&TensorView<'a>> {
        self.tensors[slot].as_ref().map(|(Part::Number(t) | Part::Bool(t) | Part::Float(t))| t)
    }

    /// True if a rule's two tensors are the same bytes. Kernels bind such tensors once.
    pub(crate) fn shares(&self, id: Id) -> bool {
        if id.rule().tensors.len() != 2 {
            return false;
        }
        let [Some(a), Some(b)] = [0, 1].map(|n| self.tensor(slot(id, n))) else { return false };
        a.buffer == b.buffer && a.dtype == b.dtype && a.extent() == b.extent()
    }

    /// The number of storage buffers of its tensors.
    pub(crate) fn buffers(&self) -> usize {
        self.tensors().len() - self.rules().iter().filter(|id| self.shares(*id)).count()
    }

    /// Every tensor of the mask, with its name.
    pub(crate) fn tensors(&self) -> Vec<(&'static str, TensorView<'a>)> {
        let of_rules = (0..TENSORS).filter_map(|n| Some((BY_SLOT[n].name, *self.tensor(n)?)));
        of_rules.chain(self.mods.all().flat_map(|bound| bound.tensors())).collect()
    }
}
