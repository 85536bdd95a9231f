//! A layer's gradients on a device, compared with the reference.

use std::fmt;

use wgpu_attention::layers::{LinearGradients, MultiHeadBackward, MultiHeadGradients};
use wgpu_attention::matmul::Activation;
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{
    self, ProjectGradients, Real, join_heads, multi_head_backward, norm, norm_backward, project,
    project_backward, split_heads, widen,
};
use wgpu_attention::rows::{NormConfig, NormGradients};
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{DType, KernelOptions, Scratch};

use super::case::{Case, HostData, Judged, Rules, Weights, largest, widened};
use super::device::{Profile, full};
use super::gradients::LayerProblem;
use super::layer::{LayerCase, LayerLayout, LayerSetup, PlacedLayer, Storage};
use super::layer_options::LayerOptions;
use super::memory::{Place, Values, stored};
use super::mods::OwnScore;
use super::random::Rng;
use super::rest::rest;
use super::run::{FORMS, Placed, window};

/// The gradients that a setup can request: inputs, weights, biases, the appended key and value, the
/// mask's tensors.
pub const NAMES: [&str; COUNT] = [
    "d_query",
    "d_key",
    "d_value",
    "d_w_q",
    "d_w_k",
    "d_w_v",
    "d_w_o",
    "d_b_q",
    "d_b_k",
    "d_b_v",
    "d_b_o",
    "d_bias_k",
    "d_bias_v",
    "d_q_norm.weight",
    "d_q_norm.bias",
    "d_k_norm.weight",
    "d_k_norm.bias",
    "d_w_gate",
    "d_b_gate",
    "d_bias",
    "d_slopes",
    "d_relative",
    "d_sinks",
    "d_captured",
];
/// The number of gradients that a layer may have.
pub const COUNT: usize = 24;
const WEIGHTS: usize = 3;
const BIASES: usize = 7;
const APPENDED: usize = 11;
const NORMS: usize = 13;
const GATE: usize = 17;
const ADDED: usize = 19;

/// One value per gradient, by [`NAMES`].
pub type Each<T> = [Option<T>; COUNT];

/// The setup of a run that computes a layer's gradients.
#[derive(Clone, Copy, Debug)]
pub struct LayerBackwardSetup {
    /// The layer's setup. The run does not write its optional outputs.
    pub layer: LayerSetup,
    /// The type of the gradients of inputs, weights and biases.
    pub gradient: DType,
    /// The type of the mask's gradients: the biases' or F32.
    pub added: DType,
    pub accumulates: bool,
    /// True if a forward call saves activations that the backward call reads. Otherwise there is no
    /// forward call.
    pub keeps: bool,
    /// The wanted gradients by [`NAMES`], if the layer has the tensor.
    pub wanted: [bool; COUNT],
}

impl fmt::Display for LayerBackwardSetup {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let LayerBackwardSetup { layer, gradient, added, accumulates, keeps, wanted } = self;
        let left_out: Vec<_> = NAMES.into_iter().zip(wanted).filter(|(_, w)| !**w).map(|(n, _)| n).collect();
        write!(
            f,
            "{layer}, gradients {gradient:?}, of added {added:?}, adds {accumulates}, kept {keeps}, without {left_out:?}"
        )
    }
}

impl LayerBackwardSetup {
    /// All gradients in f32 of dense f32 tensors.
    pub fn plain(profile: &'static Profile, form: Target) -> Self {
        let f32 = DType::F32;
        let layer = LayerSetup {
            profile,
            form,
            path: Algorithm::Auto,
            dtype: f32,
            weight: f32,
            bias: f32,
            layout: LayerLayout::Dense,
            storage: Storage::Separate,
            lse: true,
            weights: Weights::None,
        };
        let wanted = [true; COUNT];
        LayerBackwardSetup { layer, gradient: f32, added: f32, accumulates: false, keeps: true, wanted }
    }

