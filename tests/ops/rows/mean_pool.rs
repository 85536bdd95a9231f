//! Means of rows, compared with the reference, forward and backward, and with the sentence
//! embeddings of a library.

use std::fmt;

use wgpu_attention::reference::{self, Real, widen};
use wgpu_attention::rows::{MeanPool, MeanPoolBackward, MeanPoolForward, PoolMask};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions, TensorView};

use crate::harness::case::{largest, widened};
use crate::harness::run::{Layout, Placed};
use crate::harness::{FLOATS, Judged, Profile, Report, Rng, Values, defaults, full, stored};

/// The selection of rows, on the host.
#[derive(Clone, Debug)]
enum Which {
    All,
    Lengths(Vec<u32>),
    Keep(Vec<bool>),
    Packed(Vec<u32>),
}

struct Case {
    profile: &'static Profile,
    form: Target,
    layout: Layout,
    batch: usize,
    length: usize,
    features: usize,
    which: Which,
    l2: bool,
    /// The type of x; the type of the output or gradient.
    dtypes: [DType; 2],
    accumulates: bool,
    seed: u64,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Case { profile, form, layout, batch, length, features, l2, dtypes, accumulates, .. } = self;
        let which = format!("{:?}", self.which).chars().take(40).collect::<String>();
        write!(
            f,
            "{}, {form:?}, {layout:?}, {batch} × {length} × {features}, {which}, l2 {l2}, {dtypes:?}, accumulates {accumulates}",
            profile.name
        )
    }
}

