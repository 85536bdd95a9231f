//! Log-softmax and top-k of rows, compared with the reference.

use std::fmt;

use wgpu_attention::reference;
use wgpu_attention::reference::widen;
use wgpu_attention::rows::{LogSoftmax, LogSoftmaxBackward, LogSoftmaxForward, MAX_TOP_K, TopK, TopKForward};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions, Scratch, TensorView};

use crate::harness::case::{largest, widened};
use crate::harness::run::{Layout, Placed};
use crate::harness::{FLOATS, FORMS, Judged, Profile, Report, Rng, Values, defaults, full, stored};

struct Case {
    profile: &'static Profile,
    form: Target,
    layout: Layout,
    shape: [usize; 4],
    /// The type of inputs; the type of outputs.
    dtypes: [DType; 2],
    /// The spread of the logits.
    spread: f32,
    k: usize,
    content: Content,
    accumulates: bool,
    seed: u64,
}

/// The elements of rows for top-k.
#[derive(Clone, Copy, Debug)]
enum Content {
    /// Any of the others.
    Mixed,
    Normal,
    /// Few distinct values, with zeros of both signs and infinities.
    Ties,
    /// Few distinct values, and NaN.
    Nan,
    Equal,
    /// −∞, except for a few elements.
    Hidden,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Case { profile, form, layout, shape, dtypes, spread, k, content, accumulates, .. } = self;
        write!(
            f,
            "{}, {form:?}, {layout:?}, {shape:?}, {dtypes:?}, spread {spread}, k {k}, {content:?}, accumulates {accumulates}",
            profile.name
        )
    }
}

