//! Activations, gated ones and residual sums, compared with the reference, forward and backward.

use wgpu_attention::matmul::Activation;
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{activate, activation_slope};
use wgpu_attention::rows::{Elementwise, ElementwiseBackward, ElementwiseForward};
use wgpu_attention::{DType, TensorView};

use crate::harness::case::{largest, widened};
use crate::harness::run::{Layout, Placed};
use crate::harness::{FLOATS, Judged, Profile, Report, Rng, Values, defaults, full, rest, stored};

/// The operand that is combined with f(x).
#[derive(Clone, Copy, Debug, PartialEq)]
enum Join {
    Alone,
    Times,
    Plus,
}

struct Case {
    profile: &'static Profile,
    layout: Layout,
    shape: [usize; 4],
    activation: Option<Activation>,
    join: Join,
    /// The type of inputs; the type of outputs and gradients.
    dtypes: [DType; 2],
    accumulates: bool,
    seed: u64,
}

impl Case {
    fn random(activation: Option<Activation>, join: Join, seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0x0901_7715);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let first = if rng.chance(0.5) { DType::F32 } else { rng.pick(FLOATS) };
        let window = Layout::Window(rng.word());
        Case {
            profile,
            layout: rng.pick(&[Layout::Dense, Layout::Blhd, window]),
            shape: [
                rng.pick(&[1, 2]),
                rng.pick(&[1, 3]),
                rng.pick(&[1, 5, 40]),
                rng.pick(&[1, 2, 4, 21, 64]),
            ],
            activation,
            join,
            dtypes: [first, if rng.chance(0.6) { first } else { rng.pick(FLOATS) }],
            accumulates: rng.chance(0.4),
            seed,
        }
    }

    /// Returns x, its partner, the gradient of the output, and the earlier contents of gradients.
    fn data(&self) -> [Vec<f32>; 4] {
        let rng = &mut Rng::new(self.seed ^ 0x0da7_a0da);
        let n = self.shape.iter().product();
        let [own, other] = self.dtypes;
        let wide: Vec<f32> = rng.normals(n).iter().map(|x| 3.0 * x).collect();
        let mut normals = |dtype| stored(&rng.normals(n), dtype);
        [stored(&wide, own), normals(own), normals(other), normals(other)]
    }

    fn value(&self, x: f64) -> f64 {
        self.activation.map_or(x, |a| activate(x, a))
    }

    fn slope(&self, x: f64) -> f64 {
        self.activation.map_or(1.0, |a| activation_slope(x, a))
    }

    fn call<'a>(&self, x: &'a Placed, other: &'a Placed, out: &'a Placed) -> ElementwiseForward<'a> {
        let given = |join| (self.join == join).then(|| other.view());
        ElementwiseForward::new(x.view(), out.view())
            .activation(self.activation)
            .multiply(given(Join::Times))
            .residual(given(Join::Plus))
    }

    fn judge(&self, what: &str, got: &[f64], want: Vec<f64>) -> Result<f64, String> {
        let naive: Vec<f32> = want.iter().map(|x| *x as f32).collect();
        let magnitude = largest(want.iter().copied()).max(1.0);
        let naive = widened(&naive, self.dtypes[1]);
        let tolerance = Tolerance::gradient(&naive, &want, magnitude, EPSILON_F32);
        Judged { want, tolerance }.judge(got).map_err(|e| format!("{what}: {e}"))
    }

    fn outcome(&self) -> Result<f64, String> {
        let Case { profile, layout, shape, join, dtypes: [own, other], accumulates, .. } = *self;
        profile.tidy();
        let data = self.data();
        let places = layout.places([shape; 6]);
        let input = |n: usize, dtype| Placed::input(profile, Values::Floats(&data[n]), dtype, places[n]);
        let (x, second, d_out) = (input(0, own), input(1, own), input(2, other));
        let out = Placed::output(profile, other, places[3]);
        let gradient = |n: usize| Placed::gradient(profile, &data[3], (other, places[n]), accumulates);
        let (d_x, d_multiply) = (gradient(4), gradient(5));
        let times = join == Join::Times;
        let call = self.call(&x, &second, &out);
        let operator = Elementwise::with_pipelines(profile.gpu.pipelines());
        let backward = ElementwiseBackward::new(call, d_out.view())
            .d_x(d_x.view())
            .d_multiply(times.then(|| d_multiply.view()))
            .accumulate(accumulates);
        profile
            .gpu
            .submit(|e| operator.forward(e, &call).and_then(|()| operator.backward(e, &backward)))
            .map_err(|e| e.to_string())?;
        let read = |t: &Placed| pollster::block_on(t.download_async("a result", profile));
        let [x, second, d_out, before] = data.map(|t| t.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
        let factor = |n: usize| if times { second[n] } else { 1.0 };
        let before = |n: usize| if accumulates { before[n] } else { 0.0 };
        let all = |f: &dyn Fn(usize) -> f64| (0..x.len()).map(f).collect::<Vec<f64>>();
        let added = |n: usize| if join == Join::Plus { second[n] } else { 0.0 };
        let want = all(&|n| self.value(x[n]) * factor(n) + added(n));
        let mut worst = self.judge("out", &read(&out)?, want)?;
        let want = all(&|n| d_out[n] * self.slope(x[n]) * factor(n) + before(n));
        worst = worst.max(self.judge("d_x", &read(&d_x)?, want)?);
        if times {
            let want = all(&|n| d_out[n] * self.value(x[n]) + before(n));
            worst = worst.max(self.judge("d_multiply", &read(&d_multiply)?, want)?);
        }
        Ok(worst)
    }
}

