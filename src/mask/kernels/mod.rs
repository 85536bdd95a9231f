//! Masks as WGSL: the rules of a call, and the tensors that its kernels bind for them.

pub(crate) mod ask_mask;
pub(crate) mod classify;
mod compose;
pub(crate) mod dropout;
mod mods;
mod params;

use mods::captured;
pub(crate) use params::MaskParams;

use std::fmt;

use super::mods::{Dtypes, Interned};
use super::{DeviceMask, Id, RuleSet, Turn, slot};
use crate::cache::kernels::cache::CacheVariant;
use crate::cache::storage::LayoutKind;
use crate::device::DeviceFacts;
use crate::kernel::{Binding, Declared, FLOATS, Group, GroupKey, Width};
use crate::tensor::dtype::Element;
use crate::tensor::{DType, Window};

#[cfg(test)]
pub(crate) use params::pattern;

/// The rules of a call's mask. Absent rules leave no trace in the shader.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct MaskVariant {
    rules: RuleSet,
    /// Rules of floats whose tensor is F16.
    halves: RuleSet,
    /// Rules of floats whose tensor is BF16.
    bfloats: RuleSet,
    /// Rules whose two tensors are the same bytes, bound once: documents and packed sequences of
    /// self-attention.
    shared: RuleSet,
    softcap: bool,
    pub appended: bool,
    /// True if keys are in a cache, whose lengths count.
    cached: bool,
    /// True if that cache is a ring, whose first tokens stay.
    ring: bool,
    /// True if tokens may have been removed from that cache.
    compacts: bool,
    /// True if the kernel stores the block of a query and its current keys in `Query::block`.
    knows_blocks: bool,
    /// A custom score function, and the dtypes of its captured tensors.
    score: Option<(Interned, Dtypes)>,
    /// A custom mask function, and the dtypes of its captured tensors.
    pairs: Option<(Interned, Dtypes)>,
}

impl MaskVariant {
    pub fn of(mask: &DeviceMask, softcap: bool, appended: bool) -> Self {
        let rules = mask.rules();
        let of = |dtype| {
            let is_one = |id: &Id| mask.floats(*id).is_some_and(|t| t.dtype == dtype);
            rules.iter().filter(is_one).collect()
        };
        let (halves, bfloats) = (of(DType::F16), of(DType::BF16));
        let shared = rules.iter().filter(|id| mask.shares(*id)).collect();
        let [score, pairs] =
            [mask.mods().score, mask.mods().pairs].map(|m| m.map(|m| (m.interned, m.dtypes())));
        MaskVariant { rules, halves, bfloats, shared, softcap, appended, score, pairs, ..Self::default() }
    }

    /// Returns these rules alone; their floats are F32.
    pub fn with_rules(rules: impl IntoIterator<Item = Id>) -> Self {
        MaskVariant { rules: rules.into_iter().collect(), ..Self::default() }
    }

    /// Returns a head's sink logit alone, if it has one.
    pub fn with_sink_logits(dtype: Option<DType>) -> Self {
        let only = |used: bool| used.then_some(Id::SinkLogits).into_iter().collect();
        let of = |wanted| only(dtype == Some(wanted));
        let (rules, halves, bfloats) = (only(dtype.is_some()), of(DType::F16), of(DType::BF16));
        MaskVariant { rules, halves, bfloats, ..Self::default() }
    }

    pub fn softcapped(self) -> Self {
        MaskVariant { softcap: true, ..self }
    }

    /// Returns the same rules for keys in a cache.
    pub fn in_cache(self, cache: &CacheVariant) -> Self {
        let ring = cache.layout_kind == LayoutKind::Ring;
        MaskVariant { cached: true, ring, compacts: cache.compacts, ..self }
    }

    /// Returns the same rules for a kernel that traverses the map column by column.
    pub fn knowing_blocks(self) -> Self {
        MaskVariant { knows_blocks: true, ..self }
    }

    /// Returns only rules that bound the range of keys. The tiled products use no others.
    pub fn range_only(self) -> Self {
        let lifts = self.lifts_band();
        let bounds = |id: &Id| {
            let rule = id.rule();
            !rule.place.is_empty() || rule.bounds.exact && !(rule.bounds.lifted && lifts)
        };
        let rules = self.rules.iter().filter(bounds).collect();
        MaskVariant { rules, shared: self.shared.and(rules), appended: self.appended, ..Self::default() }
    }

    /// Returns only rules that a block map represents: those that hide pairs, and the bias.
    pub fn blocks_only(self) -> Self {
        let rules =
            self.rules.only(|rule| !rule.joins_sum && rule.adds.is_none_or(|adds| !adds.in_full_blocks));
        MaskVariant { softcap: false, appended: false, score: None, ..self.with_only(rules) }
    }

