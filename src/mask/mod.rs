//! Which keys a query may see, and what is added to its score.

mod builder;
mod check;
mod host;
mod rule;
mod rules;
mod settings;

pub(crate) use check::{check_map, check_whole_map};
pub use host::HostTensor;
use rule::Tensor;
pub(crate) use rule::{Adds, Ask, Kind, Turn};
pub(crate) use rules::{BY_SLOT, Id, RULES, RuleSet, TENSORS, slot};
pub use settings::Alignment;
pub(crate) use settings::Settings;

use crate::tensor::TensorView;

/// A mask: a set of rules that must all permit a pair, and what is added to the scores.
///
/// Every tensor broadcasts to the shape its method names where its own size is 1. The order is
/// `scale · q·k`, then softcap, then bias, ALiBi and relative bias, then permission. A query that may see no
/// key has output 0 and lse −∞.
///
/// A pair must be permitted by all of `lengths`, `attn_mask`, `key_padding_mask`, `tree`, `documents`, `packed` and
/// `exclude_self`, and stand before `prefix` or be permitted by the causal rule and by `window` and `pattern`;
/// `globals` lifts the latter two. `blocks` goes before: what it calls hidden is hidden, what it calls full is asked
/// only for `lengths`, `packed`, the causal rule and `prefix`.
///
/// On a device the parts are [`TensorView`]s ([`DeviceMask`]), on the host slices ([`HostMask`]); a mask that
/// is made apart from its call may need one of these as its type.
///
/// ```
/// use wgpu_attention::{HostMask, Mask};
/// let mask: HostMask = Mask::causal().window(128, 0);
/// ```
///
/// A function of your own, as FlexAttention takes (`mask_mod`, `score_mod`), cannot be given.
#[doc(alias = "mask_mod")]
#[doc(alias = "score_mod")]
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Mask<Lengths, Keep, Bias> {
    rules: RuleSet,
    settings: Settings,
    /// The tensors of the rules, by slot.
    tensors: [Option<Part<Lengths, Keep, Bias>>; TENSORS],
}

/// A tensor of a mask, by what its elements are.
#[derive(Clone, Copy, Debug)]
enum Part<L, K, B> {
    Number(L),
    Bool(K),
    Float(B),
}

/// A mask whose parts are in device memory.
pub type DeviceMask<'a> = Mask<TensorView<'a>, TensorView<'a>, TensorView<'a>>;

/// A mask whose parts are slices.
pub type HostMask<'a> = Mask<HostTensor<'a, u32>, HostTensor<'a, bool>, HostTensor<'a, f32>>;

impl<L, K, B> Default for Mask<L, K, B> {
    fn default() -> Self {
        Self::none()
    }
}

impl<L, K, B> Mask<L, K, B> {
    /// Every query sees every key.
    pub fn none() -> Self {
        Mask { rules: RuleSet::NONE, settings: Settings::default(), tensors: [const { None }; TENSORS] }
    }

    /// The same rules with other tensors: each is given with its name, in a fixed order.
    ///
    /// # Errors
    /// The first that a function returns.
    pub fn try_map<L2, K2, B2, E>(
        self,
        mut lengths: impl FnMut(&'static str, L) -> Result<L2, E>,
        mut bools: impl FnMut(&'static str, K) -> Result<K2, E>,
        mut bias: impl FnMut(&'static str, B) -> Result<B2, E>,
    ) -> Result<Mask<L2, K2, B2>, E> {
        let mut tensors = [const { None }; TENSORS];
        for ((to, from), Tensor { name, .. }) in tensors.iter_mut().zip(self.tensors).zip(BY_SLOT) {
            *to = match from {
                None => None,
                Some(Part::Number(t)) => Some(Part::Number(lengths(name, t)?)),
                Some(Part::Bool(t)) => Some(Part::Bool(bools(name, t)?)),
                Some(Part::Float(t)) => Some(Part::Float(bias(name, t)?)),
            };
        }
        Ok(Mask { rules: self.rules, settings: self.settings, tensors })
    }

    /// The same mask by reference.
    pub fn as_ref(&self) -> Mask<&L, &K, &B> {
        let tensors = self.tensors.each_ref().map(|part| {
            part.as_ref().map(|part| match part {
                Part::Number(t) => Part::Number(t),
                Part::Bool(t) => Part::Bool(t),
                Part::Float(t) => Part::Float(t),
            })
        });
        Mask { rules: self.rules, settings: self.settings, tensors }
    }

    pub(crate) fn rules(&self) -> RuleSet {
        self.rules
    }

    /// Whether it says nothing.
    pub(crate) fn is_none(&self) -> bool {
        self.rules == RuleSet::NONE
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

impl<'a> DeviceMask<'a> {
    /// The tensor in a slot, whatever its elements are.
    pub(crate) fn tensor(&self, slot: usize) -> Option<&TensorView<'a>> {
        self.tensors[slot].as_ref().map(|(Part::Number(t) | Part::Bool(t) | Part::Float(t))| t)
    }

    /// Every tensor of the mask, with its name.
    pub(crate) fn tensors(&self) -> Vec<(&'static str, TensorView<'a>)> {
        (0..TENSORS).filter_map(|n| Some((BY_SLOT[n].name, *self.tensor(n)?))).collect()
    }
}
