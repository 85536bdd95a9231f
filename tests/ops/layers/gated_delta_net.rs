//! The gated DeltaNet layer, compared with its formula and with the reference.

use std::fmt;

use wgpu_attention::layers::{
    GatedDeltaNet, GatedDeltaNetBackward, GatedDeltaNetConfig, GatedDeltaNetForward, GatedDeltaNetState,
    GatedDeltaNetWeights,
};
use wgpu_attention::reference::{
    HostGatedDeltaNetState, Real, gated_delta_net, gated_delta_net_backward, widen,
};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, Error, KernelOptions, Scratch, TensorView};

use crate::harness::case::{largest, widened};
use crate::harness::run::{Layout, Placed};
use crate::harness::{
    FLOATS, FORMS, Judged, Profile, Report, Rng, Values, defaults, due, full, rest, stored,
};

type Weights<T> = GatedDeltaNetWeights<Vec<T>>;

/// Key heads, value heads, channels of each, width of the convolution, features, batch, length.
type Sizes = [usize; 8];

const SMALL: Sizes = [2, 4, 8, 12, 4, 24, 2, 21];

fn config_of([heads, value_heads, head_dim, value_dim, width, features, ..]: Sizes) -> GatedDeltaNetConfig {
    GatedDeltaNetConfig::new(features, heads, head_dim)
        .value_heads(value_heads)
        .value_dim(value_dim)
        .conv_width(width)
}

/// Random weights, in the layer's order.
fn random_weights(config: &GatedDeltaNetConfig, rng: &mut Rng) -> Weights<f32> {
    let shapes = config.weight_shapes();
    let mut weights = shapes.map(|shape| {
        let deviation = 1.0 / (shape[3] as f32).sqrt();
        rng.normals(shape.iter().product()).into_iter().map(|x| x * deviation).collect::<Vec<f32>>()
    });
    let of_value_heads = shapes.a_log[3];
    weights.a_log = rng.normals(of_value_heads).into_iter().map(|x| x - 0.5).collect();
    weights.dt_bias = rng.normals(of_value_heads);
    weights.norm = rng.normals(shapes.norm[3]).into_iter().map(|x| 1.0 + 0.3 * x).collect();
    weights
}

fn map<T, U>(weights: &Weights<T>, f: impl FnMut(&Vec<T>) -> Vec<U>) -> Weights<U> {
    weights.as_ref().map(f)
}

fn tensor_of(weights: &Weights<f64>, name: &str) -> Option<Vec<f64>> {
    let mut all = weights.as_ref().named().into_iter();
    all.find(|(other, _)| *other == name).map(|(_, values)| values.clone())
}

/// Computes the layer token by token from a checkpoint of Qwen3-Next, as its definition says. `x`
/// is `[length, features]`.
fn written_out(x: &[f64], weights: &Weights<f64>, sizes: Sizes) -> Vec<f64> {
    let [heads, value_heads, dk, dv, width, features, ..] = sizes;
    let group = value_heads / heads;
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let times = |w: &[f64], x: &[f64]| w.chunks(x.len()).map(|row| dot(row, x)).collect::<Vec<_>>();
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let channels = 2 * heads * dk + value_heads * dv;
    let mut inputs: Vec<Vec<f64>> = vec![vec![0.0; channels]; width - 1];
    let mut states = vec![vec![0.0; dk * dv]; value_heads];
    let mut out = Vec::new();
    for x in x.chunks(features) {
        let [mut q, mut k, mut v, mut z]: [Vec<f64>; 4] = Default::default();
        for head in times(&weights.in_proj_qkvz, x).chunks(2 * dk + 2 * group * dv) {
            q.extend(&head[..dk]);
            k.extend(&head[dk..2 * dk]);
            v.extend(&head[2 * dk..2 * dk + group * dv]);
            z.extend(&head[2 * dk + group * dv..]);
        }
        let (mut b, mut a): (Vec<f64>, Vec<f64>) = Default::default();
        for head in times(&weights.in_proj_ba, x).chunks(2 * group) {
            b.extend(&head[..group]);
            a.extend(&head[group..]);
        }
        inputs.push([q, k, v].concat());
        let last = &inputs[inputs.len() - width..];
        let convolved: Vec<f64> = (0..channels)
            .map(|c| silu((0..width).map(|j| weights.conv1d[c * width + j] * last[j][c]).sum()))
            .collect();
        let unit = |x: &[f64]| {
            let length = (dot(x, x) + 1e-6).sqrt();
            x.iter().map(|x| x / length).collect::<Vec<_>>()
        };
        let mut gated = Vec::new();
        for h in 0..value_heads {
            let q = unit(&convolved[h / group * dk..][..dk]);
            let k = unit(&convolved[heads * dk + h / group * dk..][..dk]);
            let v = &convolved[2 * heads * dk + h * dv..][..dv];
            let beta = 1.0 / (1.0 + (-b[h]).exp());
            let g = -weights.a_log[h].exp() * (1.0 + (a[h] + weights.dt_bias[h]).exp()).ln();
            let state = &mut states[h];
            state.iter_mut().for_each(|s| *s *= g.exp());
            let known: Vec<f64> = (0..dv).map(|c| (0..dk).map(|f| state[f * dv + c] * k[f]).sum()).collect();
            for f in 0..dk {
                (0..dv).for_each(|c| state[f * dv + c] += k[f] * beta * (v[c] - known[c]));
            }
            let o: Vec<f64> = (0..dv)
                .map(|c| (0..dk).map(|f| state[f * dv + c] * q[f]).sum::<f64>() / (dk as f64).sqrt())
                .collect();
            // Kernels also round eps to f32.
            let scale = (dot(&o, &o) / dv as f64 + f64::from(1e-6f32)).sqrt();
            gated.extend((0..dv).map(|c| o[c] / scale * weights.norm[c] * silu(z[h * dv + c])));
        }
        out.extend(times(&weights.out_proj, &gated));
    }
    out
}

