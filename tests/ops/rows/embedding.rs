//! Rows of tables by their ids, compared with the reference, forward and backward.

use std::fmt;

use wgpu_attention::reference;
use wgpu_attention::reference::widen;
use wgpu_attention::rows::{Embedding, EmbeddingBackward, EmbeddingForward};
use wgpu_attention::{DType, Error, Scratch, TensorView};

use crate::harness::case::largest;
use crate::harness::run::{Layout, Placed};
use crate::harness::{FLOATS, Judged, Profile, Report, Rng, Values, defaults, full, rest, stored};

struct Case {
    profile: &'static Profile,
    layout: Layout,
    batch: usize,
    length: usize,
    /// The number of rows in the table.
    rows: usize,
    width: usize,
    scale: f64,
    /// The type of the table or its gradient; the type of the rows or their gradient.
    dtypes: [DType; 2],
    accumulates: bool,
    seed: u64,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Case { profile, layout, batch, length, rows, width, scale, dtypes, accumulates, .. } = self;
        write!(
            f,
            "{}, {layout:?}, {batch} × {length} of {rows} × {width}, scale {scale}, {dtypes:?}, accumulates {accumulates}",
            profile.name
        )
    }
}

impl Case {
    fn random(seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0xe1b3_dd10);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let window = Layout::Window(rng.word());
        Case {
            profile,
            layout: rng.pick(&[Layout::Dense, window]),
            batch: rng.pick(&[1, 1, 2, 5]),
            length: rng.pick(&[1, 7, 64, 300, 1500]),
            rows: rng.pick(&[1, 2, 3, 16, 17, 600]),
            width: rng.pick(&[1, 4, 21, 64, 264]),
            scale: rng.pick(&[1.0, 4.0, -0.3]),
            dtypes: [rng.pick(FLOATS), rng.pick(FLOATS)],
            accumulates: rng.chance(0.4),
            seed,
        }
    }

    /// Returns ids, some of them slightly or far beyond the table.
    fn ids(&self) -> Vec<u32> {
        let rng = &mut Rng::new(self.seed ^ 0x1d5);
        let rows = self.rows as u32;
        let mut draw = || match rng.below(12) {
            0 => rows + rng.below(9) as u32,
            1 => rng.word() as u32 | 0x4000_0000,
            2 => u32::MAX,
            _ => rng.below(self.rows) as u32,
        };
        (0..self.batch * self.length).map(|_| draw()).collect()
    }

    fn shapes(&self) -> [[usize; 4]; 3] {
        let Case { batch, length, rows, width, .. } = *self;
        [[batch, 1, length, 1], [1, 1, rows, width], [batch, 1, length, width]]
    }

    /// Runs twice with the same data, and judges against `want` and its naive computation.
    fn outcome(
        &self,
        run: impl Fn(&Embedding, &Placed, &Placed, &Placed) -> Result<(), String>,
        given: (&[f32], DType, usize),
        written: (&[f32], DType, usize),
        truth: [Vec<f64>; 2],
        magnitude: f64,
    ) -> Result<f64, String> {
        let profile = self.profile;
        profile.tidy();
        let shapes = self.shapes();
        let places = self.layout.places(shapes);
        let ids = Placed::input(profile, Values::Numbers(&self.ids()), DType::U32, places[0]);
        let operator = Embedding::with_pipelines(profile.gpu.pipelines());
        let (before, dtype, to) = written;
        let mut results = Vec::new();
        for _ in 0..2 {
            let input = Placed::input(profile, Values::Floats(given.0), given.1, places[given.2]);
            let output = Placed::gradient(profile, before, (dtype, places[to]), self.accumulates);
            run(&operator, &ids, &input, &output)?;
            results.push(pollster::block_on(output.download_async("a result", profile))?);
        }
        if results[0] != results[1] {
            return Err("other numbers the second time".into());
        }
        let before = self.accumulates.then_some(before);
        Judged::gradient(truth, before, dtype, magnitude + 4.0).judge(&results[0])
    }

    fn forward(&self) -> Result<f64, String> {
        let rng = &mut Rng::new(self.seed ^ 0x7ab1e);
        let [_, table_shape, out_shape] = self.shapes();
        let [own, other] = self.dtypes;
        let table = stored(&rng.normals(table_shape.iter().product()), own);
        let before = stored(&rng.normals(out_shape.iter().product()), other);
        let ids = self.ids();
        let exact = reference::embedding(&ids, &widen::<f64>(&table), self.width, self.scale);
        let naive = reference::embedding(&ids, &table, self.width, self.scale);
        let (exact, naive) = (exact.expect("it fits"), widen::<f64>(&naive.expect("it fits")));
        let magnitude = largest(exact.iter().copied());
        let run = |operator: &Embedding, ids: &Placed, table: &Placed, out: &Placed| {
            let call = EmbeddingForward::new(ids.view(), table.view(), out.view());
            let call = call.scale(self.scale).accumulate(self.accumulates);
            self.profile.gpu.submit(|e| operator.forward(e, &call)).map_err(|e| e.to_string())
        };
        self.outcome(run, (&table, own, 1), (&before, other, 2), [exact, naive], magnitude)
    }

    fn backward(&self) -> Result<f64, String> {
        let rng = &mut Rng::new(self.seed ^ 0x7ab1e);
        let [_, table_shape, out_shape] = self.shapes();
        let [own, other] = self.dtypes;
        let before = stored(&rng.normals(table_shape.iter().product()), own);
        let d_out = stored(&rng.normals(out_shape.iter().product()), other);
        let ids = self.ids();
        let shape = [self.rows, self.width];
        let exact = reference::embedding_backward(&ids, &widen::<f64>(&d_out), shape, self.scale);
        let naive = reference::embedding_backward(&ids, &d_out, shape, self.scale);
        let (exact, naive) = (exact.expect("it fits"), widen::<f64>(&naive.expect("it fits")));
        let absolute: Vec<f64> = d_out.iter().map(|d| f64::from(d.abs())).collect();
        let sums = reference::embedding_backward(&ids, &absolute, shape, self.scale.abs());
        let magnitude = largest(sums.expect("it fits"));
        let run = |operator: &Embedding, ids: &Placed, d_out: &Placed, d_table: &Placed| {
            // The call does not read the forward call's table and output.
            let forward = EmbeddingForward::new(ids.view(), d_table.view(), d_out.view()).scale(self.scale);
            let call = EmbeddingBackward::new(forward, d_out.view(), d_table.view());
            let call = call.accumulate(self.accumulates);
            let refused = |e: Error| e.to_string();
            let size = operator.backward_scratch_size(&call).map_err(refused)?;
            let mut scratch = Scratch::new(self.profile.gpu.device(), size).map_err(refused)?;
            self.profile.gpu.submit(|e| operator.backward(e, &call, &mut scratch)).map_err(refused)
        };
        self.outcome(run, (&d_out, other, 2), (&before, own, 1), [exact, naive], magnitude)
    }
}