impl Case {
    fn random(form: Target, seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0x3ea2_9001);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let first = rng.pick(FLOATS);
        let second = if rng.chance(0.6) { first } else { rng.pick(FLOATS) };
        let length = rng.pick(&[1, 5, 33, 200]);
        let batch = if seed % 4 == 3 { 1 } else { rng.pick(&[1, 2, 11]) };
        let which = match seed % 4 {
            0 => Which::All,
            // Some lengths are 0, some exceed the number of rows.
            1 => Which::Lengths((0..batch).map(|_| rng.below(length + 3) as u32).collect()),
            2 => {
                let share = rng.pick(&[0.0, 0.5, 0.9]);
                Which::Keep(rng.bools(batch * length, share))
            }
            _ => {
                // The first sequence may start after row 0. The last may end past the last row, and
                // some are empty.
                let mut ends: Vec<u32> =
                    (0..rng.between(2, 9)).map(|_| rng.below(length + 4) as u32).collect();
                ends.sort_unstable();
                Which::Packed(ends)
            }
        };
        let window = Layout::Window(rng.word());
        Case {
            profile,
            form,
            layout: rng.pick(&[Layout::Dense, window]),
            batch,
            length,
            features: rng.pick(&[1, 3, 21, 64, 130, 384]),
            which,
            l2: rng.chance(0.5),
            dtypes: [first, second],
            accumulates: rng.chance(0.4),
            seed,
        }
    }

    /// Returns the rows of each sequence.
    fn sequences(&self) -> Vec<Vec<usize>> {
        let length = self.length;
        let of = |b: usize, kept: &dyn Fn(usize) -> bool| {
            (0..length).filter(|i| kept(*i)).map(|i| b * length + i).collect::<Vec<usize>>()
        };
        let each = 0..self.batch;
        match &self.which {
            Which::All => each.map(|b| of(b, &|_| true)).collect(),
            Which::Lengths(n) => each.map(|b| of(b, &|i| i < n[b] as usize)).collect(),
            Which::Keep(keep) => each.map(|b| of(b, &|i| keep[b * length + i])).collect(),
            Which::Packed(ends) => {
                ends.windows(2).map(|w| of(0, &|i| (w[0] as usize..w[1] as usize).contains(&i))).collect()
            }
        }
    }

    fn shape(&self) -> [usize; 4] {
        [self.batch, 1, self.length, self.features]
    }

    fn x(&self) -> Vec<f32> {
        stored(&Rng::new(self.seed ^ 0xda7a).normals(self.shape().iter().product()), self.dtypes[0])
    }

    fn operator(&self) -> MeanPool {
        let kernel_options = KernelOptions::new().target(self.form);
        MeanPool::with_pipelines(self.profile.gpu.pipelines()).kernel_options(kernel_options)
    }

    /// Places x and the selection of rows on the device.
    fn placed<T>(&self, x: &[f32], run: impl FnOnce(TensorView, PoolMask) -> T) -> T {
        let profile = self.profile;
        profile.tidy();
        let (batch, length) = (self.batch, self.length);
        let ends = if let Which::Packed(ends) = &self.which { ends.len() } else { 1 };
        let shapes = [self.shape(), [batch, 1, 1, 1], [batch, 1, 1, length], [1, 1, 1, ends]];
        let places = self.layout.places(shapes);
        let numbers = |n: &[u32], at| Some(Placed::input(profile, Values::Numbers(n), DType::U32, at));
        let x = Placed::input(profile, Values::Floats(x), self.dtypes[0], places[0]);
        let which = match &self.which {
            Which::All => None,
            Which::Lengths(n) => numbers(n, places[1]),
            Which::Keep(keep) => Some(Placed::input(profile, Values::Bools(keep), DType::Bool, places[2])),
            Which::Packed(ends) => numbers(ends, places[3]),
        };
        let rows = match (&self.which, &which) {
            (Which::Lengths(_), Some(t)) => PoolMask::Lengths(t.view()),
            (Which::Keep(_), Some(t)) => PoolMask::Keep(t.view()),
            (Which::Packed(_), Some(t)) => PoolMask::Packed(t.view()),
            _ => PoolMask::All,
        };
        run(x.view(), rows)
    }

    fn means_shape(&self) -> [usize; 4] {
        [self.sequences().len(), 1, 1, self.features]
    }

    fn forward(&self) -> Result<f64, String> {
        let x = self.x();
        let dtype = self.dtypes[1];
        let [at] = self.layout.places([self.means_shape()]);
        let got = self.placed(&x, |x, rows| {
            let out = Placed::output(self.profile, dtype, at);
            let call = MeanPoolForward::new(x, rows, out.view()).normalize(self.l2);
            let operator = self.operator();
            self.profile.gpu.submit(|e| operator.forward(e, &call)).map_err(|e| e.to_string())?;
            pollster::block_on(out.download_async("out", self.profile))
        })?;
        let sequences = self.sequences();
        let exact = reference::mean_pool(&widen::<f64>(&x), self.features, &sequences, self.l2);
        let naive = reference::mean_pool(&x, self.features, &sequences, self.l2);
        let (exact, naive) = (exact.expect("it fits"), naive.expect("it fits"));
        // The magnitude of the mean's terms, or of its direction.
        let magnitude = if self.l2 { 1.0 } else { largest(widen::<f64>(&x)) };
        Judged::new(&widened(&naive, dtype), exact, magnitude).judge(&got)
    }

    fn backward(&self) -> Result<f64, String> {
        let x = self.x();
        let dtype = self.dtypes[1];
        let rng = &mut Rng::new(self.seed ^ 0xd0a7);
        let d_out = stored(&rng.normals(self.means_shape().iter().product()), dtype);
        let before = stored(&rng.normals(x.len()), dtype);
        let run = || {
            self.placed(&x, |x, rows| {
                let profile = self.profile;
                let [d_out_at, d_x_at, unused] =
                    self.layout.places([self.means_shape(), self.shape(), self.means_shape()]);
                let d_out = Placed::input(profile, Values::Floats(&d_out), dtype, d_out_at);
                let out = Placed::output(profile, dtype, unused);
                let d_x = Placed::gradient(profile, &before, (dtype, d_x_at), self.accumulates);
                let forward = MeanPoolForward::new(x, rows, out.view()).normalize(self.l2);
                let call = MeanPoolBackward::new(forward, d_out.view(), d_x.view());
                let call = call.accumulate(self.accumulates);
                let operator = self.operator();
                profile.gpu.submit(|e| operator.backward(e, &call)).map_err(|e| e.to_string())?;
                pollster::block_on(d_x.download_async("d_x", profile))
            })
        };
        let got = run()?;
        if got != run()? {
            return Err("other numbers the second time".into());
        }
        let sequences = self.sequences();
        fn truth<R: Real>(case: &Case, x: &[f32], d_out: &[f32], sequences: &[Vec<usize>]) -> Vec<R> {
            let (x, d_out) = (widen::<R>(x), widen::<R>(d_out));
            let got = reference::mean_pool_backward(&x, case.features, sequences, case.l2, &d_out);
            got.expect("it fits")
        }
        let exact = truth::<f64>(self, &x, &d_out, &sequences);
        let naive = truth::<f32>(self, &x, &d_out, &sequences);
        // With l2, two terms are subtracted, the larger at most |d_out| / |m| each.
        let mut magnitude = largest(widen::<f64>(&d_out));
        if self.l2 {
            let means = reference::mean_pool(&widen::<f64>(&x), self.features, &sequences, false);
            let means = means.expect("it fits");
            let terms = means.chunks_exact(self.features).zip(d_out.chunks_exact(self.features));
            let terms = terms.map(|(m, d)| {
                let length = |x: f64| if x > 0.0 { x.sqrt() } else { 1.0 };
                let sum: f64 = d.iter().map(|d| f64::from(d * d)).sum();
                length(sum) / length(m.iter().map(|m| m * m).sum())
            });
            // Without rows, the divisor is 10⁻¹², and the gradient has no row to go to.
            magnitude = 2.0 * terms.fold(0.0, f64::max);
        }
        let before = self.accumulates.then_some(&before[..]);
        Judged::gradient([exact, widen(&naive)], before, dtype, magnitude + 4.0).judge(&got)
    }
}

