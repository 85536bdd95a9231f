//! Random features of rows, and their gradients.

use super::builder::Builder;
use super::{LinearProblem, Random};
use crate::kernel::{Scratch, Slot};
use crate::linear_attention::feature_map::RandomFeatures;
use crate::linear_attention::kernels::linear::{LinearNumbers, ROWS_EACH, Randoms};
use crate::linear_attention::kernels::linear_d_rows::LinearDRowsCall;
use crate::linear_attention::kernels::linear_features::LinearFeaturesCall;
use crate::linear_attention::kernels::linear_map::{self, LinearMapCall};
use crate::linear_attention::kernels::linear_map_backward::{self, LinearMapBackwardCall};
use crate::tensor::{Error, TensorView};

/// Rows and their random features.
pub(super) struct FeatureRows<'a> {
    rows: TensorView<'a>,
    features: TensorView<'a>,
    of_keys: bool,
}

impl<'a> Builder<'a, '_> {
    /// Returns the numbers for a kernel on rows and their random features.
    fn row_numbers(&self, random: &Random<'a>, rows: &FeatureRows<'a>) -> LinearNumbers {
        let [_, heads, len, head_dim] = rows.rows.shape();
        let directions = self.direction_view(random);
        // The factor of the features, or the number added to them for ReLU. Other kernels read the
        // eps of the norm here.
        let root = |n: usize| 1.0 / (n as f64).sqrt();
        let eps = match random.kind {
            RandomFeatures::Relu { epsilon } => epsilon,
            RandomFeatures::Hyperbolic => root(2 * directions.shape()[2]),
            _ => root(directions.shape()[2]),
        };
        LinearNumbers {
            heads: heads as u32,
            group: (heads / self.problem.shape.kv_heads) as u32,
            q_len: len as u32,
            chunk_len: ROWS_EACH as u32,
            eps: eps as f32,
            scale: (head_dim as f64).powf(-0.25) as f32,
            ..self.numbers
        }
    }

    /// Returns the directions, broadcast over heads if there is one head.
    pub fn direction_view(&self, random: &Random<'a>) -> TensorView<'a> {
        let mut directions = random.directions;
        if directions.layout.shape[1] == 1 {
            directions.layout.strides[1] = 0;
        }
        directions
    }

    pub fn row_counts(&self, rows: &FeatureRows, columns: usize) -> [usize; 3] {
        let [batch, heads, len, _] = rows.rows.shape();
        [self.problem.tiles.groups(ROWS_EACH.min(len), columns), len.div_ceil(ROWS_EACH), batch * heads]
    }

    /// Records the random features of rows.
    pub fn make_features(&mut self, random: &Random<'a>, rows: &FeatureRows<'a>) {
        let numbers = self.row_numbers(random, rows);
        let directions = self.direction_view(random);
        let count = directions.shape()[2];
        let mut products = rows.features;
        products.layout.shape[3] = count;
        let call = LinearFeaturesCall {
            rows: rows.rows,
            directions,
            written: rows.features,
            numbers,
            tiles: self.problem.tiles,
            width: LinearProblem::width(&[&rows.rows, &directions, &products]),
        };
        self.all.push(call.dispatch(self.row_counts(rows, count), self.device));
        let call = LinearMapCall {
            rows: rows.rows,
            row_features: rows.features,
            logs: self.logs().filter(|_| rows.of_keys && random.kind.is_scaled()),
            numbers,
            kind: Randoms::of(random.kind),
        };
        let [batch, heads, len, _] = rows.rows.shape();
        let counts = [len.div_ceil(linear_map::WORKGROUP), heads, batch];
        self.all.push(call.dispatch(counts, self.device));
    }

    /// Records the gradient of rows from the gradient of their random features.
    pub fn d_rows(
        &mut self,
        random: &Random<'a>,
        rows: &FeatureRows<'a>,
        mut d_features: TensorView<'a>,
        d_rows: TensorView<'a>,
        accumulates: bool,
    ) {
        let numbers = self.row_numbers(random, rows);
        let directions = self.direction_view(random);
        let kind = Randoms::of(random.kind);
        d_features.layout.shape[3] += 4;
        let call = LinearMapBackwardCall {
            rows: rows.rows,
            row_features: rows.features,
            directions: (kind == Randoms::Fourier).then_some(directions),
            d_features,
            numbers,
            kind,
        };
        let [batch, heads, len, head_dim] = rows.rows.shape();
        let counts = [len.div_ceil(linear_map_backward::WORKGROUP), heads, batch];
        self.all.push(call.dispatch(counts, self.device));
        let call = LinearDRowsCall {
            rows: rows.rows,
            directions,
            d_features,
            written: d_rows,
            numbers: LinearNumbers { accumulates: accumulates.into(), ..numbers },
            tiles: self.problem.tiles,
            width: LinearProblem::width(&[&rows.rows, &directions, &d_rows]),
        };
        self.all.push(call.dispatch(self.row_counts(rows, head_dim), self.device));
    }
}

/// Replaces queries and keys by their random features in scratch, and returns both rows and
/// features.
pub(super) fn with_features<'a>(
    problem: &LinearProblem<'a>,
    scratch: &'a Scratch,
) -> Result<(LinearProblem<'a>, Option<[FeatureRows<'a>; 2]>), Error> {
    if problem.random.is_none() {
        return Ok((*problem, None));
    }
    let [q, k] = problem.feature_views(scratch.buffer(Slot::Features)?, 0);
    let rows = [
        FeatureRows { rows: problem.q, features: q, of_keys: false },
        FeatureRows { rows: problem.k, features: k, of_keys: true },
    ];
    Ok((LinearProblem { q, k, ..*problem }, Some(rows)))
}