impl Case {
    fn random(form: Target, seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0x1091_75aa);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let first = rng.pick(FLOATS);
        let second = if rng.chance(0.5) { first } else { rng.pick(FLOATS) };
        let window = Layout::Window(rng.word());
        let columns = rng.pick(&[1, 3, 64, 65, 1027, 5000]);
        Case {
            profile,
            form,
            layout: rng.pick(&[Layout::Dense, window]),
            shape: [rng.pick(&[1, 2, 3]), rng.pick(&[1, 1, 2]), rng.pick(&[1, 5]), columns],
            dtypes: [first, second],
            spread: rng.pick(&[0.1, 1.0, 30.0, 2000.0]),
            k: rng.pick(&[1, 2, 40, 64, 65, 300, 2048, 5000]).min(columns),
            content: Content::Mixed,
            accumulates: rng.chance(0.4),
            seed,
        }
    }

    fn rng(&self) -> Rng {
        Rng::new(self.seed ^ 0xda7a)
    }

    fn logits(&self) -> Vec<f32> {
        let rng = &mut self.rng();
        let mut x = rng.normals(self.shape.iter().product());
        x.iter_mut().for_each(|x| *x *= self.spread);
        // Some logits are masked, but no row is all −∞.
        for row in x.chunks_exact_mut(self.shape[3]) {
            for x in &mut row[1..] {
                if rng.chance(0.05) {
                    *x = f32::NEG_INFINITY;
                }
            }
        }
        stored(&x, self.dtypes[0])
    }

    fn kernel_options(&self) -> KernelOptions {
        KernelOptions::new().target(self.form)
    }

    fn log_softmax(&self) -> Result<f64, String> {
        let Case { profile, layout, shape, dtypes: [own, other], .. } = *self;
        profile.tidy();
        let logits = self.logits();
        let [x_at, out_at] = layout.places([shape; 2]);
        let x = Placed::input(profile, Values::Floats(&logits), own, x_at);
        let out = Placed::output(profile, other, out_at);
        let operator =
            LogSoftmax::with_pipelines(profile.gpu.pipelines()).kernel_options(self.kernel_options());
        let call = LogSoftmaxForward::new(x.view(), out.view());
        profile.gpu.submit(|e| operator.forward(e, &call)).map_err(|e| e.to_string())?;
        let got = pollster::block_on(out.download_async("out", profile))?;
        let exact = reference::log_softmax(&widen::<f64>(&logits), shape[3]).expect("it fits");
        let naive = reference::log_softmax(&logits, shape[3]).expect("it fits");
        let magnitude = largest(exact.iter().copied().filter(|x| x.is_finite()));
        Judged::new(&widened(&naive, other), exact, magnitude).judge(&got)
    }

    fn backward(&self) -> Result<f64, String> {
        let Case { profile, layout, shape, dtypes: [own, other], .. } = *self;
        let columns = shape[3];
        let out = reference::log_softmax(&self.logits(), columns).expect("it fits");
        let out = stored(&out, own);
        let rng = &mut self.rng();
        let [d_out, before] = [(); 2].map(|()| stored(&rng.normals(out.len()), other));
        let run = || {
            profile.tidy();
            let [out_at, d_out_at, d_x_at] = layout.places([shape; 3]);
            let out = Placed::input(profile, Values::Floats(&out), own, out_at);
            let d_out = Placed::input(profile, Values::Floats(&d_out), other, d_out_at);
            let d_x = Placed::gradient(profile, &before, (other, d_x_at), self.accumulates);
            let operator =
                LogSoftmax::with_pipelines(profile.gpu.pipelines()).kernel_options(self.kernel_options());
            // The call does not read the forward call's `x`.
            let forward = LogSoftmaxForward::new(d_out.view(), out.view());
            let call = LogSoftmaxBackward::new(forward, d_out.view(), d_x.view());
            let call = call.accumulate(self.accumulates);
            profile.gpu.submit(|e| operator.backward(e, &call)).map_err(|e| e.to_string())?;
            pollster::block_on(d_x.download_async("d_x", profile))
        };
        let got = run()?;
        if got != run()? {
            return Err("other numbers the second time".into());
        }
        let (exact_out, exact_d) = (widen::<f64>(&out), widen::<f64>(&d_out));
        let exact = reference::log_softmax_backward(&exact_out, columns, &exact_d).expect("it fits");
        let naive = reference::log_softmax_backward(&out, columns, &d_out).expect("it fits");
        let rows = exact_out.chunks_exact(columns).zip(exact_d.chunks_exact(columns));
        let terms = rows
            .map(|(out, d)| largest(out.iter().map(|y| y.exp())) * d.iter().map(|d| d.abs()).sum::<f64>());
        let magnitude = terms.fold(0.0, f64::max) + 8.0;
        let before = self.accumulates.then_some(&before[..]);
        Judged::gradient([exact, widen(&naive)], before, other, magnitude).judge(&got)
    }

    /// Returns few distinct values, so that many are equal, with zeros of both signs, and with NaN
    /// in some rows.
    fn few_values(&self) -> Vec<f32> {
        let rng = &mut self.rng();
        let values = [0.0, -0.0, 1.0, -3.0, 7.5, f32::INFINITY, f32::NEG_INFINITY];
        let known = rng.between(1, values.len());
        let [mixed_nan, mixed_ties] = [rng.chance(0.3), rng.chance(0.6)];
        let (known, nan, ties) = match self.content {
            Content::Mixed => (known, mixed_nan, mixed_ties),
            Content::Normal => (known, false, false),
            Content::Ties => (values.len(), false, true),
            Content::Nan => (4, true, true),
            Content::Equal => (1, false, true),
            Content::Hidden => (values.len(), false, false),
        };
        let nan = if nan { 0.02 } else { 0.0 };
        let mut x = self.logits();
        if matches!(self.content, Content::Hidden) {
            x.iter_mut().filter(|_| rng.chance(0.99)).for_each(|x| *x = f32::NEG_INFINITY);
        }
        if ties {
            x.iter_mut().for_each(|x| *x = rng.pick(&values[..known]));
        }
        for x in &mut x {
            if rng.chance(nan) {
                *x = f32::NAN;
            }
        }
        x
    }

    fn top_k(&self) -> Result<f64, String> {
        let Case { profile, layout, shape, dtypes: [own, other], k, .. } = *self;
        profile.tidy();
        let [batch, heads, length, columns] = shape;
        let logits = self.few_values();
        let [x_at, values_at, indices_at] =
            layout.places([shape, [batch, heads, length, k], [batch, heads, length, k]]);
        let x = Placed::input(profile, Values::Floats(&logits), own, x_at);
        let values = self.accumulates.then(|| Placed::output(profile, other, values_at));
        let indices = Placed::output(profile, DType::U32, indices_at);
        let operator = TopK::with_pipelines(profile.gpu.pipelines()).kernel_options(self.kernel_options());
        let call = TopKForward::new(x.view(), indices.view()).values(values.as_ref().map(Placed::view));
        let submitted = if k > MAX_TOP_K {
            let size = operator.scratch_size(&call).map_err(|e| e.to_string())?;
            let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(|e| e.to_string())?;
            profile.gpu.submit(|e| operator.forward_with(e, &call, &mut scratch))
        } else {
            profile.gpu.submit(|e| operator.forward(e, &call))
        };
        submitted.map_err(|e| e.to_string())?;
        let got = pollster::block_on(indices.download_async("indices", profile))?;
        let want = reference::top_k(&logits, columns, k).expect("it fits");
        if let Some(off) = (0..want.len()).find(|n| got.get(*n) != Some(&f64::from(want[*n]))) {
            return Err(format!("index {off} is {:?}, not {}", got.get(off), want[off]));
        }
        if let Some(values) = &values {
            let got = pollster::block_on(values.download_async("values", profile))?;
            let of = want.iter().enumerate().map(|(n, index)| logits[n / k * columns + *index as usize]);
            let want = stored(&of.collect::<Vec<f32>>(), other);
            let same = |a: f64, b: f32| a == f64::from(b) || a.is_nan() && b.is_nan();
            if let Some(off) = (0..want.len()).find(|n| !same(got[*n], want[*n])) {
                return Err(format!("value {off} is {}, not {}", got[off], want[off]));
            }
        }
        Ok(0.0)
    }
}