#[test]
fn means_equal_the_reference() {
    Report::draws("mean pool", 12, Case::random, Case::forward);
}

#[test]
fn gradients_equal_the_reference() {
    Report::draws("mean pool backward", 4, Case::random, Case::backward);
}

/// Central differences check the reference's gradients.
#[test]
fn reference_gradients_match_finite_differences() {
    let features = 5;
    let rng = &mut Rng::new(5);
    let (x, d_out) = (widen::<f64>(&rng.normals(7 * features)), widen::<f64>(&rng.normals(3 * features)));
    let sequences = [vec![0, 2, 3], vec![], vec![4, 5]];
    for l2 in [false, true] {
        let loss = |x: &[f64]| -> f64 {
            let out = reference::mean_pool(x, features, &sequences, l2).expect("it fits");
            out.iter().zip(&d_out).map(|(o, d)| o * d).sum()
        };
        let got = reference::mean_pool_backward(&x, features, &sequences, l2, &d_out).expect("it fits");
        for n in 0..x.len() {
            let at = |by: f64| {
                let mut moved = x.clone();
                moved[n] += by;
                loss(&moved)
            };
            let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
            assert!((got[n] - slope).abs() < 1e-8, "{n}, l2 {l2}: {} and {slope}", got[n]);
        }
    }
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..5).map(|_| gpu.buffer(256).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let x = typed(0, DType::F32, [2, 1, 3, 8]);
    let out = typed(1, DType::F32, [2, 1, 1, 8]);
    let operator = MeanPool::with_pipelines(gpu.pipelines());
    let refused = |call: MeanPoolForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, &call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward(&mut pass, &call).is_err());
    };
    let of = |rows| MeanPoolForward::new(x, rows, out);
    refused(MeanPoolForward::new(x, PoolMask::All, typed(0, DType::F32, [2, 1, 1, 8])), &["`out`", "`x`"]);
    refused(
        MeanPoolForward::new(x, PoolMask::All, typed(1, DType::F32, [2, 1, 3, 8])),
        &["`out`", "length must be 1"],
    );
    refused(
        MeanPoolForward::new(typed(0, DType::F32, [2, 2, 3, 4]), PoolMask::All, out),
        &["`x`", "heads must be 1"],
    );
    refused(of(PoolMask::Lengths(typed(2, DType::F32, [2, 1, 1, 1]))), &["`lengths`", "U32"]);
    refused(of(PoolMask::Lengths(typed(2, DType::U32, [1, 1, 1, 1]))), &["`lengths`", "batch must be 2"]);
    refused(of(PoolMask::Keep(typed(2, DType::U32, [2, 1, 1, 3]))), &["`keep`", "Bool"]);
    refused(of(PoolMask::Keep(typed(2, DType::Bool, [2, 1, 1, 4]))), &["`keep`", "dim must be 3"]);
    refused(of(PoolMask::Packed(typed(2, DType::U32, [1, 1, 1, 3]))), &["`x`", "batch must be 1"]);
    let one = typed(0, DType::F32, [1, 1, 6, 8]);
    refused(
        MeanPoolForward::new(one, PoolMask::Packed(typed(2, DType::U32, [1, 1, 1, 1])), out),
        &["`cu_seqlens`", "dim must be 2"],
    );
    refused(
        MeanPoolForward::new(one, PoolMask::Packed(typed(2, DType::U32, [1, 1, 1, 5])), out),
        &["`out`", "batch must be 4"],
    );
    let refused = |call: MeanPoolBackward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.backward(&mut encoder, &call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward(&mut pass, &call).is_err());
    };
    let call = of(PoolMask::All);
    let d_out = typed(3, DType::F32, [2, 1, 1, 8]);
    refused(MeanPoolBackward::new(call, d_out, typed(3, DType::F32, [2, 1, 3, 8])), &["`d_x`", "`d_out`"]);
    refused(
        MeanPoolBackward::new(call, d_out, typed(4, DType::F32, [2, 1, 2, 8])),
        &["`d_x`", "length must be 3"],
    );
    refused(
        MeanPoolBackward::new(call, x, typed(4, DType::F32, [2, 1, 3, 8])),
        &["`d_out`", "length must be 1"],
    );
}