#[test]
fn reference_follows_written_formula() {
    for (n, sizes) in [SMALL, [1, 1, 4, 4, 2, 5, 1, 9], [3, 6, 5, 7, 4, 11, 2, 1]].into_iter().enumerate() {
        let rng = &mut Rng::new(n as u64);
        let config = config_of(sizes);
        let stored = map(&random_weights(&config, rng), |t| widen(t));
        let own = GatedDeltaNetWeights::from_checkpoint(&config, |name| tensor_of(&stored, name)).unwrap();
        let [.., features, batch, length] = sizes;
        let x: Vec<f64> = widen(&rng.normals(batch * length * features));
        let (got, _) = gated_delta_net(&x, [batch, length], &config, &own, None).unwrap();
        let want: Vec<f64> =
            x.chunks(length * features).flat_map(|x| written_out(x, &stored, sizes)).collect();
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() <= 1e-12 * (1.0 + want.abs()), "{got} instead of {want}");
        }
        assert_eq!(got.len(), want.len());
        assert_eq!(own.to_checkpoint(&config).unwrap(), stored);
    }
}

#[test]
fn separate_projections_load_alike() {
    let config = config_of(SMALL);
    let own = map(&random_weights(&config, &mut Rng::new(5)), |t| widen::<f64>(t));
    let [heads, value_heads, dk, dv, _, features, ..] = SMALL;
    let mixed = (2 * heads * dk + value_heads * dv) * features;
    let loaded = GatedDeltaNetWeights::from_checkpoint(&config, |name| match name {
        "in_proj_qkv.weight" => Some(own.in_proj_qkvz[..mixed].to_vec()),
        "in_proj_z.weight" => Some(own.in_proj_qkvz[mixed..].to_vec()),
        "in_proj_b.weight" => Some(own.in_proj_ba[..value_heads * features].to_vec()),
        "in_proj_a.weight" => Some(own.in_proj_ba[value_heads * features..].to_vec()),
        "in_proj_qkvz.weight" | "in_proj_ba.weight" => None,
        name => tensor_of(&own, name),
    });
    assert_eq!(loaded.unwrap(), own);
}