    pub fn random(rng: &mut Rng, layer: LayerSetup) -> Self {
        let half = DType::F16;
        let short = rng.pick(&[half, DType::BF16, layer.dtype]);
        // All gradients, or each with an even chance. In the second case the call may not even need
        // the attention.
        let wanted = if rng.chance(0.6) { [true; COUNT] } else { [(); COUNT].map(|()| rng.chance(0.5)) };
        LayerBackwardSetup {
            layer,
            gradient: if rng.chance(0.3) { short } else { DType::F32 },
            added: if rng.chance(0.5) { layer.bias } else { DType::F32 },
            accumulates: rng.chance(0.3),
            keeps: rng.chance(0.5),
            wanted: if wanted.contains(&true) { wanted } else { [true; COUNT] },
        }
    }

    fn dtype_of(&self, n: usize) -> DType {
        if n < ADDED { self.gradient } else { self.added }
    }

    fn f16(&self) -> bool {
        let LayerSetup { dtype, weight, bias, .. } = self.layer;
        [dtype, weight, bias, self.gradient, self.added].contains(&DType::F16)
    }
}

/// Returns the shapes of the tensors of `case`.
fn shapes(case: &LayerCase) -> Each<[usize; 4]> {
    let mut shapes = [None; COUNT];
    let wgpu_attention::reference::MultiHeadShape { batch, q_len, kv_len } = case.shape;
    let c = &case.config;
    let sides = [(q_len, c.query_features), (kv_len, c.key_features), (kv_len, c.value_features)];
    for (n, (length, features)) in sides.into_iter().enumerate() {
        shapes[n] = Some([batch, 1, length, features]);
    }
    for (n, shape) in case.weight_shapes().into_iter().enumerate() {
        shapes[WEIGHTS + n] = Some(shape);
        shapes[BIASES + n] = case.linears[n].bias.as_ref().map(|b| [1, 1, 1, b.len()]);
    }
    for (n, x) in case.appended.iter().flatten().enumerate() {
        shapes[APPENDED + n] = Some([1, 1, 1, x.len()]);
    }
    for (n, x) in case.norms.iter().flat_map(|norm| [&norm.weight, &norm.bias]).enumerate() {
        shapes[NORMS + n] = x.as_ref().map(|x| [1, 1, 1, x.len()]);
    }
    shapes[GATE] = case.gate_shape();
    shapes[GATE + 1] =
        case.gate.as_ref().and_then(|gate| gate.bias.as_ref()).map(|_| [1, 1, 1, case.gate_channels()]);
    let Rules { bias, slopes, relative, sinks, score_mod, .. } = &case.rules;
    shapes[ADDED + 4] = score_mod.as_ref().and_then(OwnScore::gradient_shape);
    for (n, part) in [bias, slopes, relative, sinks].into_iter().enumerate() {
        shapes[ADDED + n] = part.as_ref().map(|part: &HostData<f32>| part.shape);
    }
    shapes
}

impl LayerProblem {
    /// Returns the problem with tensors as the setup stores them.
    fn stored(&self, setup: &LayerBackwardSetup) -> Self {
        let in_f32 = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<f32>>();
        LayerProblem {
            case: self.case.stored(&setup.layer),
            d_out: widen(&stored(&in_f32(&self.d_out), setup.layer.dtype)),
            d_lse: self.d_lse.as_ref().map(|x| widen(&in_f32(x))),
        }
    }

    /// Tells which gradients a run returns. If inputs are one tensor, the first wanted gradient of
    /// them holds their sum.
    fn given(&self, setup: &LayerBackwardSetup) -> [bool; COUNT] {
        let shapes = shapes(&self.case);
        let mut given: [bool; COUNT] = std::array::from_fn(|n| setup.wanted[n] && shapes[n].is_some());
        // A call requests both together.
        given[APPENDED + 1] = given[APPENDED];
        if self.case.one_input {
            let first = given[..3].iter().position(|given| *given);
            (0..3).for_each(|n| given[n] = first == Some(n));
        }
        given
    }

    /// Adds up the gradients of inputs that are one tensor by `add`, in the first wanted one.
    fn summed<T>(
        &self,
        mut all: Each<Vec<T>>,
        wanted: [bool; COUNT],
        add: impl Fn(&mut T, T),
    ) -> Each<Vec<T>> {
        if !self.case.one_input {
            return all;
        }
        let mut sum: Option<(usize, Vec<T>)> = None;
        for n in (0..3).filter(|n| wanted[*n]) {
            let Some(one) = all[n].take() else { continue };
            match &mut sum {
                None => sum = Some((n, one)),
                Some((_, sum)) => sum.iter_mut().zip(one).for_each(|(sum, x)| add(sum, x)),
            }
        }
        if let Some((n, sum)) = sum {
            all[n] = Some(sum);
        }
        all
    }