#[test]
fn values_and_gradients_equal_the_reference() {
    let mut report = Report::new("elementwise");
    let activations = [None].into_iter().chain(Activation::ALL.map(Some));
    for (a, activation) in activations.enumerate() {
        for (j, join) in [Join::Alone, Join::Times, Join::Plus].into_iter().enumerate() {
            for n in 0..10 {
                if n > 0 && !rest(&format!("elementwise {activation:?} {join:?} {n}")) {
                    continue;
                }
                let case = Case::random(activation, join, (100 * a + 10 * j + n) as u64);
                let name = format!("{activation:?}, {join:?}");
                let setup = format!("{}, {:?}, {:?}", case.profile.name, case.shape, case.dtypes);
                report.record(&name, &setup, case.outcome());
            }
        }
    }
    report.finish();
}

/// Each value is right to a few units in its last place, also near zero.
#[test]
fn small_values_are_as_exact_as_large_ones() {
    let gpu = &full().gpu;
    let steps: Vec<f32> = (0..8192).map(|n| -14.5 + n as f32 * 0.0035).collect();
    let tiny = (0..60).flat_map(|n| [1.0, -1.0].map(|sign| sign * 0.37f32.powi(n)));
    let x: Vec<f32> = steps.into_iter().chain(tiny).collect();
    let buffers = [gpu.upload(&x).expect("x"), gpu.buffer(4 * x.len()).expect("out")];
    let [from, to] = buffers.each_ref().map(|b| TensorView::vector(b, DType::F32, x.len()));
    let operator = Elementwise::with_pipelines(gpu.pipelines());
    for activation in Activation::ALL {
        let call = ElementwiseForward::new(from, to).activation(activation);
        gpu.submit(|e| operator.forward(e, &call)).expect("a recording");
        let got = gpu.download::<f32>(&buffers[1], x.len()).expect("a read-back");
        let mut worst = (0f64, 0f32);
        for (x, got) in x.iter().zip(got) {
            let want = activate(f64::from(*x), activation);
            // Numbers below the smallest normal number may be flushed to zero.
            let off = (f64::from(got) - want).abs() - 16.0 * f64::from(f32::MIN_POSITIVE);
            // In the tanh variant, the rounding of an exponent as large as 90 reaches the result.
            let exponent = 1.6 * f64::from(x.abs()) * (1.0 + 0.0448 * f64::from(x * x));
            let more = if activation == Activation::GeluTanh { 1.0 + 0.25 * exponent } else { 1.0 };
            let units = off / (want.abs() * more * f64::from(f32::EPSILON)).max(f64::MIN_POSITIVE);
            if units > worst.0 {
                worst = (units, *x);
            }
        }
        crate::harness::say(&format!(
            "{activation:?}: {:.1} units in the last place at {}",
            worst.0, worst.1
        ));
        assert!(worst.0 <= 8.0, "{activation:?}: {} units at {}", worst.0, worst.1);
    }
}