    /// Returns only the custom score function and the softcap, if there are any.
    pub fn softcap_only(self) -> Self {
        let Self { softcap, score, .. } = self;
        let places = self.rules.only(|rule| !rule.place.is_empty() && rule.bounds.wgsl.is_empty());
        let rules = if score.is_some() { places } else { RuleSet::NONE };
        let (shared, appended) = (self.shared.and(rules), self.appended && score.is_some());
        MaskVariant { softcap, score, appended, rules, shared, ..Self::default() }
    }

    /// Returns only rules that hide keys or change their scores.
    pub fn scores_only(self) -> Self {
        let rules = self.rules.only(|rule| !rule.joins_sum);
        self.with_only(rules)
    }

    /// Returns the mask with only these of its rules.
    fn with_only(self, rules: RuleSet) -> Self {
        let [halves, bfloats, shared] = [self.halves, self.bfloats, self.shared].map(|set| set.and(rules));
        MaskVariant { rules, halves, bfloats, shared, ..self }
    }

    pub fn has(&self, id: Id) -> bool {
        self.rules.has(id)
    }

    /// True if a cache can have these rules.
    pub fn fits_caches(&self) -> bool {
        !self.appended && !self.rules.any(|rule| rule.not_cached.is_some())
    }

    /// True if some keys are exempt from window and pattern. The keys that a query sees are then no
    /// interval, and kernels evaluate these rules pair by pair.
    fn lifts_band(&self) -> bool {
        self.ring || self.rules.any(|rule| rule.lifts)
    }

    /// True if a rule depends on single pairs. Rules that only bound the range of a query's keys do
    /// not. Appended keys lie outside of that range, so with them kernels evaluate every pair.
    pub fn is_per_pair(&self) -> bool {
        let lifts = self.lifts_band();
        let asks = |id: Id| {
            let rule = id.rule();
            let (bounds, always) = (rule.bounds, rule.asks_at(Turn::Block) || rule.asks_at(Turn::Pair));
            always || rule.adds.is_some() || bounds.lifted && (lifts || !bounds.exact)
        };
        let custom = self.mods().next().is_some();
        self.softcap || self.appended || custom || self.asks_positions() || self.rules.iter().any(asks)
    }

    /// True if kernels read the position of each key. Its index is not enough, because tokens
    /// before it may have been removed.
    fn asks_positions(&self) -> bool {
        let on_pairs = |id: Id| id != Id::SinkLogits;
        self.compacts && (self.mods().next().is_some() || self.rules.iter().any(on_pairs))
    }

    /// True if the range of a query's keys alone decides what it sees, and no score changes.
    pub fn is_range(&self) -> bool {
        !self.is_per_pair() && !self.has(Id::Blocks) && !self.has(Id::SinkLogits)
    }

    /// True if the score of a pair that is seen may change.
    pub fn changes_scores(&self) -> bool {
        self.softcap
            || self.appended
            || self.mods().next().is_some()
            || self.rules.any(|rule| rule.adds.is_some())
    }

    /// True if scores also change in full blocks.
    pub fn mods_full_blocks(&self) -> bool {
        let adds = || self.rules.any(|rule| rule.adds.is_some_and(|adds| adds.in_full_blocks));
        self.softcap || self.score.is_some() || adds()
    }

    fn dtype(&self, id: Id, element: Element) -> DType {
        match element {
            Element::Number => DType::U32,
            Element::Bool => DType::Bool,
            Element::Float if self.halves.has(id) => DType::F16,
            Element::Float if self.bfloats.has(id) => DType::BF16,
            Element::Float => DType::F32,
        }
    }

    /// Returns no rule, each rule alone, and sets of rules that interact. With q, k, v and out, no
    /// set takes more than eight buffers.
    pub fn all() -> Vec<Self> {
        use Id::*;
        let mut all = vec![Self::default()];
        for id in RuleSet::all() {
            let alone = Self::with_rules(id.rule().listed_with.iter().copied().chain([id]));
            all.push(alone);
            if id.rule().tensors.iter().any(|t| t.element == Element::Float) {
                all.push(MaskVariant { halves: RuleSet::NONE.with(id), ..alone });
                all.push(MaskVariant { bfloats: RuleSet::NONE.with(id), ..alone });
            }
        }
        let with = |rules: &[Id]| Self::with_rules(rules.iter().copied());
        let by_position = |rules: &[Id]| {
            Self::with_rules([Causal, Window, Pattern, ExcludeSelf].iter().chain(rules).copied())
        };
        all.extend([
            MaskVariant { softcap: true, ..Self::default() },
            MaskVariant { appended: true, ..Self::default() },
            with(&[Causal, Window, Prefix]),
            MaskVariant { softcap: true, appended: true, ..by_position(&[Lengths, Prefix, AttnMask, Bias]) },
            MaskVariant { appended: true, ..by_position(&[Packed, Documents]) },
            MaskVariant { appended: true, ..by_position(&[Blocks, KeyPaddingMask, Globals, Alibi]) },
            MaskVariant { softcap: true, ..with(&[Blocks, Bias, Relative, SinkLogits]) },
            with(&[Packed, Prefix, Lengths, Causal, Window]),
            MaskVariant { shared: RuleSet::NONE.with(Documents), ..with(&[Documents]) },
            MaskVariant { shared: RuleSet::NONE.with(Packed), ..with(&[Packed, Causal]) },
        ]);
        all
    }

