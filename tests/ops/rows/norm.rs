//! LayerNorm and RMSNorm, compared with the reference, forward and backward.

use std::fmt;

use wgpu_attention::reference;
use wgpu_attention::reference::widen;
use wgpu_attention::rows::{Norm, NormBackward, NormConfig, NormForward};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions, Scratch, TensorView};

use crate::harness::case::{largest, widened};
use crate::harness::run::{Layout, Placed};
use crate::harness::{FLOATS, FORMS, Judged, Profile, Report, Rng, Values, defaults, full, stored};

/// A norm with its options, and its data's shape and types.
struct Case {
    profile: &'static Profile,
    form: Target,
    layout: Layout,
    shape: [usize; 4],
    config: NormConfig,
    residual: bool,
    weight: bool,
    bias: bool,
    /// The type of x, residual and vectors; the type of the output or gradient.
    dtypes: [DType; 2],
    /// The mean of the rows.
    offset: f32,
    accumulates: bool,
    seed: u64,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Case { profile, form, layout, shape, config, residual, weight, bias, dtypes, offset, .. } = self;
        write!(
            f,
            "{}, {form:?}, {layout:?}, {shape:?}, {config:?}, residual {residual}, weight {weight}, bias {bias}, \
             {dtypes:?}, mean {offset}, accumulates {}",
            profile.name, self.accumulates
        )
    }
}

struct Data {
    x: Vec<f32>,
    residual: Option<Vec<f32>>,
    weight: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
    d_out: Vec<f32>,
    d_sum: Option<Vec<f32>>,
    before: Vec<f32>,
}