    /// Returns the gradients in f64.
    pub fn exact(&self) -> Each<Vec<f64>> {
        let LayerCase { inputs, config, shape, .. } = &self.case;
        let inputs = inputs.each_ref().map(|x| widen::<f64>(x));
        let weights = self.case.wide_weights::<f64>();
        let got = multi_head_backward(
            inputs.each_ref().map(|x| &x[..]),
            *shape,
            &config.config(),
            &weights.host(),
            &self.case.options(),
            &self.d_out,
            self.d_lse.as_deref(),
        )
        .expect("the layer fits the reference");
        let mut all = [const { None }; COUNT];
        for (n, d) in [got.d_query, got.d_key, got.d_value].into_iter().enumerate() {
            all[n] = Some(d);
        }
        for (n, linear) in [got.query, got.key, got.value, got.out].into_iter().enumerate() {
            let own = (n < 3).then(|| self.case.linears[n].weight.len());
            all[WEIGHTS + n] = Some(self.shared(own, linear.d_weight));
            all[BIASES + n] = linear.d_bias;
        }
        if let Some((gate, linear)) = self.case.gate.as_ref().zip(got.gate) {
            all[GATE] = Some(self.shared(Some(gate.weight.len()), linear.d_weight));
            all[GATE + 1] = linear.d_bias;
        }
        for (n, d) in got.d_bias_kv.into_iter().flatten().enumerate() {
            all[APPENDED + n] = Some(d);
        }
        let of_norms = got.qk_norm.into_iter().flatten().flat_map(|norm| [norm.d_weight, norm.d_bias]);
        of_norms.enumerate().for_each(|(n, d)| all[NORMS + n] = Some(d));
        let d_captured = self.captured_gradient(got.d_score_fn, DType::F32, false);
        for (n, d) in
            [got.d_bias, got.d_slopes, got.d_relative, got.d_sinks, d_captured].into_iter().enumerate()
        {
            all[ADDED + n] = d;
        }
        all
    }

    /// Returns the gradient of a matrix that all heads of a side share: the sum of each head's
    /// gradient. The matrix has `own` elements.
    fn shared<T: Copy + std::ops::Add<Output = T>>(&self, own: Option<usize>, d_weight: Vec<T>) -> Vec<T> {
        let Some(size) = own.filter(|_| self.case.config.narrow && self.case.shared) else {
            return d_weight;
        };
        let (first, rest) = d_weight.split_at(size);
        rest.chunks_exact(size)
            .fold(first.to_vec(), |sum, head| sum.iter().zip(head).map(|(sum, x)| *sum + *x).collect())
    }

