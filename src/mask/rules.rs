//! The rules of a mask: one entry each, in the order in which kernels bind their tensors and
//! evaluate them.
//!
//! To add a rule, add an entry here, a method of [`Mask`](super::Mask) in `builder.rs`, and its
//! meaning in `attention/reference/mask.rs`. Checks, kernels and parameters follow from the entry.

use super::rule::{
    Axis, Bounds, Given, PER_HEAD, PER_KEY, PER_PAIR, PER_QUERY, PerRow, Rule, Tensor, mismatch,
};
use super::{Adds, Alignment, Ask, Turn};
use crate::kernel::shader;
use crate::tensor::Error;
use crate::tensor::dtype::Element;

/// Declares [`Id`] and the table that it indexes.
macro_rules! rules {
    ($($(#[$doc:meta])* $id:ident { $($field:ident: $value:expr,)* })*) => {
        /// A rule of a mask.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Id { $($(#[$doc])* $id,)* }

        const IDS: &[Id] = &[$(Id::$id,)*];

        /// The rules, by [`Id`].
        pub(crate) const RULES: &[Rule] = &[$(Rule { $($field: $value,)* ..Rule::NONE },)*];
    };
}

rules! {
    Causal {
        name: "causal",
        bounds: Bounds::exact("r.y = min(r.y, position + 1);"),
        asks: &[Ask::hides(Turn::Causal, "key_distance(q, j) > 0")],
    }
    Window {
        name: "window",
        bounds: Bounds::exact(
            "r.y = min(r.y, position + p.mask.right + 1);\n    r.x = max(r.x, position - p.mask.left);",
        )
        .lifted(),
        asks: &[
            Ask::hides(Turn::Band, "key_distance(q, j) < -p.mask.left"),
            Ask::hides(Turn::Band, "key_distance(q, j) > p.mask.right"),
        ],
    }
    Pattern {
        name: "pattern",
        wgsl: shader!("mask/pattern"),
        bounds: Bounds::wider("r = pattern_key_range(r, keys.x, position, h);").lifted(),
        asks: &[Ask::hides(Turn::Band, "!pattern_mask_mod(q, j)")],
        check: |given| given.settings.pattern.map_or(Ok(()), |p| p.check()),
    }
    ExcludeSelf {
        name: "exclude_self",
        asks: &[Ask::hides(Turn::Pair, "key_distance(q, j) == 0")],
    }
    Prefix {
        name: "prefix",
        tensors: &[Tensor { name: "prefix", element: Element::Number, axes: PER_QUERY }],
        wgsl: shader!("mask/prefix"),
        lifts: true,
        bounds: Bounds::exact("r = prefix_key_range(r, keys, b, h, i, alone);"),
        row: PerRow::of("prefix", "u32", "q.prefix = u32(prefix_end(keys, b, h, i));"),
        asks: &[Ask::shows(Turn::Prefix, "j < q.prefix")],
    }
    Lengths {
        name: "lengths",
        tensors: &[Tensor { name: "lengths", element: Element::Number, axes: PER_QUERY }],
        wgsl: shader!("mask/lengths"),
        bounds: Bounds::exact("r = lengths_key_range(r, keys, b, h, i, alone);"),
    }
    QueryOffsets {
        name: "query_offsets",
        tensors: &[Tensor {
            name: "query_offsets",
            element: Element::Number,
            axes: [Axis::Batch, Axis::One("heads"), Axis::One("length"), Axis::One("dim")],
        }],
        wgsl: shader!("mask/query_offsets"),
        place: "position = offset_position(b, i);",
        not_cached: Some(["query offsets with a cache", NO_POSITIONS_IN_CACHES]),
        listed_with: &[Id::Causal],
    }
    Packed {
        name: "packed",
        tensors: &[
            Tensor { name: "query_starts", element: Element::Number, axes: STARTS },
            Tensor { name: "key_starts", element: Element::Number, axes: STARTS },
        ],
        wgsl: shader!("mask/packed"),
        place: "let packed = packed_keys(b, i);\n    keys = packed.xy;\n    position = packed.z;",
        check: packed,
        not_cached: Some(NO_SEQUENCES_IN_CACHES),
    }
    Documents {
        name: "documents",
        tensors: &[
            Tensor { name: "query_documents", element: Element::Number, axes: PER_QUERY },
            Tensor { name: "key_documents", element: Element::Number, axes: PER_KEY },
        ],
        row: PerRow::of(
            "document",
            "u32",
            "q.document = query_documents_at(view_at(p.mask.query_documents, b, h, i, 0u));",
        ),
        numbers: Some([
            "query_documents_at(view_at(p.mask.query_documents, b, h, i, 0u))",
            "key_documents_at(view_at(p.mask.key_documents, b, h, 0u, j))",
        ]),
        asks: &[Ask::hides(
            Turn::Pair,
            "key_documents_at(view_at(p.mask.key_documents, q.b, q.h, 0u, j)) != q.document",
        )],
    }
    Blocks {
        name: "blocks",
        tensors: &[Tensor {
            name: "blocks",
            element: Element::Number,
            axes: [Axis::Batch, Axis::Heads, Axis::BlockRows, Axis::BlockCols],
        }],
        row: PerRow::of("block", "u32", ""),
        wgsl: shader!("mask/blocks"),
        lifts: true,
        before: "let block = block_at(q, j);",
        asks: &[Ask::hides(Turn::Block, "block == HIDDEN"), Ask::shows(Turn::Block, "block == FULL")],
        check: |given| match given.settings.block_size.contains(&0) {
            true => Err(Error::ZeroSize { tensor: "blocks", axis: "size" }),
            false => Ok(()),
        },
        not_cached: Some(NO_SEQUENCES_IN_CACHES),
    }
    AttnMask {
        name: "attn_mask",
        tensors: &[Tensor { name: "attn_mask", element: Element::Bool, axes: PER_PAIR }],
        hides: "!attn_mask_at(view_at(p.mask.attn_mask, b, h, i, j))",
        asks: &[Ask::hides(Turn::Pair, "!attn_mask_at(view_at(p.mask.attn_mask, q.b, q.h, q.i, j))")],
    }
    Tree {
        name: "tree",
        tensors: &[Tensor {
            name: "tree",
            element: Element::Bool,
            axes: [Axis::Batch, Axis::Heads, Axis::QLen, Axis::QLen],
        }],
        wgsl: shader!("mask/tree"),
        asks: &[Ask::hides(Turn::Pair, "!tree_mask_mod(q, j)")],
        check: tree,
        listed_with: &[Id::Causal],
    }
    KeyPaddingMask {
        name: "key_padding_mask",
        tensors: &[Tensor { name: "key_padding_mask", element: Element::Bool, axes: PER_PAIR }],
        hides: "!key_padding_mask_at(view_at(p.mask.key_padding_mask, b, h, i, j))",
        asks: &[Ask::hides(
            Turn::Pair,
            "!key_padding_mask_at(view_at(p.mask.key_padding_mask, q.b, q.h, q.i, j))",
        )],
    }
    Globals {
        name: "globals",
        tensors: &[Tensor { name: "globals", element: Element::Bool, axes: PER_KEY }],
        lifts: true,
        // A query whose position is not a key of its sequence is no global token.
        row: PerRow::of(
            "standing",
            "bool",
            "if position >= keys.x && position < keys.y {\n        \
             q.standing = globals_at(view_at(p.mask.globals, b, h, 0u, u32(position)));\n    }",
        ),
        asks: &[Ask::shows(Turn::Global, "q.standing || globals_at(view_at(p.mask.globals, q.b, q.h, 0u, j))")],
        listed_with: &[Id::Window],
    }
    Bias {
        name: "bias",
        tensors: &[Tensor { name: "bias", element: Element::Float, axes: PER_PAIR }],
        hides: "bias_at(view_at(p.mask.bias, b, h, i, j)) == p.mask.neg_inf",
        adds: Adds::outside_full_blocks("bias_at(view_at(p.mask.bias, q.b, q.h, q.i, j))"),
    }
    Alibi {
        name: "alibi",
        tensors: &[Tensor { name: "slopes", element: Element::Float, axes: PER_HEAD }],
        row: PerRow::of("slope", "f32", "q.slope = slopes_at(view_at(p.mask.slopes, b, h, 0u, 0u));"),
        wgsl: shader!("mask/alibi"),
        adds: Adds::everywhere("q.slope * alibi_distance(q, j)"),
    }
    Relative {
        name: "relative",
        tensors: &[Tensor {
            name: "relative",
            element: Element::Float,
            axes: [Axis::Batch, Axis::Heads, Axis::One("length"), Axis::Free("distances")],
        }],
        wgsl: shader!("mask/relative"),
        adds: Adds::everywhere("relative_bias(q, j)"),
        check: relative,
    }
    SinkLogits {
        name: "sink_logits",
        tensors: &[Tensor { name: "sink_logits", element: Element::Float, axes: PER_HEAD }],
        wgsl: shader!("mask/sink_logits"),
        joins_sum: true,
    }
}

const STARTS: [Axis; 4] = [Axis::Batch, Axis::One("heads"), Axis::One("length"), Axis::Free("sequences + 1")];

const NO_SEQUENCES_IN_CACHES: [&str; 2] = [
    "block maps and packed sequences with a cache",
    "a cache has separate sequences, which grow; use other rules or pass tensors",
];

pub(super) const NO_POSITIONS_IN_CACHES: &str =
    "the cache sets the positions of the queries; omit the offset";

fn packed(given: &Given) -> Result<(), Error> {
    if given.rules.has(Id::QueryOffsets) || matches!(given.settings.alignment, Alignment::Offset(_)) {
        let why =
            "each sequence has separate positions; use `Alignment::BottomRight` or `Alignment::TopLeft`";
        return Err(Error::Unsupported { what: "query offsets in packed sequences", why });
    }
    let [queries, keys] = [0, 1].map(|n| given.shape(Id::Packed, n));
    if queries[3] < 2 {
        return Err(mismatch(tensor(Id::Packed, 0), 3, "at least 2".to_string(), queries));
    }
    if keys[3] != queries[3] {
        return Err(mismatch(tensor(Id::Packed, 1), 3, queries[3].to_string(), keys));
    }
    Ok(())
}

fn tree(given: &Given) -> Result<(), Error> {
    if given.rules.has(Id::Packed) {
        let why =
            "older keys and drafts of a packed sequence cannot be distinguished; use `lengths` or a cache";
        return Err(Error::Unsupported { what: "a tree in packed sequences", why });
    }
    Ok(())
}

fn relative(given: &Given) -> Result<(), Error> {
    let table = given.shape(Id::Relative, 0);
    if table[3].is_multiple_of(2) {
        return Err(mismatch(tensor(Id::Relative, 0), 3, "2·r + 1, odd".to_string(), table));
    }
    Ok(())
}

impl Id {
    pub const fn rule(self) -> &'static Rule {
        &RULES[self as usize]
    }
}

/// The number of tensors that a mask may have.
pub(crate) const TENSORS: usize = first_slot(RULES.len());

const FIRST_SLOTS: &[usize; RULES.len()] = &{
    let mut first = [0; RULES.len()];
    let mut n = 0;
    while n < first.len() {
        first[n] = first_slot(n);
        n += 1;
    }
    first
};

/// Returns the slot of the first tensor of rule `n`.
const fn first_slot(n: usize) -> usize {
    let (mut slots, mut rule) = (0, 0);
    while rule < n {
        slots += RULES[rule].tensors.len();
        rule += 1;
    }
    slots
}

/// Returns the slot of the `n`-th tensor of a rule.
pub(crate) const fn slot(id: Id, n: usize) -> usize {
    FIRST_SLOTS[id as usize] + n
}

/// Returns the `n`-th tensor of a rule.
pub(crate) const fn tensor(id: Id, n: usize) -> &'static Tensor {
    &id.rule().tensors[n]
}

