//! What there is to say of a rule.

use super::{Id, RuleSet, Settings, TENSORS, slot};
use crate::tensor::Error;
use crate::tensor::dtype::Element;

/// A rule of a mask. WGSL texts speak of what `mask/kernels/compose.rs` has around them.
#[derive(Clone, Copy)]
pub(crate) struct Rule {
    /// In names of kernels.
    pub name: &'static str,
    pub tensors: &'static [Tensor],
    /// What the host refuses, beyond dtypes and axes of the tensors.
    pub check: fn(&Given) -> Result<(), Error>,
    /// What a cache cannot have and why, if it cannot.
    pub not_cached: Option<[&'static str; 2]>,
    /// Functions that the other texts call.
    pub wgsl: &'static str,
    /// Moves a query: sets `keys` and `position` of query `i`.
    pub place: &'static str,
    pub bounds: Bounds,
    pub row: Option<PerRow>,
    /// Whether keys that it shows are seen whatever the rules say whose bounds are `lifted`.
    pub lifts: bool,
    /// A condition on query `i` of head `h` and key `j`, by the rule's first tensor alone: a pair
    /// for which it holds is hidden. Kernels skip tiles in which it holds for every pair. Empty if
    /// the rule has no such condition.
    pub hides: &'static str,
    /// The numbers of query `i` of head `h` and of key `j`, if the rule hides every pair of
    /// different numbers. Kernels skip tiles whose queries and keys have no number in common.
    pub numbers: Option<[&'static str; 2]>,
    /// What its asks share.
    pub before: &'static str,
    pub asks: &'static [Ask],
    pub adds: Option<Adds>,
    /// Whether it defines `with_sink`, which adds to the sum of a query's weights.
    pub joins_sum: bool,
    /// Rules without which it does nothing, where kernels are listed for tools and tests.
    pub listed_with: &'static [Id],
}

impl Rule {
    pub const NONE: Rule = Rule {
        name: "",
        tensors: &[],
        check: |_| Ok(()),
        not_cached: None,
        wgsl: "",
        place: "",
        bounds: Bounds::NONE,
        row: None,
        lifts: false,
        hides: "",
        numbers: None,
        before: "",
        asks: &[],
        adds: None,
        joins_sum: false,
        listed_with: &[],
    };

    pub fn asks_at(&self, turn: Turn) -> bool {
        self.asks.iter().any(|ask| ask.turn == turn)
    }
}

/// A tensor of a rule, and of the kernels that have the rule.
#[derive(Clone, Copy)]
pub(crate) struct Tensor {
    pub name: &'static str,
    pub element: Element,
    pub axes: [Axis; 4],
}

/// What an axis is as long as; but for the last two it may be 1 and repeat.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Axis {
    Batch,
    Heads,
    QLen,
    KvLen,
    BlockRows,
    BlockCols,
    /// 1, by a name.
    One(&'static str),
    /// Any length, or what the rule's check says.
    Free(&'static str),
}

pub(crate) const PER_QUERY: [Axis; 4] = [Axis::Batch, Axis::Heads, Axis::QLen, Axis::One("dim")];
pub(crate) const PER_KEY: [Axis; 4] = [Axis::Batch, Axis::Heads, Axis::One("length"), Axis::KvLen];
pub(crate) const PER_PAIR: [Axis; 4] = [Axis::Batch, Axis::Heads, Axis::QLen, Axis::KvLen];
pub(crate) const PER_HEAD: [Axis; 4] = [Axis::Batch, Axis::Heads, Axis::One("length"), Axis::One("dim")];

/// How a rule narrows or widens `r`, the interval of keys that holds all which a query sees.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    /// Empty if it does not.
    pub wgsl: &'static str,
    /// Whether the interval says all that the rule has to say: then no pair is asked.
    pub exact: bool,
    /// Whether rules that lift may show keys outside of it: with one of those it bounds nothing and
    /// pairs are asked.
    pub lifted: bool,
}

impl Bounds {
    const NONE: Self = Bounds { wgsl: "", exact: false, lifted: false };

    /// The interval holds the keys that the rule permits, and no others.
    pub const fn exact(wgsl: &'static str) -> Self {
        Bounds { wgsl, exact: true, lifted: false }
    }

    /// It holds others too.
    pub const fn wider(wgsl: &'static str) -> Self {
        Bounds { wgsl, exact: false, lifted: false }
    }

    pub const fn lifted(self) -> Self {
        Bounds { lifted: true, ..self }
    }
}

/// What a rule keeps of a query: a member of `Query`.
#[derive(Clone, Copy)]
pub(crate) struct PerRow {
    pub name: &'static str,
    pub ty: &'static str,
    /// Sets the member of `q`.
    pub wgsl: &'static str,
}

impl PerRow {
    pub const fn of(name: &'static str, ty: &'static str, wgsl: &'static str) -> Option<Self> {
        Some(PerRow { name, ty, wgsl })
    }
}

/// A condition on query `q` and key `j`. The first that holds answers, in the order of turns and of
/// the table.
#[derive(Clone, Copy)]
pub(crate) struct Ask {
    pub turn: Turn,
    pub wgsl: &'static str,
    pub sees: bool,
}

impl Ask {
    pub const fn hides(turn: Turn, wgsl: &'static str) -> Self {
        Ask { turn, wgsl, sees: false }
    }

    pub const fn shows(turn: Turn, wgsl: &'static str) -> Self {
        Ask { turn, wgsl, sees: true }
    }
}

/// When a condition is asked. From `Prefix` on only where the interval does not say it all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The map of blocks: what it calls full or hidden is asked no further.
    Block,
    /// What hides single pairs, whatever else shows them.
    Pair,
    /// Shown whatever causal rule and band say.
    Prefix,
    /// Asked where there is a prefix, to which the interval reaches.
    Causal,
    /// Shown whatever the band says.
    Global,
    /// Rules whose bounds are `lifted`: window and pattern.
    Band,
}

/// What a rule adds to the score of query `q` and key `j`.
#[derive(Clone, Copy)]
pub(crate) struct Adds {
    pub wgsl: &'static str,
    /// Whether full blocks have it too; the others are `bias_of`.
    pub in_full_blocks: bool,
}

impl Adds {
    pub const fn everywhere(wgsl: &'static str) -> Option<Self> {
        Some(Adds { wgsl, in_full_blocks: true })
    }