    /// Computes the gradients in f32 in the naive way, stage by stage like a device. Intermediate
    /// tensors are stored as `dtype`. With `magnitudes`, it returns the magnitudes of their terms.
    /// The second result is the part of the queries' input gradient that goes through the gate.
    fn naive(&self, dtype: DType, magnitudes: bool) -> (Each<Vec<f32>>, Option<Vec<f32>>) {
        let case = &self.case;
        let config = case.config;
        let LayerOptions { heads, value_dim, out_features, .. } = config;
        let (q_len, width) = (case.shape.q_len, heads * value_dim);
        let (shape, options) = (case.attention(), case.attention_options());
        let narrow = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<f32>>();
        let term = |x: Vec<f32>| if magnitudes { x.iter().map(|x| x.abs()).collect() } else { x };
        let backward = |x: &[f32], w: &[f32], d_y: &[f32], d_in: usize, d_out: usize| {
            let [x, w, d_y] = [x, w, d_y].map(|x| term(x.to_vec()));
            project_backward(&x, &w, &d_y, d_in, d_out).expect("it fits")
        };

        let [q, k, v] = case.naive_heads(dtype);
        let exact = reference::attention::<f64>(&widen(&q), &widen(&k), &widen(&v), shape, &options);
        let out = exact.expect("the case fits the reference").out;
        let out_stored = stored(&narrow(&out), dtype);
        let context = join_heads(&out_stored, q_len, heads, value_dim).expect("it fits");
        let logits = case.naive_logits(dtype);
        let sigmoid = |x: f32| reference::activate(x, Activation::Sigmoid);
        let gated = stored(&LayerCase::gated(&context, logits.as_deref(), sigmoid), dtype);
        let of_out = backward(&gated, &case.linears[3].weight, &narrow(&self.d_out), width, out_features);
        let mut all = [const { None }; COUNT];
        let d_context = LayerCase::gated(&of_out.d_x, logits.as_deref(), sigmoid);
        let mut through_gate = None;
        if let Some(((gate, (_, [heads, dim, features])), logits)) =
            case.gate.as_ref().zip(case.gate_side()).zip(logits)
        {
            let slope = |x: f32| reference::activation_slope(x, Activation::Sigmoid);
            let terms: Vec<f32> = of_out.d_x.iter().zip(term(context)).map(|(d, x)| d * x).collect();
            let channels = terms.len() / logits.len();
            let sums: Vec<f32> = terms.chunks_exact(channels).map(|terms| terms.iter().sum()).collect();
            let d_logits = LayerCase::gated(&sums, Some(&logits), slope);
            let weight = case.wide_of(&gate.weight, (heads, dim, features));
            let got = backward(&case.inputs[0], &weight, &d_logits, features, heads * dim);
            through_gate = Some(got.d_x);
            all[GATE] = Some(self.parts_of(Some(gate.weight.len()), got.d_weight, (heads, dim, features)));
            all[GATE + 1] = gate.bias.as_ref().map(|_| got.d_bias);
        }
        let d_context = if magnitudes { d_context } else { stored(&d_context, dtype) };
        let d_context = split_heads(&d_context, q_len, heads, value_dim).expect("it fits");

        // The dot Σⱼ weight · d_weight comes from the stored context, which acts like a change of
        // `d_lse`.
        let mut d_lse = self.d_lse.clone().unwrap_or_else(|| vec![0.0; shape.lse().iter().product()]);
        for (n, d) in d_context.iter().enumerate() {
            d_lse[n / value_dim] -= f64::from(*d) * (f64::from(out_stored[n]) - out[n]);
        }
        let gradients = if magnitudes {
            reference::attention_backward_magnitudes::<f32>
        } else {
            reference::attention_backward::<f32>
        };
        let got = gradients(&q, &k, &v, &d_context, Some(&narrow(&d_lse)), shape, &options)
            .expect("the case fits the reference");

        all[WEIGHTS + 3] = Some(of_out.d_weight);
        all[BIASES + 3] = case.linears[3].bias.as_ref().map(|_| of_out.d_bias);
        for (n, d) in [got.d_q, got.d_k, got.d_v].into_iter().enumerate() {
            let (heads, dim, features) = case.sides()[n];
            let (length, more) = if n == 0 { (q_len, 0) } else { (shape.kv_len, case.appended_len()) };
            let joined = join_heads(&d, length, heads, dim).expect("it fits");
            let mut own = Vec::new();
            let mut appended = vec![0.0; heads * dim];
            for sequence in joined.chunks_exact(length * heads * dim) {
                let (given, rest) = sequence.split_at((length - more) * heads * dim);
                own.extend_from_slice(given);
                appended.iter_mut().zip(rest).for_each(|(sum, d)| *sum += d);
            }
            // Magnitudes of rotated pairs stay as they are.
            if let Some(rotary) = case.rotary.as_ref().filter(|_| n < 2 && !magnitudes) {
                own = rotary.turned(&own, [heads, length - more, dim], true);
            }
            if let Some(of) = config.qk_norm.as_ref().filter(|_| n < 2) {
                let norm = &case.norms[n];
                let bias = case.linears[n].bias.as_deref();
                let y =
                    project(&case.inputs[n], &case.wide(n), bias, features, heads * dim).expect("it fits");
                let weight = norm.weight.as_deref();
                let [d_y, d_weight, d_bias] =
                    norm_gradients((&stored(&y, dtype), dim), weight, of, &own, magnitudes);
                own = d_y;
                all[NORMS + 2 * n] = norm.weight.as_ref().map(|_| d_weight);
                all[NORMS + 2 * n + 1] = norm.bias.as_ref().map(|_| d_bias);
            }
            let ProjectGradients { d_x, d_weight, d_bias, .. } =
                backward(&case.inputs[n], &case.wide(n), &own, features, heads * dim);
            all[n] = Some(d_x);
            let own = Some(case.linears[n].weight.len());
            all[WEIGHTS + n] = Some(self.parts_of(own, d_weight, (heads, dim, features)));
            all[BIASES + n] = case.linears[n].bias.as_ref().map(|_| d_bias);
            if n > 0 && case.appended.is_some() {
                all[APPENDED + n - 1] = Some(appended);
            }
        }
        let d_captured = self.captured_gradient(got.d_score_fn, dtype, magnitudes);
        for (n, d) in
            [got.d_bias, got.d_slopes, got.d_relative, got.d_sinks, d_captured].into_iter().enumerate()
        {
            all[ADDED + n] = d;
        }
        (all, through_gate)
    }