/// All tensors, by slot.
pub(crate) const BY_SLOT: &[&Tensor; TENSORS] = &{
    let mut all = [tensor(Id::Prefix, 0); TENSORS];
    let mut rule = 0;
    while rule < RULES.len() {
        let mut n = 0;
        while n < RULES[rule].tensors.len() {
            all[first_slot(rule) + n] = &RULES[rule].tensors[n];
            n += 1;
        }
        rule += 1;
    }
    all
};

/// A set of rules of a mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct RuleSet(u32);

impl RuleSet {
    pub const NONE: Self = RuleSet(0);

    pub const fn has(self, id: Id) -> bool {
        self.0 >> id as u32 & 1 == 1
    }

    #[must_use]
    pub const fn with(self, id: Id) -> Self {
        RuleSet(self.0 | 1 << id as u32)
    }

    /// Returns the rules that both sets have.
    pub const fn and(self, other: Self) -> Self {
        RuleSet(self.0 & other.0)
    }

    /// Returns the rules for which `keep` is true.
    pub fn only(self, keep: impl Fn(&Rule) -> bool) -> Self {
        self.iter().filter(|id| keep(id.rule())).fold(Self::NONE, Self::with)
    }

    /// True if `is` is true for a rule of the set.
    pub fn any(self, is: impl Fn(&Rule) -> bool) -> bool {
        self.iter().any(|id| is(id.rule()))
    }

    /// Returns the rules in the table's order.
    pub fn iter(self) -> impl Iterator<Item = Id> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let first = (left != 0).then(|| IDS[left.trailing_zeros() as usize]);
            left &= left.wrapping_sub(1);
            first
        })
    }

    /// Returns all rules.
    pub fn all() -> impl Iterator<Item = Id> {
        IDS.iter().copied()
    }
}

impl FromIterator<Id> for RuleSet {
    fn from_iter<I: IntoIterator<Item = Id>>(ids: I) -> Self {
        ids.into_iter().fold(Self::NONE, Self::with)
    }
}

const _: () = assert!(RULES.len() <= 32, "RuleSet has 32 bits");