    /// Returns the storage buffers of these rules.
    pub fn bindings(&self) -> Vec<Binding> {
        let of_rule = |id: Id| {
            let tensors = id.rule().tensors[..self.bound_tensors(id)].iter();
            tensors.map(move |t| Binding::read(t.name, self.dtype(id, t.element), Width::One))
        };
        let captured = self.mods().flat_map(|(interned, dtypes)| {
            let present = dtypes.into_iter().flatten().enumerate();
            present.map(move |(n, dtype)| Binding::read(captured(interned, n), dtype, Width::One))
        });
        let block = self.has_mods_block().then(|| Binding::uniform("mods", "Mods"));
        self.rules.iter().flat_map(of_rule).chain(captured).chain(block).collect()
    }

    /// Returns the number of bound tensors of a rule.
    fn bound_tensors(&self, id: Id) -> usize {
        if self.shared.has(id) { 1 } else { id.rule().tensors.len() }
    }

    /// Returns the accessors of tensors that are bound as the first tensor of their rule.
    fn shared_wgsl(&self) -> String {
        let accessor = |id: Id| match id.rule().tensors {
            [first, second] => {
                format!("\nfn {}_at(o: u32) -> u32 {{\n    return {}_at(o);\n}}\n", second.name, first.name)
            }
            _ => String::new(),
        };
        self.shared.iter().map(accessor).collect()
    }

    /// Returns the custom functions.
    fn mods(&self) -> impl Iterator<Item = (Interned, Dtypes)> + use<> {
        [self.score, self.pairs].into_iter().flatten()
    }

    /// Returns the windows of `mask` for the [`bindings`](Self::bindings).
    pub fn windows<'a>(&self, mask: &DeviceMask<'a>, device: &DeviceFacts) -> Vec<Window<'a>> {
        let slots = self.rules.iter().flat_map(|id| (0..self.bound_tensors(id)).map(move |n| slot(id, n)));
        let of_rules = slots.filter_map(|slot| Some(mask.tensor(slot)?.window(device)));
        let captured =
            self.bound(mask).flat_map(|bound| bound.tensors()).map(|(_, view)| view.window(device));
        of_rules.chain(captured).collect()
    }
}

impl GroupKey for MaskVariant {
    fn declare(&self, to: &mut Declared) {
        to.bindings.extend(self.bindings());
    }
}

/// The rules of a call's mask that a kernel has.
#[derive(Clone)]
pub(crate) struct Masked<'a> {
    variant: MaskVariant,
    params: MaskParams,
    windows: Vec<Window<'a>>,
    mods: Vec<u8>,
}

impl<'a> Masked<'a> {
    /// Takes the tensors of `mask` that `variant` names, and the numbers of the whole call.
    pub fn new(
        variant: MaskVariant,
        mask: &DeviceMask<'a>,
        params: MaskParams,
        device: &DeviceFacts,
    ) -> Self {
        let (windows, mods) = (variant.windows(mask, device), variant.mods_bytes(mask, device));
        Masked { variant, params, windows, mods }
    }
}

impl<'a> Group<'a> for Masked<'a> {
    type Key = MaskVariant;
    type Uniform = MaskParams;

    fn key(&self) -> MaskVariant {
        self.variant
    }

    fn uniform(&self) -> MaskParams {
        self.params
    }

    fn windows(&self) -> Vec<Window<'a>> {
        self.windows.clone()
    }

    fn second_uniform(&self) -> &[u8] {
        &self.mods
    }
}

/// Prints each rule by name, as if it were a field. Names of kernels use this text.
impl fmt::Debug for MaskVariant {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut fields = f.debug_struct("MaskVariant");
        for id in self.rules.iter() {
            let rule = id.rule();
            match rule.tensors {
                [t] if t.element == Element::Float => fields.field(rule.name, &self.dtype(id, t.element)),
                _ if self.shared.has(id) => fields.field(rule.name, &format_args!("shared")),
                _ => fields.field(rule.name, &true),
            };
        }
        for (interned, dtypes) in self.mods() {
            fields.field(interned.prefix(), &dtypes);
        }
        let MaskVariant { softcap, appended, cached, ring, compacts, .. } = *self;
        for (name, used) in [
            ("softcap", softcap),
            ("appended", appended),
            ("cached", cached),
            ("ring", ring),
            ("compacts", compacts),
        ] {
            fields.field(name, &used);
        }
        fields.finish()
    }
}

/// Returns the float types of listed kernels with `mask`. With a mask BF16 is absent, because no
/// mask changes its loads and stores.
pub(crate) fn floats_beside(mask: &MaskVariant) -> &'static [DType] {
    if *mask == MaskVariant::default() { &FLOATS } else { &FLOATS[..2] }
}
