//! Gates of norms, compared with the reference and with test vectors, forward and backward.

use std::fmt;

use wgpu_attention::matmul::Activation;
use wgpu_attention::reference::compare::compare;
use wgpu_attention::reference::{self, Real, widen};
use wgpu_attention::rows::{Norm, NormBackward, NormConfig, NormForward, NormGate};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions, Scratch, TensorView};

use crate::harness::case::{largest, widened};
use crate::harness::run::{Layout, Placed};
use crate::harness::{FLOATS, FORMS, Judged, Profile, Report, Rng, Values, Vector, defaults, full, stored};

pub const FAMILY: &str = "gates";
pub const NAMES: &[&str] = &["gated_norm_gate_first", "gated_norm_silu"];

#[derive(Clone, Debug)]
struct Case {
    profile: &'static Profile,
    form: Target,
    layout: Layout,
    shape: [usize; 4],
    config: NormConfig,
    activation: Activation,
    /// True if the gate comes before the norm.
    first: bool,
    /// The type of inputs, and that of outputs and gradients.
    dtypes: [DType; 2],
    accumulates: bool,
    x: Vec<f32>,
    gate: Vec<f32>,
    weight: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
    d_out: Vec<f32>,
    before: Vec<f32>,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Case { profile, form, layout, shape, config, activation, first, dtypes, .. } = self;
        let [weight, bias] = [&self.weight, &self.bias].map(Option::is_some);
        write!(
            f,
            "{}, {form:?}, {layout:?}, {shape:?}, {config:?}, {activation:?}, first {first}, {dtypes:?}, \
             weight {weight}, bias {bias}, accumulates {}",
            profile.name, self.accumulates
        )
    }
}

fn gate_of<T>(gate: T, activation: Activation, first: bool) -> NormGate<T> {
    if first { NormGate::before(gate, activation) } else { NormGate::after(gate, activation) }
}

/// The gradients of x, gate, weight and bias.
type Gradients<T> = [T; 4];