    pub const fn outside_full_blocks(wgsl: &'static str) -> Option<Self> {
        Some(Adds { wgsl, in_full_blocks: false })
    }
}

/// A mask without its memory.
pub(crate) struct Given<'a> {
    pub rules: RuleSet,
    pub settings: &'a Settings,
    pub shapes: [Option<[usize; 4]>; TENSORS],
}

impl Given<'_> {
    /// The shape of the `n`-th tensor of a rule that the mask has.
    pub fn shape(&self, id: Id, n: usize) -> [usize; 4] {
        self.shapes[slot(id, n)].unwrap_or([1; 4])
    }

    /// What concerns more than one tensor, or more than dtypes and axes.
    pub fn check(&self) -> Result<(), Error> {
        self.settings.check()?;
        self.rules.iter().try_for_each(|id| (id.rule().check)(self))
    }
}

/// `shape[axis]` is not what `tensor` needs there.
pub(super) fn mismatch(tensor: &Tensor, axis: usize, expected: String, shape: [usize; 4]) -> Error {
    let wanted = tensor.axes.map(|axis| match axis {
        Axis::One(_) => "1".to_string(),
        Axis::Free(name) => name.to_string(),
        other => format!("{} or 1", other.name()),
    });
    let wanted = Some(format!("[{}]", wanted.join(", ")));
    Error::Shape {
        tensor: tensor.name,
        axis: tensor.axes[axis].name(),
        expected,
        got: shape[axis],
        shape,
        wanted,
    }
}

impl Axis {
    /// As errors call it.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Batch => "batch",
            Axis::Heads => "heads",
            Axis::QLen => "q_len",
            Axis::KvLen => "kv_len",
            Axis::BlockRows => "q_len / size[0]",
            Axis::BlockCols => "kv_len / size[1]",
            Axis::One(name) | Axis::Free(name) => name,
        }
    }
}