#[test]
fn reference_gradients_match_finite_differences() {
    let (config, rng) = (config_of(SMALL), &mut Rng::new(7));
    let [.., features, batch, length] = SMALL;
    let weights = map(&random_weights(&config, rng), |t| widen::<f64>(t));
    let x: Vec<f64> = widen(&rng.normals(batch * length * features));
    let d_out: Vec<f64> = widen(&rng.normals(x.len()));
    let loss = |x: &[f64], weights: &Weights<f64>| {
        let (out, _) = gated_delta_net(x, [batch, length], &config, weights, None).unwrap();
        out.iter().zip(&d_out).map(|(a, b)| a * b).sum::<f64>()
    };
    let got = gated_delta_net_backward(&x, [batch, length], &config, &weights, &d_out).unwrap();
    // The error of the central difference is of order step², and rounding gives about 1e-16 / step.
    let step = 1e-5;
    let mut check = |name: &str, gradient: &[f64], along: &dyn Fn(&[f64], f64) -> f64| {
        for _ in 0..3 {
            let direction: Vec<f64> = widen(&rng.normals(gradient.len()));
            let want = (along(&direction, step) - along(&direction, -step)) / (2.0 * step);
            let got: f64 = gradient.iter().zip(&direction).map(|(a, b)| a * b).sum();
            let size = gradient.iter().map(|g| g * g).sum::<f64>().sqrt().max(1.0);
            assert!((got - want).abs() < 1e-6 * size, "{name}: {got}, by differences {want}");
        }
    };
    let moved = |t: &[f64], direction: &[f64], step: f64| -> Vec<f64> {
        t.iter().zip(direction).map(|(t, d)| t + step * d).collect()
    };
    check("x", &got.d_x, &|direction, step| loss(&moved(&x, direction, step), &weights));
    for (n, (name, gradient)) in got.d_weights.as_ref().named().into_iter().enumerate() {
        check(name, gradient, &|direction, step| {
            let mut at = 0;
            let changed = map(&weights, |t| {
                at += 1;
                if at == n + 1 { moved(t, direction, step) } else { t.clone() }
            });
            loss(&x, &changed)
        });
    }
}

#[derive(Clone, Debug)]
struct Case {
    profile: &'static Profile,
    form: Target,
    layout: Layout,
    dtype: DType,
    sizes: Sizes,
    weights: Weights<f32>,
    x: Vec<f32>,
    d_out: Vec<f32>,
    accumulates: bool,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Case { profile, form, layout, dtype, sizes, accumulates, .. } = self;
        write!(f, "{}, {form:?}, {layout:?}, {dtype:?}, {sizes:?}, accumulates {accumulates}", profile.name)
    }
}

/// The layer's weights on the device.
struct Placement {
    weights: GatedDeltaNetWeights<Placed>,
}

impl Placement {
    fn views(&self) -> GatedDeltaNetWeights<TensorView<'_>> {
        self.weights.as_ref().map(Placed::view)
    }
}