impl Case {
    fn random(form: Target, seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0x6a7e_d000);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let own = if rng.chance(0.5) { DType::F32 } else { rng.pick(FLOATS) };
        let other = if rng.chance(0.6) { own } else { rng.pick(FLOATS) };
        let window = Layout::Window(rng.word());
        let shape = [
            rng.pick(&[1, 2, 3]),
            rng.pick(&[1, 2, 4]),
            rng.pick(&[1, 5, 33]),
            rng.pick(&[1, 3, 21, 64, 128, 300]),
        ];
        let layer = rng.chance(0.3);
        let config = if layer { NormConfig::layer() } else { NormConfig::rms() };
        let (n, features) = (shape.iter().product(), shape[3]);
        let weight = rng.chance(0.8).then(|| stored(&rng.normals(features), own));
        let bias = (layer && rng.chance(0.7)).then(|| stored(&rng.normals(features), own));
        Case {
            profile,
            form,
            layout: rng.pick(&[Layout::Dense, Layout::Blhd, window]),
            shape,
            config: config.eps(rng.pick(&[1e-5, 1e-6, 0.1])),
            activation: rng.pick(&[Activation::Silu, Activation::Silu, Activation::Sigmoid]),
            first: rng.chance(0.5),
            dtypes: [own, other],
            accumulates: rng.chance(0.4),
            x: stored(&rng.normals(n), own),
            gate: stored(&rng.normals(n), own),
            weight,
            bias,
            d_out: stored(&rng.normals(n), other),
            before: stored(&rng.normals(n), other),
        }
    }

    fn operator(&self) -> Norm {
        let norm = Norm::with_pipelines(self.profile.gpu.pipelines(), self.config).expect("a norm");
        norm.kernel_options(KernelOptions::new().target(self.form))
    }

    /// Places the inputs and calls `run` with the forward call.
    fn placed<T>(&self, run: impl FnOnce(NormForward<'_>, &Placed) -> T) -> T {
        let Case { profile, layout, dtypes: [own, other], .. } = *self;
        profile.tidy();
        let [x_at, gate_at, out_at] = layout.places([self.shape; 3]);
        let [vector] = Layout::Dense.places([[1, 1, 1, self.shape[3]]]);
        let input = |x: &[f32], place| Placed::input(profile, Values::Floats(x), own, place);
        let gate = input(&self.gate, gate_at);
        let [weight, bias] = [&self.weight, &self.bias].map(|t| t.as_ref().map(|t| input(t, vector)));
        let (x, out) = (input(&self.x, x_at), Placed::output(profile, other, out_at));
        let call = NormForward::new(x.view(), out.view())
            .weight(weight.as_ref().map(Placed::view))
            .bias(bias.as_ref().map(Placed::view))
            .gate(gate_of(gate.view(), self.activation, self.first));
        run(call, &out)
    }

    fn truth<R: Real>(&self) -> Vec<R> {
        let [x, gate] = [&self.x, &self.gate].map(|t| widen::<R>(t));
        let [weight, bias] = [&self.weight, &self.bias].map(|t| t.as_ref().map(|t| widen::<R>(t)));
        let gate = gate_of(&gate[..], self.activation, self.first);
        let features = self.shape[3];
        reference::gated_norm(&x, features, weight.as_deref(), bias.as_deref(), &self.config, gate)
            .expect("it fits")
    }

    fn gradients<R: Real>(&self) -> Gradients<Vec<R>> {
        let [x, gate, d_out] = [&self.x, &self.gate, &self.d_out].map(|t| widen::<R>(t));
        let [weight, bias] = [&self.weight, &self.bias].map(|t| t.as_ref().map(|t| widen::<R>(t)));
        let gate = gate_of(&gate[..], self.activation, self.first);
        let (features, config) = (self.shape[3], &self.config);
        let (weight, bias) = (weight.as_deref(), bias.as_deref());
        let got = reference::gated_norm_backward(&x, features, weight, bias, config, gate, &d_out);
        let got = got.expect("it fits");
        [got.norm.d_x, got.d_gate, got.norm.d_weight, got.norm.d_bias]
    }

    fn run_forward(&self) -> Result<Vec<f64>, String> {
        self.placed(|call, out| {
            let operator = self.operator();
            self.profile.gpu.submit(|e| operator.forward(e, &call)).map_err(|e| e.to_string())?;
            pollster::block_on(out.download_async("out", self.profile))
        })
    }

    fn forward(&self) -> Result<f64, String> {
        let (exact, naive) = (self.truth::<f64>(), self.truth::<f32>());
        let magnitude = largest(exact.iter().copied());
        Judged::new(&widened(&naive, self.dtypes[1]), exact, magnitude).judge(&self.run_forward()?)
    }

    fn run_backward(&self) -> Result<Gradients<Option<Vec<f64>>>, String> {
        self.placed(|call, _| {
            let Case { profile, dtypes: [_, other], .. } = *self;
            let vector = [1, 1, 1, self.shape[3]];
            let places = self.layout.places([self.shape; 3]);
            let [vector_at] = Layout::Dense.places([vector]);
            let d_out = Placed::input(profile, Values::Floats(&self.d_out), other, places[0]);
            let held = |n: usize, place| {
                let before = self.before.get(..n).unwrap_or_default();
                Placed::gradient(profile, before, (other, place), self.accumulates)
            };
            let n = self.x.len();
            let targets = [
                Some(held(n, places[1])),
                Some(held(n, places[2])),
                self.weight.as_ref().map(|_| held(vector[3], vector_at)),
                self.bias.as_ref().map(|_| held(vector[3], vector_at)),
            ];
            let [d_x, d_gate, d_weight, d_bias] = targets.each_ref().map(|t| t.as_ref().map(Placed::view));
            let call = NormBackward::new(call, d_out.view())
                .d_x(d_x)
                .d_gate(d_gate)
                .d_weight(d_weight)
                .d_bias(d_bias)
                .accumulate(self.accumulates);
            let operator = self.operator();
            let refused = |e: wgpu_attention::Error| e.to_string();
            let size = operator.backward_scratch_size(&call).map_err(refused)?;
            let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
            profile.gpu.submit(|e| operator.backward(e, &call, &mut scratch)).map_err(refused)?;
            let read = |t: &Placed| pollster::block_on(t.download_async("a gradient", profile));
            let [d_x, d_gate, d_weight, d_bias] = targets.each_ref().map(|t| t.as_ref().map(read));
            Ok([d_x.transpose()?, d_gate.transpose()?, d_weight.transpose()?, d_bias.transpose()?])
        })
    }

    fn backward(&self) -> Result<f64, String> {
        let got = self.run_backward()?;
        if got != self.run_backward()? {
            return Err("other numbers the second time".into());
        }
        let (exact, naive) = (self.gradients::<f64>(), self.gradients::<f32>());
        let mut worst: f64 = 0.0;
        let most = self.magnitudes();
        for (n, got) in got.into_iter().enumerate() {
            let Some(got) = got else { continue };
            let truth = [exact[n].clone(), widen(&naive[n])];
            let before = self.accumulates.then(|| &self.before[..truth[0].len()]);
            let judged = Judged::gradient(truth, before, self.dtypes[1], most[n] + 4.0);
            worst = worst.max(judged.judge(&got).map_err(|e| format!("gradient {n}: {e}"))?);
        }
        Ok(worst)
    }

    /// Returns the largest sums of absolute terms in the gradients.
    fn magnitudes(&self) -> Gradients<f64> {
        let features = self.shape[3];
        let wide = |t: &[f32]| t.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let (x, gate, d_out) = (wide(&self.x), wide(&self.gate), wide(&self.d_out));
        let factors: Vec<f64> = gate.iter().map(|g| reference::activate(*g, self.activation)).collect();
        let input: Vec<f64> = match self.first {
            true => x.iter().zip(&factors).map(|(x, f)| x * f).collect(),
            false => x.clone(),
        };
        let n = reference::norm(&input, features, None, None, &self.config).expect("it fits");
        let weight = |d: usize| self.weight.as_ref().map_or(1.0, |w| f64::from(w[d]));
        let bias = |d: usize| self.bias.as_ref().map_or(0.0, |b| f64::from(b[d]));
        let mut most = [0f64; 2];
        let (mut of_weight, mut of_bias) = (vec![0f64; features], vec![0f64; features]);
        for first in (0..x.len()).step_by(features) {
            let row = first..first + features;
            let after = |i: usize| if self.first { 1.0 } else { factors[i].abs() };
            let g = |i: usize| (d_out[i] * weight(i - first)).abs() * after(i);
            let mean = |f: &dyn Fn(usize) -> f64| row.clone().map(f).sum::<f64>() / features as f64;
            let along = mean(&|i| g(i) * n[i].abs());
            let mean_g = mean(&g);
            let centre = mean(&|i| input[i]);
            // The scale of LayerNorm is the larger one.
            let variance = match reference::norm(&[1.0f64, 1.0], 2, None, None, &self.config) {
                Ok(equal) if equal[0] == 0.0 => mean(&|i| (input[i] - centre) * (input[i] - centre)),
                _ => mean(&|i| input[i] * input[i]),
            };
            let scale = if variance > 0.0 { 1.0 / variance.sqrt() } else { 0.0 };
            for i in row.clone() {
                let d = i - first;
                let e = scale * (g(i) + mean_g + n[i].abs() * along);
                let before = if self.first { factors[i].abs().max(1.1 * x[i].abs()) } else { 1.0 };
                most[0] = most[0].max(e * before);
                let out = (n[i] * weight(d)).abs() + bias(d).abs();
                most[1] = most[1].max(if self.first { e * before } else { 1.1 * d_out[i].abs() * out });
                of_weight[d] += d_out[i].abs() * after(i) * n[i].abs();
                of_bias[d] += d_out[i].abs() * after(i);
            }
        }
        [most[0], most[1], largest(of_weight), largest(of_bias)]
    }
}