impl Case {
    fn random(form: Target, seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0x0a17_b10c);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let first = if rng.chance(0.5) { DType::F32 } else { rng.pick(FLOATS) };
        let second = if rng.chance(0.6) { first } else { rng.pick(FLOATS) };
        let window = Layout::Window(rng.word());
        let config = if rng.chance(0.5) { NormConfig::layer() } else { NormConfig::rms() };
        let weight = rng.chance(0.7);
        Case {
            profile,
            form,
            layout: rng.pick(&[Layout::Dense, Layout::Blhd, window]),
            shape: [
                rng.pick(&[1, 2, 3]),
                rng.pick(&[1, 1, 2]),
                rng.pick(&[1, 5, 33, 70]),
                rng.pick(&[1, 3, 21, 64, 130, 768]),
            ],
            config: config.eps(rng.pick(&[1e-5, 1e-12, 0.1])),
            residual: rng.chance(0.6),
            weight,
            bias: weight && rng.chance(0.7),
            dtypes: [first, second],
            offset: rng.pick(&[0.0, 0.0, 64.0, 4096.0]),
            accumulates: rng.chance(0.4),
            seed,
        }
    }

    fn data(&self) -> Data {
        let rng = &mut Rng::new(self.seed ^ 0x0da7_a0da);
        let (n, features) = (self.shape.iter().product(), self.shape[3]);
        let [own, other] = self.dtypes;
        let mut normals = |n, dtype| stored(&rng.normals(n), dtype);
        let mut x = normals(n, own);
        x.iter_mut().for_each(|x| *x = 2.0 * *x + self.offset);
        let [residual, d_sum, d_out, before] = [own, other, other, other].map(|dtype| normals(n, dtype));
        let [weight, bias] = [(); 2].map(|()| normals(features, own));
        Data {
            x: stored(&x, own),
            residual: self.residual.then_some(residual),
            weight: self.weight.then_some(weight),
            bias: self.bias.then_some(bias),
            d_out,
            d_sum: self.residual.then_some(d_sum),
            before,
        }
    }

    fn vector_shape(&self) -> [usize; 4] {
        [1, 1, 1, self.shape[3]]
    }

    fn operator(&self) -> Norm {
        let norm = Norm::with_pipelines(self.profile.gpu.pipelines(), self.config).expect("a norm");
        norm.kernel_options(KernelOptions::new().target(self.form))
    }

    /// Places the inputs on the device and calls `run` with the forward call.
    fn placed<T>(&self, data: &Data, run: impl FnOnce(NormForward<'_>, &[Placed]) -> T) -> T {
        let Case { profile, layout, dtypes: [own, other], .. } = *self;
        profile.tidy();
        let places = layout.places([self.shape; 5]);
        let [vector] = Layout::Dense.places([self.vector_shape()]);
        let input = |x: &[f32], place| Placed::input(profile, Values::Floats(x), own, place);
        let x = input(&data.x, places[0]);
        let residual = data.residual.as_ref().map(|r| input(r, places[1]));
        let weight = data.weight.as_ref().map(|w| input(w, vector));
        let bias = data.bias.as_ref().map(|b| input(b, vector));
        let outputs = [2, 3].map(|n| Placed::output(profile, other, places[n]));
        let call = NormForward::new(x.view(), outputs[0].view())
            .residual(residual.as_ref().map(Placed::view))
            .weight(weight.as_ref().map(Placed::view))
            .bias(bias.as_ref().map(Placed::view))
            .sum(residual.as_ref().map(|_| outputs[1].view()));
        run(call, &outputs)
    }

    fn forward(&self) -> Result<f64, String> {
        let data = self.data();
        let features = self.shape[3];
        let got = self.placed(&data, |call, outputs| {
            let operator = self.operator();
            self.profile.gpu.submit(|e| operator.forward(e, &call)).map_err(|e| e.to_string())?;
            let read = |n: usize| pollster::block_on(outputs[n].download_async("out", self.profile));
            let sum = self.residual.then(|| read(1)).transpose()?;
            Ok::<_, String>((read(0)?, sum))
        })?;
        fn truth<R: reference::Real>(data: &Data, features: usize, config: &NormConfig) -> [Vec<R>; 2] {
            let x = summed::<R>(data);
            let [weight, bias] = [&data.weight, &data.bias].map(|t| t.as_ref().map(|t| widen::<R>(t)));
            let out = reference::norm(&x, features, weight.as_deref(), bias.as_deref(), config);
            [out.expect("it fits"), x]
        }
        let exact = truth::<f64>(&data, features, &self.config);
        let naive = truth::<f32>(&data, features, &self.config);
        let mut worst: f64 = 0.0;
        for (n, got) in [Some(got.0), got.1].into_iter().enumerate() {
            let Some(got) = got else { continue };
            let magnitude = largest(exact[n].iter().copied());
            let judged = Judged::new(&widened(&naive[n], self.dtypes[1]), exact[n].clone(), magnitude);
            worst = worst.max(judged.judge(&got).map_err(|e| format!("output {n}: {e}"))?);
        }
        Ok(worst)
    }

    fn backward(&self) -> Result<f64, String> {
        let data = self.data();
        let (features, [_, other]) = (self.shape[3], self.dtypes);
        let run = || {
            self.placed(&data, |call, _| {
                let profile = self.profile;
                let places = self.layout.places([self.shape; 4]);
                let [vector] = Layout::Dense.places([self.vector_shape()]);
                let input = |x: &[f32], place| Placed::input(profile, Values::Floats(x), other, place);
                let d_out = input(&data.d_out, places[0]);
                let d_sum = data.d_sum.as_ref().map(|d| input(d, places[1]));
                let held = |n: usize, place| {
                    Placed::gradient(profile, &data.before[..n], (other, place), self.accumulates)
                };
                let d_x = held(data.x.len(), places[2]);
                let d_weight = self.weight.then(|| held(features, vector));
                let d_bias = self.bias.then(|| held(features, vector));
                let call = NormBackward::new(call, d_out.view())
                    .d_sum(d_sum.as_ref().map(Placed::view))
                    .d_x(d_x.view())
                    .d_weight(d_weight.as_ref().map(Placed::view))
                    .d_bias(d_bias.as_ref().map(Placed::view))
                    .accumulate(self.accumulates);
                let operator = self.operator();
                let refused = |e: wgpu_attention::Error| e.to_string();
                let size = operator.backward_scratch_size(&call).map_err(refused)?;
                let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
                profile.gpu.submit(|e| operator.backward(e, &call, &mut scratch)).map_err(refused)?;
                let read = |t: &Placed| pollster::block_on(t.download_async("a gradient", profile));
                Ok::<_, String>([
                    Some(read(&d_x)?),
                    d_weight.as_ref().map(read).transpose()?,
                    d_bias.as_ref().map(read).transpose()?,
                ])
            })
        };
        let got = run()?;
        if got != run()? {
            return Err("other numbers the second time".into());
        }
        let exact = gradients::<f64>(&data, features, &self.config);
        let naive = gradients::<f32>(&data, features, &self.config);
        let most = magnitudes(&data, features, &self.config);
        let mut worst: f64 = 0.0;
        for (n, got) in got.into_iter().enumerate() {
            let Some(got) = got else { continue };
            let truth = [exact[n].clone(), widen(&naive[n])];
            let before = self.accumulates.then_some(&data.before[..]);
            let judged = Judged::gradient(truth, before, other, most[n] + 4.0);
            worst = worst.max(judged.judge(&got).map_err(|e| format!("gradient {n}: {e}"))?);
        }
        Ok(worst)
    }
}