#[test]
fn log_softmax_equals_the_reference() {
    Report::draws("log-softmax", 12, Case::random, Case::log_softmax);
}

#[test]
fn gradients_equal_the_reference() {
    Report::draws("log-softmax backward", 3, Case::random, Case::backward);
}

#[test]
fn top_k_equals_reference() {
    Report::draws("top-k", 3, Case::random, Case::top_k);
}

/// The selection with and without a scratch, for rows of each content.
#[test]
fn large_k_equals_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("top-k with a large k");
    let sizes = [(65, 65), (66, 65), (1000, 700), (5000, 2048), (5000, 2049), (9000, 5000), (100_000, 2048)];
    let contents = [Content::Normal, Content::Ties, Content::Nan, Content::Equal, Content::Hidden];
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    for (n, (columns, k)) in sizes.into_iter().enumerate() {
        for (m, content) in contents.into_iter().enumerate() {
            let case = Case {
                profile: if (n + m).is_multiple_of(3) { defaults() } else { full() },
                form: FORMS[(n + m) % 2],
                layout: if m == 2 { Layout::Window(n as u64) } else { Layout::Dense },
                shape: [1, 1, 2, columns],
                dtypes: [[f32, f32], [f16, f16], [f32, f16], [bf16, f32]][(n + 2 * m) % 4],
                spread: 1.0,
                k,
                content,
                accumulates: m.is_multiple_of(2),
                seed: (10 * n + m) as u64,
            };
            report.record("top-k", &case, case.top_k());
        }
    }
    report.finish();
}

/// As many columns as a vocabulary.
#[test]
fn long_rows() {
    let mut report = Report::new("long rows of logits");
    for (form, k) in FORMS.into_iter().zip([64, 2048]) {
        let case = Case {
            profile: full(),
            form,
            layout: Layout::Dense,
            shape: [1, 1, 2, 1 << 18],
            dtypes: [DType::F32; 2],
            spread: 1.0,
            k,
            content: Content::Mixed,
            accumulates: true,
            seed: 77,
        };
        report.record("log-softmax", &case, case.log_softmax());
        report.record("backward", &case, case.backward());
        report.record("top-k", &case, case.top_k());
    }
    report.finish();
}

/// Central differences check the reference's gradients.
#[test]
fn reference_gradients_match_finite_differences() {
    let rng = &mut Rng::new(5);
    let (x, d_out) = (widen::<f64>(&rng.normals(14)), widen::<f64>(&rng.normals(14)));
    let loss = |x: &[f64]| -> f64 {
        let out = reference::log_softmax(x, 7).expect("it fits");
        out.iter().zip(&d_out).map(|(o, d)| o * d).sum()
    };
    let out = reference::log_softmax(&x, 7).expect("it fits");
    let got = reference::log_softmax_backward(&out, 7, &d_out).expect("it fits");
    for n in 0..x.len() {
        let at = |by: f64| {
            let mut moved = x.clone();
            moved[n] += by;
            loss(&moved)
        };
        let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
        assert!((got[n] - slope).abs() < 1e-8, "{n}: {} and {slope}", got[n]);
    }
}

