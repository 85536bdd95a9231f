//! Plans of the gradients of a mask's tensors: elements, lanes, dispatches of bounded work.

use crate::device::DeviceFacts;
use crate::kernel::KernelOptions;
use crate::kernel::pieces::{Piece, pieces, steps};
use crate::mask::Id;
use crate::matmul::plan::ENOUGH_WORKGROUPS;
use crate::tensor::{Error, Shape, count};

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

    /// Returns the rule that has the tensor.
    pub fn id(self) -> Id {
        match self {
            Added::Bias => Id::Bias,
            Added::Slopes => Id::Alibi,
            Added::Relative => Id::Relative,
            Added::Sinks => Id::SinkLogits,
        }
    }

    /// Returns the gradient's name in errors.
    pub fn name(self) -> &'static str {
        match self {
            Added::Bias => "d_bias",
            Added::Slopes => "d_slopes",
            Added::Relative => "d_relative",
            Added::Sinks => "d_sinks",
        }
    }
}

/// The number of elements from which one invocation each keeps a device busy.
const MANY: usize = 1 << 14;

/// The number of workgroups, each summing over pairs, that keep a large GPU busy.
const ENOUGH: usize = 2 * ENOUGH_WORKGROUPS;

/// The most parts of an element. One invocation adds them.
const MOST_PARTS: usize = 64;

/// The most parts of all elements in scratch: 1 MiB.
const MOST_SUMS: usize = 1 << 18;

/// Returns the number of parts that each element is split into, and the number of queries of a
/// part. Each part sums over different queries.
fn parts(of: Added, gradient: [usize; 4], shape: &Shape, key_lanes: usize) -> [usize; 2] {
    let axes = [shape.batch, shape.heads, shape.q_len];
    let rows: usize =
        axes.into_iter().zip(gradient).map(|(len, size)| if size == 1 { len } else { 1 }).product();
    // Queries that keep a lane busy.
    let each = match of {
        Added::Sinks => 16,
        Added::Relative => 1,
        Added::Bias | Added::Slopes => 4,
    };
    let least = each * ScoreGradientsPlan::WORKGROUP as usize / key_lanes;
    // In a relative table, only the outermost elements have many terms.
    let long = match of {
        Added::Relative => gradient[0] * gradient[1] * gradient[3].min(2),
        _ => count(gradient),
    };
    let most = (ENOUGH / long).min(MOST_SUMS / count(gradient)).min(MOST_PARTS);
    let part_rows = rows.div_ceil((rows / least).min(most).max(1));
    [rows.div_ceil(part_rows), part_rows]
}

/// The plan of one kernel of score gradients. It is cut into dispatches later.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScoreGradientsPlan {
    pub of: Added,
    /// True if a workgroup computes an element or a part of one. False if an invocation does.
    pub shared: bool,
    /// Lanes that share a query's keys. Other lanes have other queries.
    pub key_lanes: u32,
    /// Parts of an element. If there are several, scratch holds them.
    pub parts: usize,
    /// Queries of each part.
    pub part_rows: usize,
    elements: usize,
    /// Workgroups: the last axis times the parts, the queries, batch times heads.
    grid: [usize; 3],
    steps: [usize; 3],
}

impl ScoreGradientsPlan {
    pub const WORKGROUP: u32 = 64;