fn summed<R: reference::Real>(data: &Data) -> Vec<R> {
    let x = widen::<R>(&data.x);
    match &data.residual {
        Some(residual) => x.iter().zip(widen::<R>(residual)).map(|(x, r)| *x + r).collect(),
        None => x,
    }
}

/// Returns the gradients of x, weight and bias.
fn gradients<R: reference::Real>(data: &Data, features: usize, config: &NormConfig) -> [Vec<R>; 3] {
    let weight = data.weight.as_ref().map(|w| widen::<R>(w));
    let d_out = widen::<R>(&data.d_out);
    let got = reference::norm_backward(&summed::<R>(data), features, weight.as_deref(), config, &d_out);
    let mut got = got.expect("it fits");
    for (d_x, d_sum) in got.d_x.iter_mut().zip(data.d_sum.iter().flatten()) {
        *d_x = *d_x + R::of(f64::from(*d_sum));
    }
    [got.d_x, got.d_weight, got.d_bias]
}

/// Returns the largest sums of absolute terms in the gradients.
fn magnitudes(data: &Data, features: usize, config: &NormConfig) -> [f64; 3] {
    let x = summed::<f64>(data);
    let n = reference::norm(&x, features, None, None, config).expect("it fits");
    let (mut of_x, mut of_weight, mut of_bias) = (0f64, vec![0f64; features], vec![0f64; features]);
    let rows = x.chunks_exact(features).zip(n.chunks_exact(features)).zip(data.d_out.chunks_exact(features));
    for ((x, n), d_out) in rows {
        let g = |d: usize| f64::from(d_out[d] * data.weight.as_ref().map_or(1.0, |w| w[d])).abs();
        let mean = |f: &dyn Fn(usize) -> f64| (0..features).map(f).sum::<f64>() / features as f64;
        let (mean_g, along) = (mean(&g), mean(&|d| g(d) * n[d].abs()));
        let centre = if config_centred(config) { mean(&|d| x[d]) } else { 0.0 };
        let spread = mean(&|d| (x[d] - centre) * (x[d] - centre));
        for d in 0..features {
            // The scale is n over x. If x equals its mean, the spread alone gives the scale.
            let scale = if spread > 0.0 { (n[d] / (x[d] - centre)).abs() } else { 0.0 };
            if scale.is_finite() {
                of_x = of_x.max(scale * (g(d) + mean_g + n[d].abs() * along));
            }
            of_weight[d] += f64::from(d_out[d].abs()) * n[d].abs();
            of_bias[d] += f64::from(d_out[d].abs());
        }
    }
    [of_x, largest(of_weight), largest(of_bias)]
}

/// True if a row of equal elements becomes zeros.
fn config_centred(config: &NormConfig) -> bool {
    reference::norm(&[1.0f64, 1.0], 2, None, None, config).expect("it fits")[0] == 0.0
}

#[test]
fn rows_equal_the_reference() {
    Report::draws("norm", 8, Case::random, Case::forward);
}

#[test]
fn gradients_equal_the_reference() {
    Report::draws("norm backward", 3, Case::random, Case::backward);
}