impl Case {
    fn random(form: Target, seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0x6de1_7a00);
        let heads = rng.pick(&[1, 2, 3]);
        let length = rng.pick(&[1, 5, 16, 17, 64, 70]);
        let sizes = [
            heads,
            heads * rng.pick(&[1, 2]),
            rng.pick(&[4, 8, 13]),
            rng.pick(&[4, 12, 7]),
            rng.pick(&[2, 4]),
            rng.pick(&[6, 24]),
            rng.pick(&[1, 2]),
            length,
        ];
        let window = Layout::Window(rng.word());
        let case = Case::of(form, sizes, rng.pick(FLOATS), rng);
        let accumulates = case.dtype == DType::F32 && rng.chance(0.4);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        Case { profile, layout: rng.pick(&[Layout::Dense, window]), accumulates, ..case }
    }

    fn of(form: Target, sizes: Sizes, dtype: DType, rng: &mut Rng) -> Self {
        let [.., features, batch, length] = sizes;
        let mut weights = random_weights(&config_of(sizes), rng);
        // In softplus, 1 + exp(x) rounds to 1.
        weights.dt_bias[0] -= 20.0;
        let weights = map(&weights, |t| stored(t, dtype));
        let mut rows = || stored(&rng.normals(batch * length * features), dtype);
        let (x, d_out) = (rows(), rows());
        let (profile, layout) = (full(), Layout::Dense);
        Case { profile, form, layout, dtype, sizes, weights, x, d_out, accumulates: false }
    }

    fn dims(&self) -> [usize; 2] {
        let [.., batch, length] = self.sizes;
        [batch, length]
    }

    fn shape(&self) -> [usize; 4] {
        let [.., features, batch, length] = self.sizes;
        [batch, 1, length, features]
    }

    fn config(&self) -> GatedDeltaNetConfig {
        let options = KernelOptions::new().target(self.form);
        config_of(self.sizes).dtype(self.dtype).kernel_options(options)
    }

    fn place(&self) -> Placement {
        let placed = |(values, shape): (&Vec<f32>, [usize; 4])| {
            let [place] = self.layout.places([shape]);
            Placed::input(self.profile, Values::Floats(values), self.dtype, place)
        };
        Placement { weights: self.weights.as_ref().zip(self.config().weight_shapes()).map(placed) }
    }

    fn layer(&self, placement: &Placement) -> Result<GatedDeltaNet, String> {
        let pipelines = self.profile.gpu.pipelines();
        GatedDeltaNet::with_pipelines(pipelines, self.config(), &placement.views()).map_err(refused)
    }

    /// The exact output and states, and those in f32 with rounded tensors.
    fn truth<R: Real>(&self, dtype: DType) -> (Vec<R>, HostGatedDeltaNetState<R>) {
        let weights = map(&self.weights, |t| widen::<R>(t));
        let config = self.config().dtype(dtype);
        gated_delta_net(&widen::<R>(&self.x), self.dims(), &config, &weights, None).expect("it fits")
    }

    fn gradients<R: Real>(&self, dtype: DType) -> Vec<Vec<R>> {
        let weights = map(&self.weights, |t| widen::<R>(t));
        let config = self.config().dtype(dtype);
        let (x, d_out) = (widen::<R>(&self.x), widen::<R>(&self.d_out));
        let got = gated_delta_net_backward(&x, self.dims(), &config, &weights, &d_out).expect("it fits");
        let of_weights = got.d_weights.named().map(|(_, values)| values);
        [got.d_x].into_iter().chain(of_weights).collect()
    }

    fn submit(&self, layer: &GatedDeltaNet, call: &GatedDeltaNetForward) -> Result<(), String> {
        let gpu = &self.profile.gpu;
        let size = layer.scratch_size(call).map_err(refused)?;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        gpu.submit(|e| layer.forward(e, call, &mut scratch)).map_err(refused)
    }

    fn judge(&self, out: &[f64], states: [&[f64]; 2]) -> Result<f64, String> {
        let (exact, of_exact) = self.truth::<f64>(DType::F32);
        let (naive, of_naive) = self.truth::<f32>(self.dtype);
        let mut worst: f64 = 0.0;
        for (name, got, exact, naive, dtype) in [
            ("out", out, exact, naive, self.dtype),
            ("conv", states[0], of_exact.conv, of_naive.conv, DType::F32),
            ("recurrent", states[1], of_exact.recurrent, of_naive.recurrent, DType::F32),
        ] {
            let magnitude = largest(exact.iter().copied()).max(1.0);
            let judged = Judged::new(&widened(&naive, dtype), exact, magnitude);
            worst = worst.max(judged.judge(got).map_err(|e| format!("{name}: {e}"))?);
        }
        Ok(worst)
    }

    /// Runs the layer in calls of these lengths, which pass the states on.
    fn forward(&self, lengths: &[usize]) -> Result<f64, String> {
        let Case { profile, dtype, .. } = *self;
        profile.tidy();
        let placement = self.place();
        let layer = self.layer(&placement)?;
        let [x_at, out_at] = self.layout.places([self.shape(); 2]);
        let x = Placed::input(profile, Values::Floats(&self.x), dtype, x_at);
        let out = Placed::output(profile, dtype, out_at);
        let (config, [batch, _]) = (self.config(), self.dims());
        let [conv_at, recurrent_at] =
            self.layout.places([config.conv_state_shape(batch), config.recurrent_state_shape(batch)]);
        let conv = Placed::output(profile, DType::F32, conv_at);
        let recurrent = Placed::output(profile, DType::F32, recurrent_at);
        let state = GatedDeltaNetState { conv: conv.view(), recurrent: recurrent.view() };
        let mut first = 0;
        for length in lengths {
            let [x, out] = [&x, &out].map(|t| t.view().slice(2, first, *length));
            let call = GatedDeltaNetForward::new(x, out);
            let call = if first == 0 { call.begin(state) } else { call.state(state) };
            self.submit(&layer, &call)?;
            first += length;
        }
        let read = |t: &Placed| pollster::block_on(t.download_async("a result", profile));
        self.judge(&read(&out)?, [&read(&conv)?, &read(&recurrent)?])
    }

    fn run_backward(&self, before: &[Vec<f32>]) -> Result<Vec<Vec<f64>>, String> {
        let Case { profile, dtype, .. } = *self;
        profile.tidy();
        let placement = self.place();
        let layer = self.layer(&placement)?;
        let [x_at, out_at] = self.layout.places([self.shape(); 2]);
        let x = Placed::input(profile, Values::Floats(&self.x), dtype, x_at);
        let d_out = Placed::input(profile, Values::Floats(&self.d_out), dtype, out_at);
        let out = Placed::output(profile, dtype, out_at);
        let d_x = Placed::gradient(profile, &before[0], (DType::F32, x_at), self.accumulates);
        let mut n = 0;
        let d_weights = self.config().weight_shapes().map(|shape| {
            let [place] = self.layout.places([shape]);
            n += 1;
            Placed::gradient(profile, &before[n], (DType::F32, place), self.accumulates)
        });
        let forward = GatedDeltaNetForward::new(x.view(), out.view());
        let call = GatedDeltaNetBackward::new(forward, d_out.view())
            .d_x(d_x.view())
            .d_weights(d_weights.as_ref().map(|t| Some(t.view())))
            .accumulate(self.accumulates);
        let gpu = &profile.gpu;
        let size = layer.backward_scratch_size(&call).map_err(refused)?;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        gpu.submit(|e| layer.backward(e, &call, &mut scratch)).map_err(refused)?;
        let read = |t: &Placed| pollster::block_on(t.download_async("a gradient", profile));
        let all = [&d_x].into_iter().chain(d_weights.as_ref().named().map(|(_, t)| t));
        all.map(read).collect()
    }

    fn backward(&self) -> Result<f64, String> {
        let (exact, naive) = (self.gradients::<f64>(DType::F32), self.gradients::<f32>(self.dtype));
        let rng = &mut Rng::new(9);
        let before: Vec<Vec<f32>> = exact.iter().map(|t| rng.normals(t.len())).collect();
        let got = self.run_backward(&before)?;
        if got != self.run_backward(&before)? {
            return Err("other numbers the second time".into());
        }
        let own = |n: usize| largest(exact[n].iter().copied());
        let mut worst: f64 = 0.0;
        for (n, got) in got.into_iter().enumerate() {
            let truth = [exact[n].clone(), widen(&naive[n])];
            let before = self.accumulates.then_some(&before[n][..]);
            let judged = Judged::gradient(truth, before, DType::F32, own(n));
            worst = worst.max(judged.judge(&got).map_err(|e| format!("gradient {n}: {e}"))?);
        }
        Ok(worst)
    }
}