/// Returns the case of a vector.
fn vector(name: &str) -> (Case, Vector) {
    let vector = Vector::load(FAMILY, name);
    let activation = match vector.attrs["activation"].as_str() {
        Some("silu") => Activation::Silu,
        _ => Activation::Sigmoid,
    };
    let case = Case {
        profile: full(),
        form: Target::Auto,
        layout: Layout::Dense,
        shape: vector.shape4("x"),
        config: NormConfig::rms().eps(vector.number("eps").expect("eps")),
        activation,
        first: vector.attrs["order"] == "gate_norm",
        dtypes: [DType::F32; 2],
        accumulates: false,
        x: vector.f32("x"),
        gate: vector.f32("gate"),
        weight: Some(vector.f32("norm")),
        bias: None,
        d_out: vector.f32("dout"),
        before: Vec::new(),
    };
    (case, vector)
}

/// The vectors' names of gradients.
const THEIRS: [&str; 3] = ["dx", "dgate", "dnorm"];

#[test]
fn reference_matches_the_vectors() {
    for name in NAMES {
        let (case, vector) = vector(name);
        let check = |tensor: &str, got: &[f64]| {
            let (want, tolerance) = vector.expected(tensor).expect("an output");
            compare(got, &want, tolerance).unwrap_or_else(|e| panic!("{name}: {tensor}: {e}"));
        };
        check("out", &case.truth::<f64>());
        THEIRS.iter().zip(case.gradients::<f64>()).for_each(|(tensor, got)| check(tensor, &got));
    }
}

#[test]
fn devices_match_the_vectors() {
    for name in NAMES {
        for form in FORMS {
            for layout in [Layout::Dense, Layout::Blhd, Layout::Window(6), Layout::Window(7)] {
                let (case, vector) = vector(name);
                let case = Case { form, layout, ..case };
                let check = |tensor: &str, got: &[f64]| {
                    let (want, tolerance) = vector.expected(tensor).expect("an output");
                    compare(got, &want, tolerance).unwrap_or_else(|e| panic!("{case}: {tensor}: {e}"));
                };
                check("out", &case.run_forward().expect("a call"));
                let got = case.run_backward().expect("a call");
                THEIRS.iter().zip(got).for_each(|(tensor, got)| check(tensor, &got.expect("a gradient")));
            }
        }
    }
}

