//! How the gradients of what scores are changed by are shared out: elements, lanes, dispatches of bounded work.

use super::pieces::{Piece, pieces, steps};
use super::tuning::Tuning;
use crate::device::DeviceFacts;
use crate::error::Error;
use crate::mask::Id;
use crate::problem::Shape;
use crate::tensor::count;

/// A tensor of a mask that changes scores, and has a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Added {
    Bias,
    Slopes,
    Relative,
    Sinks,
}

impl Added {
    pub const ALL: [Self; 4] = [Added::Bias, Added::Slopes, Added::Relative, Added::Sinks];

    /// The rule that has it.
    pub fn id(self) -> Id {
        match self {
            Added::Bias => Id::Bias,
            Added::Slopes => Id::Alibi,
            Added::Relative => Id::Relative,
            Added::Sinks => Id::SinkLogits,
        }
    }

    /// The gradient's name in errors.
    pub fn name(self) -> &'static str {
        match self {
            Added::Bias => "d_bias",
            Added::Slopes => "d_slopes",
            Added::Relative => "d_relative",
            Added::Sinks => "d_sinks",
        }
    }
}

/// Elements from which on an invocation each keeps a device busy.
const MANY: usize = 1 << 14;

/// One dispatch of the kernel, before it is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScoreGradientsPlan {
    pub of: Added,
    /// Whether a workgroup has an element, and not an invocation.
    pub shared: bool,
    /// Lanes that share a query's keys; the others have other queries.
    pub key_lanes: u32,
    /// Workgroups: the last axis, the queries, batch times heads.
    grid: [usize; 3],
    steps: [usize; 3],
}

impl ScoreGradientsPlan {
    pub const WORKGROUP: u32 = 64;

    /// `gradient`: its shape.
    ///
    /// # Errors
    /// More dispatches than there may be.
    pub fn new(
        of: Added,
        gradient: [usize; 4],
        shape: &Shape,
        tuning: &Tuning,
        device: &DeviceFacts,
    ) -> Result<Self, Error> {
        let lanes = Self::WORKGROUP as usize;
        // Of one element. Of a table, on average: the outermost places have more.
        let terms = match of {
            Added::Sinks => count(shape.lse()),
            _ => count(shape.weights()),
        };
        let terms = terms.div_ceil(count(gradient));
        let shared = of != Added::Bias || terms >= lanes && count(gradient) < MANY;
        // A place has a key of a query, or a few.
        let keys = match of {
            Added::Sinks => 1,
            _ if gradient[3] == 1 => shape.kv_len,
            _ => 1,
        };
        let key_lanes = if shared { 1 << keys.ilog2().min(lanes.ilog2()) } else { 1 };
        let operations = if of == Added::Sinks { 1 } else { shape.head_dim + shape.value_dim };
        let elements = if shared { 1 } else { lanes };
        // What masks hide counts.
        let work = 2.0 * elements as f64 * terms as f64 * operations as f64;
        let grid = [gradient[3].div_ceil(elements), gradient[2], gradient[0] * gradient[1]];
        let steps = steps(grid, work, tuning.work_limit, device)?;
        Ok(ScoreGradientsPlan { of, shared, key_lanes, grid, steps })
    }

    /// The dispatches: the grid, cut.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + use<> {
        pieces(self.grid, self.steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_where_the_terms_are() {
        let shape =
            Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 300, kv_len: 500, head_dim: 8, value_dim: 8 };
        let plan = |of, gradient| {
            let plan = ScoreGradientsPlan::new(of, gradient, &shape, &Tuning::new(), &DeviceFacts::LEAST);
            let ScoreGradientsPlan { shared, key_lanes, grid, .. } = plan.expect("a plan");
            (shared, key_lanes, grid)
        };
        assert_eq!(plan(Added::Bias, [2, 4, 300, 500]), (false, 1, [8, 300, 8]));
        assert_eq!(plan(Added::Bias, [1, 1, 300, 500]), (false, 1, [8, 300, 1]));
        assert_eq!(plan(Added::Bias, [1, 4, 1, 500]), (true, 1, [500, 1, 4]));
        assert_eq!(plan(Added::Bias, [1, 1, 300, 1]), (true, 64, [1, 300, 1]));
        assert_eq!(plan(Added::Slopes, [1, 4, 1, 1]), (true, 64, [1, 1, 4]));
        assert_eq!(plan(Added::Relative, [2, 4, 1, 33]), (true, 1, [33, 1, 8]));
        assert_eq!(plan(Added::Relative, [2, 4, 1, 1]), (true, 64, [1, 1, 8]));
        assert_eq!(plan(Added::Sinks, [1, 4, 1, 1]), (true, 1, [1, 1, 4]));
    }
}