#[test]
fn large_numbers_and_nan_go_through() {
    let gpu = &full().gpu;
    let x = [f32::NAN, f32::INFINITY, 1e30, -1e30, 200.0, -200.0, 0.0, -0.0];
    let upload = |x: &[f32]| gpu.upload(x).expect("an upload");
    let ones = upload(&[1.0; 8]);
    let buffers = [upload(&x), upload(&[7.0; 8]), upload(&[7.0; 8])];
    let view = |b| TensorView::vector(b, DType::F32, 8);
    let operator = Elementwise::with_pipelines(gpu.pipelines());
    for activation in Activation::ALL {
        let call = ElementwiseForward::new(view(&buffers[0]), view(&buffers[1])).activation(activation);
        let backward = ElementwiseBackward::new(call, view(&ones)).d_x(view(&buffers[2]));
        gpu.submit(|e| operator.forward(e, &call).and_then(|()| operator.backward(e, &backward)))
            .expect("a recording");
        let [y, slope] = [1, 2].map(|n: usize| gpu.download::<f32>(&buffers[n], 8).expect("a read-back"));
        assert!(y[0].is_nan(), "{activation:?}: {y:?}");
        let (values, slopes) = match activation {
            Activation::Sigmoid => {
                ([1.0, 1.0, 0.0, 1.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0, 0.0, 0.25, 0.25])
            }
            _ => {
                let middle = if activation == Activation::Relu { 0.0 } else { 0.5 };
                let values = [f32::INFINITY, 1e30, 0.0, 200.0, 0.0, 0.0, 0.0];
                (values, [1.0, 1.0, 0.0, 1.0, 0.0, middle, middle])
            }
        };
        assert_eq!(y[1..], values, "{activation:?}");
        assert_eq!(slope[1..], slopes, "{activation:?}");
        assert!(slope[0].is_nan() || activation == Activation::Relu, "{activation:?}: {slope:?}");
    }
}

/// Central differences check the reference's slopes.
#[test]
fn slopes_match_finite_differences() {
    for activation in Activation::ALL {
        for n in -60..60 {
            let (x, h) = (0.13 * f64::from(n) + 0.01, 1e-6);
            let want = (activate(x + h, activation) - activate(x - h, activation)) / (2.0 * h);
            let got = activation_slope(x, activation);
            assert!((got - want).abs() < 1e-8, "{activation:?} at {x}: {got} and {want}");
        }
    }
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..5).map(|_| gpu.buffer(256).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize| typed(n, DType::F32, [1, 2, 3, 4]);
    let operator = Elementwise::with_pipelines(gpu.pipelines());
    let refused = |call: ElementwiseForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, &call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward(&mut pass, &call).is_err());
    };
    let good = ElementwiseForward::new(view(0), view(1)).activation(Activation::Gelu);
    refused(ElementwiseForward::new(view(0), view(0)), &["`out`", "`x`"]);
    refused(
        ElementwiseForward::new(view(0), typed(1, DType::Bool, [1, 2, 3, 4])),
        &["`out`", "F32, F16 or BF16"],
    );
    refused(good.multiply(typed(2, DType::F32, [1, 2, 1, 4])), &["`multiply`", "length must be 3", "got 1"]);
    refused(good.residual(view(1)), &["`out`", "`residual`"]);
    refused(good.multiply(view(2)).residual(view(3)), &["`multiply` with `residual`"]);
    refused(ElementwiseForward::new(view(0), view(1).with_offset(60)), &["`out`", "byte"]);
    let refused = |call: ElementwiseBackward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.backward(&mut encoder, &call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward(&mut pass, &call).is_err());
    };
    let call = ElementwiseBackward::new(good.multiply(view(2)), view(3));
    refused(call, &["no gradient is requested"]);
    refused(call.d_x(view(3)), &["`d_x`", "`d_out`"]);
    refused(call.d_x(view(4)).d_multiply(view(4)), &["overlap"]);
    refused(call.d_multiply(view(2)), &["`d_multiply`", "`multiply`"]);
    refused(ElementwiseBackward::new(good, view(3)).d_multiply(view(4)), &["d_multiply"]);
    refused(call.d_x(typed(4, DType::F32, [2, 1, 3, 4])), &["`d_x`", "batch must be 1"]);
}