/// The inputs of the vectors in every type, compared with the reference of the rounded inputs.
#[test]
fn vectors_in_types_match_reference() {
    let mut report = Report::new("gated norms, vectors in other types");
    for name in NAMES {
        for (form, dtype) in FORMS.into_iter().flat_map(|form| FLOATS.iter().map(move |d| (form, *d))) {
            let (mut case, _) = vector(name);
            let Case { x, gate, d_out, weight, .. } = &mut case;
            [Some(x), Some(gate), Some(d_out), weight.as_mut()]
                .into_iter()
                .flatten()
                .for_each(|t| *t = stored(t, dtype));
            let case =
                Case { form, dtypes: [dtype; 2], profile: defaults(), layout: Layout::Window(7), ..case };
            report.record("forward", &case, case.forward());
            report.record("backward", &case, case.backward());
        }
    }
    report.finish();
}

#[test]
fn rows_equal_the_reference() {
    Report::draws("gated norm", 10, Case::random, Case::forward);
}

#[test]
fn gradients_equal_the_reference() {
    Report::draws("gated norm backward", 3, Case::random, Case::backward);
}

/// Central differences check the reference's gradients.
#[test]
fn reference_gradients_match_finite_differences() {
    let (rows, features) = (3, 7);
    let rng = &mut Rng::new(5);
    let mut draw = |n: usize| widen::<f64>(&rng.normals(n));
    let all = [rows * features, rows * features, features, features].map(&mut draw);
    let d_out = draw(rows * features);
    for (config, first) in
        [NormConfig::layer(), NormConfig::rms().eps(0.3)].into_iter().flat_map(|c| [(c, false), (c, true)])
    {
        let gate = |all: &[Vec<f64>; 4]| all[1].clone();
        let loss = |all: &[Vec<f64>; 4]| -> f64 {
            let gate = gate(all);
            let gate = gate_of(&gate[..], Activation::Silu, first);
            let [x, _, weight, bias] = all.each_ref().map(|t| &t[..]);
            let out = reference::gated_norm(x, features, Some(weight), Some(bias), &config, gate);
            out.expect("it fits").iter().zip(&d_out).map(|(o, d)| o * d).sum()
        };
        let [x, gate, weight, bias] = all.each_ref().map(|t| &t[..]);
        let gate = gate_of(gate, Activation::Silu, first);
        let (weight, bias) = (Some(weight), Some(bias));
        let got = reference::gated_norm_backward(x, features, weight, bias, &config, gate, &d_out);
        let got = got.expect("it fits");
        let got = [got.norm.d_x, got.d_gate, got.norm.d_weight, got.norm.d_bias];
        for (t, got) in got.iter().enumerate() {
            for n in 0..got.len() {
                let at = |by: f64| {
                    let mut moved = all.clone();
                    moved[t][n] += by;
                    loss(&moved)
                };
                let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
                assert!((got[n] - slope).abs() < 1e-7, "{t}, {n}, {config:?}: {} and {slope}", got[n]);
            }
        }
    }
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..8).map(|_| gpu.buffer(256).expect("a buffer")).collect();
    let wide = |n: usize| TensorView::new(&buffers[n], DType::F32, [1, 1, 3, 8]);
    let norm = Norm::with_pipelines(gpu.pipelines(), NormConfig::rms()).expect("a norm");
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let mut refused = |call: NormForward, words: &[&str]| {
        let error = norm.forward(&mut encoder, &call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    let plain = NormForward::new(wide(0), wide(1));
    let gate = |view| NormGate::after(view, Activation::Silu);
    let narrow = TensorView::new(&buffers[2], DType::F32, [1, 1, 2, 8]);
    refused(plain.gate(gate(narrow)), &["`gate`", "length must be 3"]);
    refused(plain.gate(gate(wide(1))), &["`out`", "`gate`"]);
    let good = plain.gate(gate(wide(2)));
    refused(good.residual(wide(3)), &["`gate`", "`residual`"]);
    refused(good.sum(wide(3)), &["`gate`", "`sum`"]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let mut refused = |call: NormBackward, words: &[&str]| {
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
        let error = norm.backward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    let call = NormBackward::new(good, wide(3));
    refused(call.d_gate(wide(2)), &["`d_gate`", "`gate`"]);
    refused(call.d_gate(wide(4)).d_x(wide(4)), &["`d_x`", "`d_gate`"]);
    refused(call.d_x(wide(4)).d_sum(wide(5)), &["`d_sum`"]);
    refused(NormBackward::new(plain, wide(3)).d_gate(wide(4)), &["d_gate", "no such tensor"]);
}
