//! Masks: the keys that a query may see, and the terms that are added to its scores.

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

/// A mask: rules that decide which keys each query sees, and terms that are added to the scores.
///
/// In a tensor, an axis of 1 broadcasts to the shape that its method names. Kernels compute
/// `scale · q·k`, then apply [`score_mod`](Mask::score_mod), softcap, bias, ALiBi and relative
/// bias. Then they hide pairs. A query that sees no key has output 0 and lse −∞.
///
/// Kernels add the terms to the score in f32, one after the other. A sum below `f32::MIN` is −∞ and
/// hides the pair; `f32::MIN` itself is finite. The reference has the same rule.
///
/// Each tensor of a mask takes a storage buffer, as do tensors that mods capture and a tensor of
/// dropout. Documents and packed sequences take one buffer if queries and keys share the same
/// bytes, as in self-attention. WebGPU's default limit is 8 storage buffers per kernel. A forward
/// call with lse has 6 left for these tensors. A backward call has 2 left, and sinks need none
/// there. A call with more tensors is an [`Error::Limit`](crate::Error::Limit). Then request a
/// larger `max_storage_buffers_per_shader_stage`, or combine masks into one `bias` or
/// [`mask_mod`](Mask::mask_mod).
///
/// A query sees a key if both conditions hold:
///
/// - `lengths`, `attn_mask`, `key_padding_mask`, `tree`, `documents`, `packed`, `exclude_self` and
///   [`mask_mod`](Mask::mask_mod) all permit the pair.
/// - The key lies before `prefix`, or the causal rule, `window` and `pattern` all permit the pair.
///   `globals` overrides `window` and `pattern`.
///
/// `blocks` takes precedence. A hidden block hides its pairs. In a full block only `lengths`,
/// `packed`, the causal rule and `prefix` apply.
///
/// On a device the parts are [`TensorView`]s ([`DeviceMask`]). On the host they are slices
/// ([`HostMask`]). A mask that is built apart from its call may need one of these types as an
/// annotation.
///
/// ```
/// use wgpu_attention::Mask;
/// use wgpu_attention::mask::HostMask;
/// let mask: HostMask = Mask::causal().window(128, 0);
/// ```
///
/// For custom functions, as in FlexAttention, see [`ScoreMod`] and [`MaskMod`].
#[doc(alias = "mask_mod")]
#[doc(alias = "score_mod")]
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Mask<Lengths, Keep, Bias, Mods = ()> {
    rules: RuleSet,
    settings: Settings,
    /// The tensors of the rules, by slot.
    tensors: [Option<Part<Lengths, Keep, Bias>>; TENSORS],
    /// The custom functions.
    mods: Mods,
}

/// A tensor of a mask, by the kind of its elements.
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
    /// Makes a mask without rules: every query sees every key.
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
    /// Returns the same rules with other tensors. It calls the functions with each tensor and its
    /// name, in a fixed order.
    ///
    /// The result lacks the functions of [`score_mod`](Mask::score_mod),
    /// [`mask_mod`](Mask::mask_mod), [`score_fn`](Mask::score_fn) and [`mask_fn`](Mask::mask_fn).
    /// Host and device do not share them.
    ///
    /// # Errors
    /// The first error that a function returns.
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

    /// Returns the same rules by reference, without the functions of [`score_mod`](Mask::score_mod)
    /// and [`mask_mod`](Mask::mask_mod).
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

    /// Returns the `n`-th tensor of a rule whose elements are numbers.
    pub(crate) fn numbers(&self, id: Id, n: usize) -> Option<&L> {
        match &self.tensors[slot(id, n)] {
            Some(Part::Number(t)) => Some(t),
            _ => None,
        }
    }

    /// Returns the tensor of a rule whose elements are booleans.
    pub(crate) fn bools(&self, id: Id) -> Option<&K> {
        match &self.tensors[slot(id, 0)] {
            Some(Part::Bool(t)) => Some(t),
            _ => None,
        }
    }

    /// Returns the tensor of a rule whose elements are floats.
    pub(crate) fn floats(&self, id: Id) -> Option<&B> {
        match &self.tensors[slot(id, 0)] {
            Some(Part::Float(t)) => Some(t),
            _ => None,
        }
    }
}

impl<'a> HostMask<'a> {
    /// Sets a custom score function of scale · q·k and the pair. It must compute the same as the
    /// [`ScoreMod`] of the device.
    pub fn score_fn(mut self, score: &'a (dyn Fn(f64, &At) -> f64 + Sync)) -> Self {
        self.mods.score = Some(score);
        self
    }

    /// Sets the derivative of [`score_fn`](Self::score_fn) by the score, for the backward pass.
    /// Without it the reference takes differences.
    pub fn score_fn_slope(mut self, slope: &'a (dyn Fn(f64, &At) -> f64 + Sync)) -> Self {
        self.mods.slope = Some(slope);
        self
    }

    /// Sets a custom mask function, which returns `true` for pairs that are seen. It must compute
    /// the same as the [`MaskMod`] of the device.
    pub fn mask_fn(mut self, sees: &'a (dyn Fn(&At) -> bool + Sync)) -> Self {
        self.mods.pairs = Some(sees);
        self
    }

    pub(crate) fn mods(&self) -> &HostMods<'a> {
        &self.mods
    }
}

impl<'a> DeviceMask<'a> {
    /// Sets a custom score function, with its captured tensors and uniforms.
    pub fn score_mod(mut self, score_mod: impl Into<BoundScoreMod<'a>>) -> Self {
        self.mods.set_score(score_mod.into());
        self
    }

    /// Sets a custom mask function, with its captured tensors and uniforms.
    pub fn mask_mod(mut self, mask_mod: impl Into<BoundMaskMod<'a>>) -> Self {
        self.mods.set_pairs(mask_mod.into());
        self
    }

    pub(crate) fn mods(&self) -> &DeviceMods<'a> {
        &self.mods
    }

    /// True if the mask has no rules and no functions.
    pub(crate) fn is_none(&self) -> bool {
        self.rules == RuleSet::NONE && self.mods.all().next().is_none()
    }

    /// Returns the tensor in a slot, for any kind of element.
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

    /// Returns the number of storage buffers that the rules' tensors take.
    pub(crate) fn buffers(&self) -> usize {
        self.tensors().len() - self.rules().iter().filter(|id| self.shares(*id)).count()
    }

    /// Returns every tensor of the mask, with its name.
    pub(crate) fn tensors(&self) -> Vec<(&'static str, TensorView<'a>)> {
        let of_rules = (0..TENSORS).filter_map(|n| Some((BY_SLOT[n].name, *self.tensor(n)?)));
        of_rules.chain(self.mods.all().flat_map(|bound| bound.tensors())).collect()
    }
}