fn cases(name: &'static str, each: impl Fn(&Case) -> Result<f64, String>) {
    let mut report = Report::new(name);
    for seed in 0..60 {
        if seed >= 20 && !rest(&format!("{name} {seed}")) {
            continue;
        }
        let case = Case::random(seed);
        report.record("embedding", &case, each(&case));
    }
    report.finish();
}

#[test]
fn rows_equal_the_reference() {
    cases("embedding", Case::forward);
}

#[test]
fn gradients_equal_the_reference() {
    cases("embedding backward", Case::backward);
}

/// The function is a sum of products with the rows. It is linear, so differences give its gradient
/// exactly.
#[test]
fn reference_gradient_matches_finite_differences() {
    let case = Case { rows: 5, width: 3, batch: 1, length: 20, scale: 0.5, ..Case::random(1) };
    let rng = &mut Rng::new(9);
    let (ids, table, d_out) = (case.ids(), widen::<f64>(&rng.normals(15)), widen::<f64>(&rng.normals(60)));
    let loss = |table: &[f64]| -> f64 {
        let out = reference::embedding(&ids, table, 3, 0.5).expect("it fits");
        out.iter().zip(&d_out).map(|(x, d)| x * d).sum()
    };
    let got = reference::embedding_backward(&ids, &d_out, [5, 3], 0.5).expect("it fits");
    for n in 0..table.len() {
        let mut moved = table.clone();
        moved[n] += 1.0;
        let slope = loss(&moved) - loss(&table);
        assert!((got[n] - slope).abs() < 1e-12, "{n}: {} and {slope}", got[n]);
    }
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..4).map(|_| gpu.buffer(256).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let ids = typed(0, DType::U32, [2, 1, 3, 1]);
    let table = typed(1, DType::F32, [1, 1, 5, 8]);
    let rows = typed(2, DType::F32, [2, 1, 3, 8]);
    let operator = Embedding::with_pipelines(gpu.pipelines());
    let refused = |call: EmbeddingForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, &call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward(&mut pass, &call).is_err() && operator.prepare(&call).is_err());
    };
    let f32_ids = typed(0, DType::F32, [2, 1, 3, 1]);
    refused(EmbeddingForward::new(f32_ids, table, rows), &["`ids`", "U32", "F32"]);
    let wide_ids = typed(0, DType::U32, [2, 1, 3, 2]);
    refused(EmbeddingForward::new(wide_ids, table, rows), &["`ids`", "dim must be 1"]);
    refused(
        EmbeddingForward::new(ids, typed(1, DType::F32, [1, 2, 2, 8]), rows),
        &["`table`", "heads must be 1"],
    );
    refused(
        EmbeddingForward::new(ids, table, typed(2, DType::F32, [2, 1, 3, 7])),
        &["`out`", "dim must be 8"],
    );
    refused(
        EmbeddingForward::new(ids, table, typed(2, DType::F32, [1, 1, 3, 8])),
        &["`out`", "batch must be 2"],
    );
    refused(EmbeddingForward::new(ids, table, typed(1, DType::F32, [2, 1, 3, 8])), &["`out`", "`table`"]);
    refused(
        EmbeddingForward::new(ids, table, typed(2, DType::U32, [2, 1, 3, 8])),
        &["`out`", "F32, F16 or BF16"],
    );
    refused(EmbeddingForward::new(ids, table, rows).scale(f64::NAN), &["scale", "finite"]);
    let refused = |call: EmbeddingBackward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
        let error = operator.backward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward(&mut pass, &call, &mut scratch).is_err());
    };
    let call = EmbeddingForward::new(ids, table, rows);
    let of = |d_table| EmbeddingBackward::new(call, rows, d_table);
    refused(of(typed(2, DType::F32, [1, 1, 5, 8])), &["`d_table`", "`d_out`"]);
    refused(of(typed(1, DType::F32, [1, 1, 3, 8])), &["`d_table`", "must be 5", "got 3"]);
    refused(of(table.with_strides([0; 4])), &["`d_table`", "share memory"]);
    refused(EmbeddingBackward::new(call.scale(1e300), rows, table), &["scale", "finite"]);
    refused(of(table), &["scratch"]);
}