    /// Returns the gradient of a weight of `own` elements, from the gradient of the equivalent wide
    /// weight.
    fn parts_of(
        &self,
        own: Option<usize>,
        d_wide: Vec<f32>,
        (heads, dim, features): (usize, usize, usize),
    ) -> Vec<f32> {
        let narrow = self.case.config.narrow;
        let read = if narrow { features / heads } else { features };
        let rows = d_wide.chunks_exact(features).enumerate();
        let parts = rows.flat_map(|(row, d)| {
            let first = if narrow { row / dim * read } else { 0 };
            d[first..first + read].to_vec()
        });
        self.shared(own, parts.collect())
    }

    /// Returns the gradient of the tensor that a score function reads.
    fn captured_gradient<R: Real>(
        &self,
        d_score: Option<Vec<R>>,
        dtype: DType,
        magnitudes: bool,
    ) -> Option<Vec<R>> {
        let own = self.case.rules.score_mod.as_ref().filter(|own| own.reads.is_some())?;
        let [q, k, _] = self.case.naive_heads(dtype);
        let shape = self.case.attention();
        let scale = self.case.config.scale.unwrap_or(1.0 / (shape.head_dim as f64).sqrt());
        let scores = reference::scores::<f64>(&widen(&q), &widen(&k), shape, scale).expect("it fits");
        own.gradient(shape, self.case.appended_len(), &scores, &d_score?, magnitudes)
    }

    /// Returns the values that a gradient is added to: the same for the same problem.
    fn before(&self, n: usize, len: usize, dtype: DType) -> Vec<f32> {
        stored(&Rng::named(&format!("{} before {n}", self.case.name)).normals(len), dtype)
    }

    /// Returns the largest score of the inner attention, with everything that is added to it.
    fn largest_score(&self, dtype: DType) -> f64 {
        let [q, k, v] = self.case.naive_heads(dtype);
        let LayerOptions { scale, softcap, .. } = self.case.config;
        let case = Case {
            scale,
            softcap,
            q,
            k,
            v,
            rules: self.case.rules.clone(),
            ..Case::random("a layer's", wgpu_attention::Shape::new(1, 1, 1, 1))
        };
        Case { shape: self.case.attention(), ..case }.largest_score()
    }