/// Rows with NaN or ∞, or with −∞ alone, are NaN. The rows next to them are not.
#[test]
fn rows_without_softmax_are_nan() {
    let gpu = &full().gpu;
    let (rows, columns) = (5, 9);
    let mut x = vec![1.5f32; rows * columns];
    x[3] = f32::NAN;
    x[2 * columns + 8] = f32::INFINITY;
    x[3 * columns..4 * columns].fill(f32::NEG_INFINITY);
    let exact = reference::log_softmax(&widen::<f64>(&x), columns).expect("it fits");
    let buffers = [gpu.upload(&x).expect("x"), gpu.buffer(4 * rows * columns).expect("out")];
    let [x, out] = buffers.each_ref().map(|b| TensorView::sequence(b, DType::F32, [1, rows, columns]));
    for form in FORMS {
        let operator =
            LogSoftmax::with_pipelines(gpu.pipelines()).kernel_options(KernelOptions::new().target(form));
        gpu.submit(|e| operator.forward(e, &LogSoftmaxForward::new(x, out))).expect("a recording");
        let got = gpu.download::<f32>(&buffers[1], rows * columns).expect("a read-back");
        for (n, row) in got.chunks_exact(columns).enumerate() {
            let lost = [0, 2, 3].contains(&n);
            assert!(row.iter().all(|x| x.is_nan() == lost), "{form:?}, row {n}: {row:?}");
            assert!(exact[n * columns..][..columns].iter().all(|x| x.is_nan() == lost), "row {n}");
        }
    }
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..4).map(|_| gpu.buffer(1024).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let x = typed(0, DType::F32, [1, 1, 2, 80]);
    let soft = LogSoftmax::with_pipelines(gpu.pipelines());
    let top = TopK::with_pipelines(gpu.pipelines());
    let refused = |call: TopKForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = top.forward(&mut encoder, &call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(top.forward(&mut pass, &call).is_err() && top.prepare(&call).is_err());
    };
    let indices = typed(1, DType::U32, [1, 1, 2, 4]);
    refused(TopKForward::new(x, typed(1, DType::F32, [1, 1, 2, 4])), &["`indices`", "U32"]);
    refused(TopKForward::new(x, typed(1, DType::U32, [1, 1, 2, 81])), &["`k` is 81", "columns"]);
    refused(TopKForward::new(x.slice(3, 0, 3), indices), &["`k` is 4", "columns"]);
    refused(TopKForward::new(x, typed(1, DType::U32, [1, 1, 3, 4])), &["`indices`", "length must be 2"]);
    refused(TopKForward::new(x, typed(0, DType::U32, [1, 1, 2, 4])), &["`indices`", "`x`"]);
    refused(
        TopKForward::new(x, indices).values(typed(2, DType::F32, [1, 1, 2, 5])),
        &["`values`", "must be 4"],
    );
    refused(
        TopKForward::new(x, indices).values(typed(1, DType::F32, [1, 1, 2, 4])),
        &["`indices`", "`values`"],
    );
    let refused = |result: Result<(), wgpu_attention::Error>, words: &[&str]| {
        let error = result.expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let mut forward = |x, out| soft.forward(&mut encoder, &LogSoftmaxForward::new(x, out));
    refused(forward(x, x), &["`out`", "`x`"]);
    refused(forward(x, typed(1, DType::F32, [1, 1, 2, 79])), &["`out`", "dim must be 80"]);
    refused(forward(typed(1, DType::U32, [1, 1, 2, 80]), x), &["`x`", "F32, F16 or BF16"]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let mut backward = |out, d_out, d_x| {
        let forward = LogSoftmaxForward::new(x, out);
        soft.backward(&mut encoder, &LogSoftmaxBackward::new(forward, d_out, d_x))
    };
    let rows = |n: usize| typed(n, DType::F32, [1, 1, 2, 80]);
    refused(backward(rows(0), rows(1), rows(1)), &["`d_x`", "`d_out`"]);
    refused(backward(rows(0), rows(1), rows(0)), &["`d_x`", "`out`"]);
    refused(backward(rows(0), rows(1).slice(3, 0, 7), rows(2)), &["`d_out`", "dim must be 80"]);
}
