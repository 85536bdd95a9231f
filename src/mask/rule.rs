//! The description of one mask rule.

use super::{Id, RuleSet, Settings, TENSORS, slot};
use crate::tensor::Error;
use crate::tensor::dtype::Element;

/// A rule of a mask. Its WGSL texts use the variables that `mask/kernels/compose.rs` declares.
#[derive(Clone, Copy)]
pub(crate) struct Rule {
    /// The name in names of kernels.
    pub name: &'static str,
    pub tensors: &'static [Tensor],
    /// The host's checks beyond dtypes and axes of the tensors.
    pub check: fn(&Given) -> Result<(), Error>,
    /// The rule and the reason, if a cache cannot have the rule.
    pub not_cached: Option<[&'static str; 2]>,
    /// The functions that the other texts call.
    pub wgsl: &'static str,
    /// Sets `keys` and `position` of query `i`, if the rule moves queries.
    pub place: &'static str,
    pub bounds: Bounds,
    pub row: Option<PerRow>,
    /// True if the keys that the rule shows are exempt from rules whose bounds are `lifted`.
    pub lifts: bool,
    /// The condition on query `i` of head `h` and key `j` under which the rule's first tensor hides
    /// the pair. Kernels skip tiles in which it holds for every pair. Empty if the rule has no such
    /// condition.
    pub hides: &'static str,
    /// The numbers of query `i` of head `h` and of key `j`. The rule hides every pair of different
    /// numbers. Kernels skip tiles whose queries and keys have no number in common.
    pub numbers: Option<[&'static str; 2]>,
    /// The statement before the conditions in `asks`, which share it.
    pub before: &'static str,
    pub asks: &'static [Ask],
    pub adds: Option<Adds>,
    /// True if the rule defines `with_sink`, which adds to the sum of a query's weights.
    pub joins_sum: bool,
    /// The rules without which this rule has no effect, for the list of kernels for tools and
    /// tests.
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

/// The length of an axis. Except for the last two, it may be 1 and broadcast.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Axis {
    Batch,
    Heads,
    QLen,
    KvLen,
    BlockRows,
    BlockCols,
    /// 1, with a name.
    One(&'static str),
    /// Any length that the rule's check permits, with a name.
    Free(&'static str),
}

pub(crate) const PER_QUERY: [Axis; 4] = [Axis::Batch, Axis::Heads, Axis::QLen, Axis::One("dim")];
pub(crate) const PER_KEY: [Axis; 4] = [Axis::Batch, Axis::Heads, Axis::One("length"), Axis::KvLen];
pub(crate) const PER_PAIR: [Axis; 4] = [Axis::Batch, Axis::Heads, Axis::QLen, Axis::KvLen];
pub(crate) const PER_HEAD: [Axis; 4] = [Axis::Batch, Axis::Heads, Axis::One("length"), Axis::One("dim")];

/// The WGSL that narrows or widens `r`, an interval that holds every key that a query sees.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    /// Empty if the rule does not change the interval.
    pub wgsl: &'static str,
    /// True if the interval alone decides the rule, so that kernels evaluate no pair.
    pub exact: bool,
    /// True if rules with `lifts` may show keys outside of the interval. With such a rule the
    /// interval has no bound, and kernels evaluate pairs.
    pub lifted: bool,
}

impl Bounds {
    const NONE: Self = Bounds { wgsl: "", exact: false, lifted: false };

    /// Bounds that hold exactly the keys that the rule permits.
    pub const fn exact(wgsl: &'static str) -> Self {
        Bounds { wgsl, exact: true, lifted: false }
    }

    /// Bounds that also hold keys that the rule hides.
    pub const fn wider(wgsl: &'static str) -> Self {
        Bounds { wgsl, exact: false, lifted: false }
    }

    pub const fn lifted(self) -> Self {
        Bounds { lifted: true, ..self }
    }
}

/// A value of a query that a rule stores in a member of `Query`.
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

/// A condition on query `q` and key `j`. The first condition that holds decides the pair, in the
/// order of turns and of the table.
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

/// The turn of a condition. From `Prefix` on, kernels evaluate it only if the interval does not
/// decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The map of blocks decides full and hidden blocks.
    Block,
    /// Conditions that hide single pairs, even if later conditions would show them.
    Pair,
    /// Conditions that show a prefix, even if the causal rule and the band hide it.
    Prefix,
    /// The causal rule, evaluated if a prefix extends the interval.
    Causal,
    /// Conditions that show global tokens, even if the band hides them.
    Global,
    /// Rules whose bounds are `lifted`: window and pattern.
    Band,
}

/// A term that a rule adds to the score of query `q` and key `j`.
#[derive(Clone, Copy)]
pub(crate) struct Adds {
    pub wgsl: &'static str,
    /// True if full blocks have the term too. The other terms are in `bias_of`.
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

/// The rules, settings and shapes of a mask, without its tensors.
pub(crate) struct Given<'a> {
    pub rules: RuleSet,
    pub settings: &'a Settings,
    pub shapes: [Option<[usize; 4]>; TENSORS],
}

impl Given<'_> {
    /// Returns the shape of the `n`-th tensor of a rule that the mask has.
    pub fn shape(&self, id: Id, n: usize) -> [usize; 4] {
        self.shapes[slot(id, n)].unwrap_or([1; 4])
    }

    /// Checks conditions on more than one tensor, or on more than dtypes and axes.
    pub fn check(&self) -> Result<(), Error> {
        self.settings.check()?;
        self.rules.iter().try_for_each(|id| (id.rule().check)(self))
    }
}

/// The error for a `shape[axis]` that does not fit `tensor`.
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
    /// Returns the name in errors.
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