    /// Returns the expected results of a run of a stored problem.
    fn truth(&self, setup: &LayerBackwardSetup) -> Each<Judged> {
        let dtype = setup.layer.dtype;
        let given = self.given(setup);
        let mut exact = self.summed(self.exact(), setup.wanted, |sum, x| *sum += x);
        let (mut magnitudes, through_gate) = self.naive(dtype, true);
        let of_query = magnitudes[0].iter_mut().flatten().zip(through_gate.into_iter().flatten());
        of_query.for_each(|(sum, x)| *sum += x);
        let mut magnitudes = self.summed(magnitudes, setup.wanted, |sum, x| *sum += x);
        let before: Each<Vec<f32>> = std::array::from_fn(|n| {
            let len = exact[n].as_ref().filter(|_| setup.accumulates && given[n])?.len();
            Some(self.before(n, len, setup.dtype_of(n)))
        });
        let mut naive = self.added_to(self.naive(dtype, false), &before, setup);
        // A weight is as far off as its score and lse are, half a unit in the last place each.
        let of_scores = 1.0 + self.largest_score(dtype) / 4.0;
        std::array::from_fn(|n| {
            let mut want = exact[n].take().filter(|_| given[n])?;
            let mut magnitude = largest(magnitudes[n].take()?.into_iter().map(f64::from));
            if let Some(before) = &before[n] {
                want.iter_mut().zip(before).for_each(|(x, before)| *x += f64::from(*before));
                magnitude += largest(before.iter().map(|x| f64::from(*x)));
            }
            let naive = widened(&naive[n].take()?, DType::F32);
            let mut tolerance = Tolerance::gradient(&naive, &want, magnitude * of_scores, EPSILON_F32);
            // If a sink has all of a row's weight, the other weights may be below f32's normal
            // numbers. Devices may flush those.
            tolerance.absolute += 1024.0 * f64::from(f32::MIN_POSITIVE);
            Some(Judged { want, tolerance })
        })
    }

    /// Returns `naive` as the device writes it. The device adds it to earlier values, or to the
    /// gradient of another input that is the same tensor. Each addition rounds to the gradient's
    /// type.
    fn added_to(
        &self,
        (naive, through_gate): (Each<Vec<f32>>, Option<Vec<f32>>),
        before: &Each<Vec<f32>>,
        setup: &LayerBackwardSetup,
    ) -> Each<Vec<f32>> {
        let inputs: Vec<usize> = (0..3).filter(|n| setup.wanted[*n]).collect();
        let mut written: Each<Vec<f32>> = [const { None }; COUNT];
        for (n, d) in naive.into_iter().enumerate() {
            let Some(d) = d else { continue };
            let to = if self.case.one_input && n < 3 { inputs.first().copied().unwrap_or(n) } else { n };
            if n < 3 && !setup.wanted[n] {
                continue;
            }
            let there = written[to].take().or_else(|| before[to].clone());
            let sum = match there {
                Some(there) => there.iter().zip(&d).map(|(a, b)| a + b).collect(),
                None => d,
            };
            written[to] = Some(stored(&sum, setup.dtype_of(n)));
        }
        if let Some((sum, d)) = written[0].as_mut().zip(through_gate) {
            let both: Vec<f32> = sum.iter().zip(&d).map(|(a, b)| a + b).collect();
            *sum = stored(&both, setup.dtype_of(0));
        }
        written
    }
}

/// Returns a norm's gradients in f32: of its input `x` with rows of `dim`, its weight and its bias.
/// With `magnitudes`, `d_out` holds magnitudes, and the results are sums of magnitudes.
fn norm_gradients(
    (x, dim): (&[f32], usize),
    weight: Option<&[f32]>,
    config: &NormConfig,
    d_out: &[f32],
    magnitudes: bool,
) -> [Vec<f32>; 3] {
    if !magnitudes {
        let got = norm_backward(x, dim, weight, config, d_out).expect("it fits");
        return [got.d_x, got.d_weight, got.d_bias];
    }
    let one = |n: usize| (0..dim).map(move |c| f32::from(u8::from(c == n)));
    let identity: Vec<f32> = (0..dim).flat_map(one).collect();
    let [mut d_x, mut d_weight, mut d_bias] = [Vec::new(), vec![0.0; dim], vec![0.0; dim]];
    for (x, d) in x.chunks_exact(dim).zip(d_out.chunks_exact(dim)) {
        let slopes = norm_backward(&x.repeat(dim), dim, weight, config, &identity).expect("it fits").d_x;
        d_x.extend((0..dim).map(|c| (0..dim).map(|n| (slopes[n * dim + c] * d[n]).abs()).sum::<f32>()));
        let normed = norm(x, dim, None, None, config).expect("it fits");
        for c in 0..dim {
            d_weight[c] += (d[c] * normed[c]).abs();
            d_bias[c] += d[c].abs();
        }
    }
    [d_x, d_weight, d_bias]
}

