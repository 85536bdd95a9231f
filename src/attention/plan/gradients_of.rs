//! The results of the backward kernel.

use crate::tensor::Shape;

/// The results of one dispatch of the backward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GradientsOf {
    Queries,
    Keys,
    Values,
    KeysAndValues,
    /// No gradients: only the sums of queries' weights, by which the other kernels divide. Used if
    /// the gradients of queries are not wanted.
    Totals,
}

impl GradientsOf {
    /// The variants that compute gradients.
    pub const ALL: [Self; 4] =
        [GradientsOf::Queries, GradientsOf::Keys, GradientsOf::Values, GradientsOf::KeysAndValues];

    /// True if the rows of a workgroup are queries.
    pub fn of_queries(self) -> bool {
        matches!(self, GradientsOf::Queries | GradientsOf::Totals)
    }

    /// True if the results include gradients of queries or keys.
    pub fn scores(self) -> bool {
        !matches!(self, GradientsOf::Values | GradientsOf::Totals)
    }

    pub fn values(self) -> bool {
        matches!(self, GradientsOf::Values | GradientsOf::KeysAndValues)
    }

    /// The number of rows of a head whose gradients are computed, and the number of heads.
    pub fn own_side(self, shape: &Shape) -> (usize, usize) {
        if self.of_queries() { (shape.q_len, shape.heads) } else { (shape.kv_len, shape.kv_heads) }
    }

    /// The multiply-adds for a pair.
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