fn refused(e: Error) -> String {
    e.to_string()
}

#[test]
fn outputs_and_states_match_reference() {
    let mut report = Report::new("gated DeltaNet");
    for form in FORMS {
        for dtype in FLOATS {
            let case = Case::of(form, SMALL, *dtype, &mut Rng::new(11));
            report.record("small", &case, case.forward(&[21]));
        }
        for seed in (0..12).filter(|seed| *seed < 2 || rest(&format!("gated DeltaNet {seed}"))) {
            let case = Case::random(form, seed);
            report.record("random", &case, case.forward(&[case.sizes[7]]));
        }
    }
    report.finish();
}

#[test]
fn steps_continue_the_prompt() {
    let mut report = Report::new("gated DeltaNet, steps");
    for form in FORMS {
        for (dtype, lengths) in
            [(DType::F32, &[17, 1, 1, 2][..]), (DType::F32, &[1, 20]), (DType::F16, &[18, 1, 1, 1])]
        {
            let case = Case::of(form, SMALL, dtype, &mut Rng::new(13));
            report.record("steps", &case, case.forward(lengths));
        }
    }
    report.finish();
}

#[test]
fn gradients_match_reference() {
    let mut report = Report::new("gated DeltaNet backward");
    for form in FORMS {
        for dtype in FLOATS {
            let case = Case::of(form, SMALL, *dtype, &mut Rng::new(17));
            if *dtype == DType::F32 || due(&format!("gated DeltaNet backward, {case}")) {
                report.record("small", &case, case.backward());
            }
        }
        for seed in (0..12).filter(|seed| *seed < 1 || rest(&format!("gated DeltaNet {seed}"))) {
            let case = Case::random(form, seed + 100);
            report.record("random", &case, case.backward());
        }
    }
    report.finish();
}

