//! Random features of rows, and their gradients.

use super::problem::{LinearProblem, Random};
use super::recorder::Recorder;
use crate::error::Error;
use crate::feature_map::RandomFeatures;
use crate::kernel::View;
use crate::kernels::KernelVariant;
use crate::kernels::linear::{Params, ROWS_EACH, Randoms, RowsForm};
use crate::kernels::{linear_d_rows, linear_features, linear_map, linear_map_backward};
use crate::scratch::{Scratch, Slot};
use crate::tensor::TensorView;

/// Rows that random features are made of, and their features.
pub(super) struct FeatureRows<'a> {
    rows: TensorView<'a>,
    features: TensorView<'a>,
    of_keys: bool,
}

impl<'a> Recorder<'a, '_> {
    /// Parameters for rows that random features are made of.
    pub fn row_params(&self, random: &Random<'a>, rows: &FeatureRows<'a>) -> Params {
        let view = |t: TensorView| View::of(t, self.device);
        let [_, heads, len, head_dim] = rows.rows.shape();
        let directions = self.direction_view(random);
        // Their own normalisation, where the norm's eps is otherwise.
        let root = |n: usize| 1.0 / (n as f64).sqrt();
        let eps = match random.kind {
            RandomFeatures::Relu { epsilon } => epsilon,
            RandomFeatures::Hyperbolic => root(2 * directions.shape()[2]),
            _ => root(directions.shape()[2]),
        };
        Params {
            q: view(rows.rows),
            k: view(directions),
            v: view(rows.features),
            x: view(rows.features),
            heads: heads as u32,
            group: (heads / self.problem.shape.kv_heads) as u32,
            q_len: len as u32,
            chunk_len: ROWS_EACH as u32,
            eps: eps as f32,
            scale: (head_dim as f64).powf(-0.25) as f32,
            ..self.params
        }
    }

    /// The directions, with those of one head repeated.
    pub fn direction_view(&self, random: &Random<'a>) -> TensorView<'a> {
        let mut directions = random.directions;
        if directions.layout.shape[1] == 1 {
            directions.layout.strides[1] = 0;
        }
        directions
    }

    pub fn rows_form(&self, tensors: &[TensorView]) -> RowsForm {
        RowsForm { tiles: self.problem.tiles, fours: tensors.iter().all(|t| t.layout.in_fours(3)) }
    }

    pub fn row_counts(&self, rows: &FeatureRows, columns: usize) -> [usize; 3] {
        let [batch, heads, len, _] = rows.rows.shape();
        [self.problem.tiles.groups(ROWS_EACH.min(len), columns), len.div_ceil(ROWS_EACH), batch * heads]
    }

    /// Random features of rows.
    pub fn make_features(&mut self, random: &Random<'a>, rows: &FeatureRows<'a>) {
        let params = self.row_params(random, rows);
        let directions = self.direction_view(random);
        let count = directions.shape()[2];
        let mut products = rows.features;
        products.layout.shape[3] = count;
        let variant = linear_features::LinearFeatures {
            form: self.rows_form(&[rows.rows, directions, products]),
            rows: rows.rows.dtype(),
        };
        let tensors = [rows.rows, directions, rows.features].map(|t| self.window(t)).into();
        let counts = self.row_counts(rows, count);
        self.push(KernelVariant::LinearFeatures(variant), params, tensors, counts);
        let logs = self.logs().filter(|_| rows.of_keys && random.kind.is_scaled());
        let variant = linear_map::LinearMap {
            kind: Randoms::of(random.kind),
            rows: rows.rows.dtype(),
            logs: logs.is_some(),
        };
        let tensors = [Some(self.window(rows.rows)), Some(self.window(rows.features)), logs];
        let tensors = tensors.into_iter().flatten().collect();
        let [batch, heads, len, _] = rows.rows.shape();
        let counts = [len.div_ceil(linear_map::WORKGROUP), heads, batch];
        self.push(KernelVariant::LinearMap(variant), params, tensors, counts);
    }

    /// The gradient of rows from that of their random features.
    pub fn d_rows(
        &mut self,
        random: &Random<'a>,
        rows: &FeatureRows<'a>,
        d_features: TensorView<'a>,
        d_rows: TensorView<'a>,
        accumulates: bool,
    ) {
        let view = |t: TensorView| View::of(t, self.device);
        let params = Params { x: view(d_features), ..self.row_params(random, rows) };
        let directions = self.direction_view(random);
        let kind = Randoms::of(random.kind);
        let variant = linear_map_backward::LinearMapBackward { kind, rows: rows.rows.dtype() };
        let mut whole = d_features;
        whole.layout.shape[3] += 4;
        let tensors = [
            Some(self.window(rows.rows)),
            Some(self.window(rows.features)),
            (kind == Randoms::Fourier).then(|| self.window(directions)),
            Some(self.window(whole)),
        ];
        let tensors = tensors.into_iter().flatten().collect();
        let [batch, heads, len, head_dim] = rows.rows.shape();
        let counts = [len.div_ceil(linear_map_backward::WORKGROUP), heads, batch];
        self.push(KernelVariant::LinearMapBackward(variant), params, tensors, counts);
        let params =
            Params { v: view(d_features), x: view(d_rows), accumulates: accumulates.into(), ..params };
        let variant = linear_d_rows::LinearDRows {
            form: self.rows_form(&[rows.rows, directions, d_rows]),
            rows: rows.rows.dtype(),
            gradient: d_rows.dtype(),
        };
        let tensors = [rows.rows, directions, whole, d_rows].map(|t| self.window(t)).into();
        let counts = self.row_counts(rows, head_dim);
        self.push(KernelVariant::LinearDRows(variant), params, tensors, counts);
    }
}

/// The problem with random features in memory in place of queries and keys, which are told too.
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