/// Central differences check the reference's gradients.
#[test]
fn reference_gradients_match_finite_differences() {
    let (rows, features) = (3, 7);
    let rng = &mut Rng::new(5);
    let mut draw = |n| widen::<f64>(&rng.normals(n));
    let (x, weight, bias, d_out) =
        (draw(rows * features), draw(features), draw(features), draw(rows * features));
    for config in [NormConfig::layer(), NormConfig::rms().eps(0.3)] {
        let loss = |x: &[f64], w: &[f64], b: &[f64]| -> f64 {
            let out = reference::norm(x, features, Some(w), Some(b), &config).expect("it fits");
            out.iter().zip(&d_out).map(|(o, d)| o * d).sum()
        };
        let got = reference::norm_backward(&x, features, Some(&weight), &config, &d_out).expect("it fits");
        let h = 1e-5;
        let slope = |n: usize, of: &[f64], f: &dyn Fn(&[f64]) -> f64| {
            let at = |by: f64| {
                let mut moved = of.to_vec();
                moved[n] += by;
                f(&moved)
            };
            (at(h) - at(-h)) / (2.0 * h)
        };
        let close = |got: f64, want: f64| assert!((got - want).abs() < 1e-7, "{got} and {want}, {config:?}");
        (0..x.len()).for_each(|n| close(got.d_x[n], slope(n, &x, &|x| loss(x, &weight, &bias))));
        (0..features).for_each(|n| close(got.d_weight[n], slope(n, &weight, &|w| loss(&x, w, &bias))));
        (0..features).for_each(|n| close(got.d_bias[n], slope(n, &bias, &|b| loss(&x, &weight, b))));
    }
}

/// A mean of about 10⁶, which f32 rounds by up to 0.03, shifts no normalised value.
#[test]
fn large_means_are_exact() {
    let gpu = &full().gpu;
    let features = 3;
    let x = [1.0, 2.0, 4.0].map(|x| 1e6f32 + x);
    let norm = NormConfig::layer();
    let want = reference::norm(&x.map(f64::from), features, None, None, &norm).expect("it fits");
    let buffers = [gpu.upload(&x).expect("x"), gpu.buffer(4 * features).expect("out")];
    let [x, out] = buffers.each_ref().map(|b| TensorView::sequence(b, DType::F32, [1, 1, features]));
    for form in FORMS {
        let norm = Norm::with_pipelines(gpu.pipelines(), norm)
            .expect("a norm")
            .kernel_options(KernelOptions::new().target(form));
        gpu.submit(|e| norm.forward(e, &NormForward::new(x, out))).expect("a recording");
        let got = gpu.download::<f32>(&buffers[1], features).expect("a read-back");
        for (got, want) in got.iter().zip(&want) {
            assert!((f64::from(*got) - want).abs() < 1e-5, "{form:?}: {got} and {want}");
        }
    }
}

/// Some devices read a subnormal `eps` as 0, and `0 · ∞` is NaN.
#[test]
fn subnormal_eps_gives_zeros() {
    let gpu = &full().gpu;
    let buffers = [gpu.upload(&[0.0f32; 6]).expect("x"), gpu.buffer(4 * 6).expect("out")];
    let [x, out] = buffers.each_ref().map(|b| TensorView::sequence(b, DType::F32, [1, 2, 3]));
    for config in [NormConfig::layer(), NormConfig::rms()] {
        for eps in [1e-45, 1e-60] {
            let config = config.eps(eps);
            let want = reference::norm(&[0.0f32; 6], 3, None, None, &config).expect("it fits");
            assert_eq!(want, [0.0; 6], "{config:?}");
            for form in FORMS {
                let norm = Norm::with_pipelines(gpu.pipelines(), config).expect("a norm");
                let norm = norm.kernel_options(KernelOptions::new().target(form));
                gpu.submit(|e| norm.forward(e, &NormForward::new(x, out))).expect("a recording");
                let got = gpu.download::<f32>(&buffers[1], 6).expect("a read-back");
                assert_eq!(got, want, "{config:?}, {form:?}");
            }
        }
    }
}