/// Runs the backward pass of a stored problem, after a forward call if that saves activations.
/// Checks everything around the gradients and returns them.
async fn run_async(
    problem: &LayerProblem,
    setup: &LayerBackwardSetup,
    change: impl FnOnce(KernelOptions) -> KernelOptions,
) -> Result<Each<Vec<f64>>, String> {
    let LayerBackwardSetup { layer: LayerSetup { profile, dtype, layout, storage, .. }, keeps, .. } = *setup;
    profile.tidy();
    let case = &problem.case;
    let shape = case.attention();
    let mut placed = PlacedLayer::new(case, &setup.layer);
    let narrow = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<f32>>();
    let floats = |x: &[f64], dtype, at| Placed::input(profile, Values::Floats(&narrow(x)), dtype, at);
    let sequence = |placed: &mut PlacedLayer, features| placed.place(case.shape.q_len, features);
    let out = Placed::output(profile, dtype, sequence(&mut placed, case.config.out_features));
    let d_out = floats(&problem.d_out, dtype, sequence(&mut placed, case.config.out_features));
    let context = Placed::output(profile, dtype, sequence(&mut placed, shape.heads * shape.value_dim));
    let [lse_at, d_lse_at] = layout.outputs().places([shape.lse(); 2]);
    let lse = Placed::output(profile, DType::F32, lse_at);
    let d_lse = problem.d_lse.as_ref().map(|x| floats(x, DType::F32, d_lse_at));

    let given = problem.given(setup);
    let shapes = shapes(case);
    let seed = if let LayerLayout::Window(seed) = layout { seed ^ 0x5a } else { 0 };
    let mut rng = Rng::new(seed);
    let mut place = |n: usize, shape: [usize; 4]| match (layout, storage) {
        (LayerLayout::SeqFirst, _) if n < WEIGHTS => Place::lbhd(shape),
        (_, Storage::Transposed) if (WEIGHTS..BIASES).contains(&n) => Place::transposed(shape),
        (LayerLayout::Window(_), _) => window(shape, &mut rng, seed),
        _ => Place::dense(shape),
    };
    let mut gradients: Each<Placed> = [const { None }; COUNT];
    for n in (0..COUNT).filter(|n| given[*n]) {
        let Some(shape) = shapes[n] else { continue };
        let (at, dtype) = (place(n, shape), setup.dtype_of(n));
        gradients[n] = Some(if setup.accumulates {
            Placed::holding(profile, &problem.before(n, shape.iter().product(), dtype), dtype, at)
        } else {
            Placed::output(profile, dtype, at)
        });
    }
    let view = |n: usize| gradients[n].as_ref().map(Placed::view);
    // If inputs are one tensor, the first wanted one has the place for all.
    let input = |n: usize| {
        let wanted = |n: &usize| setup.wanted[*n];
        let to = if case.one_input { (0..3).find(wanted).unwrap_or(n) } else { n };
        view(to).filter(|_| setup.wanted[n])
    };
    let linear = |n: usize| LinearGradients { weight: view(WEIGHTS + n), bias: view(BIASES + n) };
    // Both or neither.
    let bias_kv = view(APPENDED).zip(view(APPENDED + 1)).map(|(k, v)| [k, v]);
    let mut forward = placed.call(out.view());
    if keeps {
        forward = forward.context(context.view()).lse(lse.view());
    }
    let call = MultiHeadBackward::new(forward, d_out.view())
        .d_lse(d_lse.as_ref().map(Placed::view))
        .d_query(input(0))
        .d_key(input(1))
        .d_value(input(2))
        .d_weights(MultiHeadGradients {
            qk_norm: [NORMS, NORMS + 2].map(|n| NormGradients { weight: view(n), bias: view(n + 1) }),
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            bias_kv,
            gate: LinearGradients { weight: view(GATE), bias: view(GATE + 1) },
        })
        .d_bias(view(ADDED))
        .d_slopes(view(ADDED + 1))
        .d_relative(view(ADDED + 2))
        .d_sinks(view(ADDED + 3))
        .d_captured(&view(ADDED + 4).map_or(Vec::new(), |view| vec![Some(view)]))
        .accumulate(setup.accumulates);

    let refused = |e: wgpu_attention::Error| format!("refused: {e}");
    let device = profile.gpu.device();
    let layer = placed.layer(change).map_err(refused)?;
    let mut size = layer.backward_scratch_size(&call).map_err(refused)?;
    if keeps {
        size = size.max(layer.scratch_size(&forward).map_err(refused)?);
    }
    let mut scratch = Scratch::new(device, size).map_err(refused)?;
    let mut encoder = device.create_command_encoder(&Default::default());
    if keeps {
        layer.forward(&mut encoder, &forward, &mut scratch).map_err(refused)?;
    }
    layer.backward(&mut encoder, &call, &mut scratch).map_err(refused)?;
    profile.gpu.queue().submit([encoder.finish()]);
    if keeps {
        for (what, placed) in [("out", &out), ("context", &context), ("lse", &lse)] {
            placed.download_async(what, profile).await?;
        }
    }
    let mut got = [const { None }; COUNT];
    for ((got, placed), name) in got.iter_mut().zip(&gradients).zip(NAMES) {
        if let Some(placed) = placed {
            *got = Some(placed.download_async(name, profile).await?);
        }
    }
    Ok(got)
}

