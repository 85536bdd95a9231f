//! What the kernel of the gradients computes.

use crate::tensor::Shape;

/// What a dispatch of the kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GradientsOf {
    Queries,
    Keys,
    Values,
    KeysAndValues,
    /// No gradients: the sums of queries' weights, which the others divide by, where those of
    /// queries are not wanted.
    Totals,
}

impl GradientsOf {
    /// Of gradients.
    pub const ALL: [Self; 4] =
        [GradientsOf::Queries, GradientsOf::Keys, GradientsOf::Values, GradientsOf::KeysAndValues];

    /// True if a workgroup has rows of queries.
    pub fn of_queries(self) -> bool {
        matches!(self, GradientsOf::Queries | GradientsOf::Totals)
    }

    /// Whether it has those of what scores are made of.
    pub fn scores(self) -> bool {
        !matches!(self, GradientsOf::Values | GradientsOf::Totals)
    }

    pub fn values(self) -> bool {
        matches!(self, GradientsOf::Values | GradientsOf::KeysAndValues)
    }

    /// Rows whose gradients these are, of a head, and such heads.
    pub fn own_side(self, shape: &Shape) -> (usize, usize) {
        if self.of_queries() { (shape.q_len, shape.heads) } else { (shape.kv_len, shape.kv_heads) }
    }

    /// Multiply-adds for a pair.
    pub fn operations(self, shape: &Shape) -> usize {
        let (head, value) = (shape.head_dim, shape.value_dim);
        match self {
            GradientsOf::Queries | GradientsOf::Keys => 2 * head + value,
            GradientsOf::Values => head + value,
            GradientsOf::KeysAndValues => 2 * (head + value),
            GradientsOf::Totals => head,
        }
    }
}