/// Equal elements become zeros before the bias, even if their mean is rounded. A NaN stays in its
/// row.
#[test]
fn rows_of_equals_and_rows_with_nan() {
    let gpu = &full().gpu;
    let features = 21;
    for form in FORMS {
        let mut x = vec![1000.1f32; 3 * features];
        x[features + 4] = f32::NAN;
        x[2 * features..].fill(0.0);
        let buffers = [gpu.upload(&x).expect("x"), gpu.buffer(12 * features).expect("out")];
        let [x, out] = buffers.each_ref().map(|b| TensorView::sequence(b, DType::F32, [1, 3, features]));
        for config in [NormConfig::layer(), NormConfig::rms()] {
            let norm = Norm::with_pipelines(gpu.pipelines(), config).expect("a norm");
            let norm = norm.kernel_options(KernelOptions::new().target(form));
            gpu.submit(|e| norm.forward(e, &NormForward::new(x, out))).expect("a recording");
            let got = gpu.download::<f32>(&buffers[1], 3 * features).expect("a read-back");
            let equals = if config == NormConfig::layer() { 0.0 } else { 1.0 };
            assert!(got[..features].iter().all(|x| (x - equals).abs() < 1e-5), "{config:?}: {got:?}");
            assert!(got[features..2 * features].iter().all(|x| x.is_nan()), "{config:?}: {got:?}");
            assert!(got[2 * features..].iter().all(|x| *x == 0.0), "{config:?}: {got:?}");
        }
    }
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..8).map(|_| gpu.buffer(256).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let wide = |n: usize| typed(n, DType::F32, [1, 1, 3, 8]);
    let vector = |n: usize| TensorView::vector(&buffers[n], DType::F32, 8);
    let norm = Norm::with_pipelines(gpu.pipelines(), NormConfig::layer()).expect("a norm");
    let refused = |call: NormForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = norm.forward(&mut encoder, &call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(norm.forward(&mut pass, &call).is_err() && norm.prepare(&call).is_err());
    };
    let good = NormForward::new(wide(0), wide(1)).weight(vector(2)).bias(vector(3));
    refused(NormForward::new(wide(0), wide(0)), &["`out`", "`x`"]);
    refused(NormForward::new(wide(0), typed(1, DType::F32, [1, 1, 2, 8])), &["`out`", "length must be 3"]);
    refused(NormForward::new(typed(0, DType::U32, [1, 1, 3, 8]), wide(1)), &["`x`", "F32, F16 or BF16"]);
    refused(good.weight(TensorView::vector(&buffers[2], DType::F32, 7)), &["`weight`", "must be 8", "got 7"]);
    refused(good.bias(vector(1)), &["`out`", "`bias`"]);
    refused(good.residual(typed(4, DType::F32, [1, 2, 3, 8])), &["`residual`", "heads must be 1"]);
    refused(good.residual(wide(4)).sum(wide(4)), &["`sum`", "`residual`"]);
    refused(good.residual(wide(4)).sum(wide(1)), &["`out`", "`sum`", "overlap"]);
    refused(good.sum(wide(5).with_strides([0; 4])), &["`sum`", "share memory"]);
    for eps in [-1.0, f64::NAN, 1e300] {
        let error = Norm::with_pipelines(gpu.pipelines(), NormConfig::rms().eps(eps)).expect_err("an eps");
        assert!(error.to_string().contains("eps"), "{error}");
    }
    let refused = |call: NormBackward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
        let error = norm.backward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(norm.backward(&mut pass, &call, &mut scratch).is_err());
    };
    let call = NormBackward::new(good, wide(4));
    refused(call, &["no gradient is requested"]);
    refused(call.d_x(wide(4)), &["`d_x`", "`d_out`"]);
    refused(call.d_x(typed(5, DType::F32, [1, 1, 3, 7])), &["`d_x`", "dim must be 8"]);
    refused(call.d_x(wide(5)).d_sum(wide(5)), &["`d_x`", "`d_sum`"]);
    refused(call.d_weight(vector(2)), &["`d_weight`", "`weight`"]);
    refused(call.d_bias(TensorView::vector(&buffers[6], DType::F32, 9)), &["`d_bias`", "must be 8"]);
    refused(
        NormBackward::new(NormForward::new(wide(0), wide(1)), wide(4)).d_weight(vector(6)),
        &["d_weight"],
    );
    refused(call.d_weight(vector(6)).d_bias(vector(6)), &["overlap"]);
    refused(call.d_weight(vector(6)), &["scratch", "partials"]);
}