/// Returns the gradients of a run of `problem`.
pub async fn run_layer_backward_async(
    problem: &LayerProblem,
    setup: &LayerBackwardSetup,
    change: impl FnOnce(KernelOptions) -> KernelOptions,
) -> Result<Each<Vec<f64>>, String> {
    run_async(&problem.stored(setup), setup, change).await
}

/// Returns the largest error over tolerance of the wanted gradients.
fn judge(truth: &Each<Judged>, got: &Each<Vec<f64>>) -> Result<f64, String> {
    let mut worst = 0.0f64;
    for ((truth, got), name) in truth.iter().zip(got).zip(NAMES) {
        match (truth, got) {
            (Some(truth), Some(got)) => {
                worst = worst.max(truth.judge(got).map_err(|e| format!("{name}: {e}"))?);
            }
            (None, None) => {}
            _ => return Err(format!("{name} is not what was asked for")),
        }
    }
    Ok(worst)
}

impl super::report::Report {
    /// Checks the gradients of `cases` on each target, with and without saved activations. Each set
    /// of `wanted` is used in turn. Every share of the tests contains one run of a case.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn check_layer_gradients(&mut self, cases: Vec<LayerCase>, wanted: &[[bool; COUNT]]) {
        for (n, case) in cases.into_iter().enumerate() {
            let problem = LayerProblem::new(case, n % 2 == 0);
            let runs =
                FORMS.into_iter().flat_map(|form| [true, false].map(|keeps| (form, keeps))).enumerate();
            for (run, (form, keeps)) in runs {
                if run == n || rest(&format!("gradients of {}, {run}", problem.case.name)) {
                    for wanted in wanted {
                        let plain = LayerBackwardSetup::plain(full(), form);
                        let setup = LayerBackwardSetup { keeps, wanted: *wanted, ..plain };
                        self.check_layer_backward(&problem, &setup);
                    }
                }
            }
        }
    }

    /// Runs `problem` in one setup.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn check_layer_backward(&mut self, problem: &LayerProblem, setup: &LayerBackwardSetup) {
        pollster::block_on(self.check_layer_backward_async(problem, setup));
    }

    /// Like [`check_layer_backward`](Self::check_layer_backward), not blocking.
    pub async fn check_layer_backward_async(&mut self, problem: &LayerProblem, setup: &LayerBackwardSetup) {
        let LayerSetup { profile, .. } = setup.layer;
        let stored = &problem.stored(setup);
        let judged = match run_async(stored, setup, |kernel_options| kernel_options).await {
            Err(e) if e.contains("max_storage_buffers_per_shader_stage") => {
                return self.skip(format!("on `{}`: {e}", profile.name), &problem.case.name);
            }
            got => got.and_then(|got| judge(&stored.truth(setup), &got)),
        };
        self.record(&problem.case.name, setup, judged);
    }
}