    /// Plans the kernel. `gradient` is the shape of the gradient.
    ///
    /// # Errors
    /// Returns an error if there would be too many dispatches.
    pub fn new(
        of: Added,
        gradient: [usize; 4],
        shape: &Shape,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<Self, Error> {
        let lanes = Self::WORKGROUP as usize;
        // The terms of one element. For a table it is the average: the outermost elements have
        // more.
        let terms = match of {
            Added::Sinks => count(shape.lse()),
            _ => count(shape.weights()),
        };
        let terms = terms.div_ceil(count(gradient));
        let shared = of != Added::Bias || terms >= lanes && count(gradient) < MANY;
        // An element of a table has at most a few keys of each query.
        let keys = match of {
            Added::Sinks => 1,
            _ if gradient[3] == 1 => shape.kv_len,
            _ => 1,
        };
        let key_lanes = if shared { 1 << keys.ilog2().min(lanes.ilog2()) } else { 1 };
        let operations = if of == Added::Sinks { 1 } else { shape.head_dim + shape.value_dim };
        let [parts, part_rows] = if shared { parts(of, gradient, shape, key_lanes) } else { [1, usize::MAX] };
        let elements = if shared { 1 } else { lanes };
        // The work includes masked pairs.
        let work = 2.0 * elements as f64 * terms.div_ceil(parts) as f64 * operations as f64;
        let grid = [gradient[3].div_ceil(elements) * parts, gradient[2], gradient[0] * gradient[1]];
        let steps = steps(grid, work, kernel_options.most_work(), device)?;
        Ok(ScoreGradientsPlan {
            of,
            shared,
            key_lanes: key_lanes as u32,
            parts,
            part_rows,
            elements: count(gradient),
            grid,
            steps,
        })
    }

    /// The bytes of the parts in scratch.
    pub fn part_bytes(&self) -> u64 {
        if self.parts == 1 { 0 } else { 4 * self.parts as u64 * self.elements as u64 }
    }

    /// Returns the dispatches that the grid is cut into.
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
            let plan =
                ScoreGradientsPlan::new(of, gradient, &shape, &KernelOptions::new(), &DeviceFacts::LEAST);
            let ScoreGradientsPlan { shared, key_lanes, parts, part_rows, grid, .. } = plan.expect("a plan");
            (shared, key_lanes, if shared { [parts, part_rows] } else { [parts, 0] }, grid)
        };
        assert_eq!(plan(Added::Bias, [2, 4, 300, 500]), (false, 1, [1, 0], [8, 300, 8]));
        assert_eq!(plan(Added::Bias, [1, 1, 300, 500]), (false, 1, [1, 0], [8, 300, 1]));
        assert_eq!(plan(Added::Bias, [1, 4, 1, 500]), (true, 1, [1, 600], [500, 1, 4]));
        assert_eq!(plan(Added::Bias, [1, 1, 300, 1]), (true, 64, [1, 8], [1, 300, 1]));
        assert_eq!(plan(Added::Bias, [1, 1, 1, 500]), (true, 1, [1, 2400], [500, 1, 1]));
        // Sums over 600 queries, then over 300, in at most 64 parts.
        assert_eq!(plan(Added::Slopes, [1, 4, 1, 1]), (true, 64, [60, 10], [60, 1, 4]));
        assert_eq!(plan(Added::Slopes, [2, 4, 1, 1]), (true, 64, [60, 5], [60, 1, 8]));
        assert_eq!(plan(Added::Relative, [2, 4, 1, 33]), (true, 1, [4, 75], [132, 1, 8]));
        assert_eq!(plan(Added::Relative, [2, 4, 1, 1]), (true, 64, [60, 5], [60, 1, 8]));
        assert_eq!(plan(Added::Sinks, [1, 4, 1, 1]), (true, 1, [1, 600], [1, 1, 4]));
    }

    #[test]
    fn parts_have_every_query_once_and_their_memory_is_bounded() {
        for (batch, heads, q_len) in [(1, 1, 1), (1, 32, 4096), (7, 3, 1001), (64, 64, 131_072)] {
            let shape = Shape { batch, heads, q_len, ..Shape::new(1, 1, 1, 64) };
            for gradient in [[1, 1, 1, 1], [1, heads, 1, 1], [batch, heads, 1, 65], [1, heads, 1, 100_001]] {
                for of in Added::ALL {
                    let [parts, rows] = parts(of, gradient, &shape, 1);
                    let all = batch / gradient[0] * (heads / gradient[1]) * q_len;
                    assert!(parts * rows >= all && (parts - 1) * rows < all, "{shape:?} {gradient:?}");
                    assert!(parts == 1 || parts * count(gradient) <= MOST_SUMS, "{shape:?} {gradient:?}");
                }
            }
        }
    }
}