#[test]
fn tokens_past_lengths_are_zeros() {
    let case = Case::of(Target::Auto, SMALL, DType::F32, &mut Rng::new(19));
    let (profile, [batch, length]) = (full(), case.dims());
    let placement = case.place();
    let layer = case.layer(&placement).unwrap();
    let [place] = Layout::Dense.places([case.shape()]);
    let x = Placed::input(profile, Values::Floats(&case.x), DType::F32, place);
    let lengths = profile.gpu.upload(&[length as u32, 6]).unwrap();
    let lengths = TensorView::new(&lengths, DType::U32, [batch, 1, 1, 1]);
    let out = Placed::output(profile, DType::F32, place);
    let call = GatedDeltaNetForward::new(x.view(), out.view()).lengths(lengths);
    case.submit(&layer, &call).unwrap();
    let got = pollster::block_on(out.download_async("out", profile)).unwrap();
    let (mut exact, _) = case.truth::<f64>(DType::F32);
    let (mut naive, _) = case.truth::<f32>(DType::F32);
    let first = (length + 6) * case.sizes[5];
    exact[first..].fill(0.0);
    naive[first..].fill(0.0);
    let magnitude = largest(exact.iter().copied()).max(1.0);
    Judged::new(&widened(&naive, DType::F32), exact, magnitude).judge(&got).unwrap();
    assert!(got[first..].iter().all(|x| *x == 0.0));
}

#[test]
fn invalid_calls_are_errors() {
    let case = Case::of(Target::Auto, SMALL, DType::F32, &mut Rng::new(23));
    let profile = full();
    let pipelines = profile.gpu.pipelines();
    let placement = case.place();
    let views = placement.views();
    let new = |config: GatedDeltaNetConfig, weights: &GatedDeltaNetWeights<TensorView>| {
        GatedDeltaNet::with_pipelines(pipelines, config, weights).map(|_| ())
    };
    let config = case.config();
    assert!(matches!(new(config.value_heads(3), &views), Err(Error::NotDivisible { .. })));
    assert!(matches!(new(config.conv_width(9), &views), Err(Error::Option { option: "conv_width", .. })));
    assert!(matches!(new(config.norm_eps(-1.0), &views), Err(Error::Option { .. })));
    let swapped = GatedDeltaNetWeights { norm: views.a_log, ..views };
    assert!(new(config, &swapped).unwrap_err().to_string().contains("norm.weight"));
    let swapped = GatedDeltaNetWeights { conv1d: views.out_proj, ..views };
    assert!(new(config, &swapped).unwrap_err().to_string().contains("conv1d.weight"));

    let layer = case.layer(&placement).unwrap();
    let [place] = Layout::Dense.places([case.shape()]);
    let x = Placed::input(profile, Values::Floats(&case.x), DType::F32, place);
    let out = Placed::output(profile, DType::F32, place);
    let call = GatedDeltaNetForward::new(x.view(), out.view());
    let narrow = GatedDeltaNetForward::new(x.view().slice(3, 0, 20), out.view());
    assert!(layer.scratch_size(&narrow).unwrap_err().to_string().contains("`x`"));
    let aliased = GatedDeltaNetForward::new(x.view(), x.view());
    assert!(layer.scratch_size(&aliased).is_err());
    let mut small = Scratch::new(profile.gpu.device(), Default::default()).unwrap();
    let refused = profile.gpu.submit(|e| layer.forward(e, &call, &mut small));
    assert!(matches!(refused, Err(Error::ScratchTooSmall { .. })));
    let none = GatedDeltaNetBackward::new(call, x.view());
    assert!(matches!(layer.backward_scratch_size(&none), Err(Error::Unsupported { .. })));
    let state = GatedDeltaNetState { conv: x.view(), recurrent: x.view() };
    assert!(layer.scratch_size(&call.begin(state)).unwrap_err().to_string().contains("state.conv"));
    let continued = GatedDeltaNetBackward::new(call.state(state), x.view()).d_x(out.view());
    assert!(matches!(layer.backward_scratch_size(&continued), Err(Error::Unsupported { .. })));
    let missing = GatedDeltaNetWeights::<Vec<f32>>::from_checkpoint(&config, |_| None);
    assert!(missing.unwrap_err().to_string().contains("in_proj_qkvz.weight"));
    let short = GatedDeltaNetWeights::from_checkpoint(&config, |_| Some(vec![0f32; 3]));
    assert!(short.is_err());
}
