//! Gradients by central differences, for comparison with the reference's gradients.

use std::collections::BTreeMap;

use wgpu_attention::reference::{
    self, Attended, Gradients, HostLinear, HostNorm, HostWeights, MultiHeadGradients, widen,
};
use wgpu_attention::reference::{Options, multi_head, multi_head_backward};

use super::case::{Case, DropoutData, Rules, largest};
use super::layer::LayerCase;
use super::random::Rng;

/// An input of a function, and its claimed gradient.
#[derive(Clone, Debug)]
pub struct Input {
    pub name: &'static str,
    pub x: Vec<f64>,
    pub gradient: Vec<f64>,
    /// The factor by which the function's terms move where the input moves by 1.
    pub lever: f64,
    /// The function rounds it to f32.
    pub in_f32: bool,
}

impl Input {
    pub fn new(name: &'static str, x: &[f64], gradient: &[f64]) -> Self {
        Input { name, x: x.to_vec(), gradient: gradient.to_vec(), lever: 1.0, in_f32: false }
    }
}

/// The number of compared elements with a non-zero gradient, by the input's name.
pub type Compared = BTreeMap<&'static str, usize>;

/// At this step the error of the extrapolated difference is about 1e-12, and the rounding error
/// about 1e-13.
const STEP: f64 = 1.0 / 1024.0;
const TOLERANCE: f64 = 1e-7;

/// Returns the derivative at 0, from differences of two steps whose second-order errors cancel.
fn derivative(step: f64, of: impl Fn(f64) -> f64) -> f64 {
    let central = |step: f64| (of(step) - of(-step)) / (2.0 * step);
    (4.0 * central(step / 2.0) - central(step)) / 3.0
}

/// Compares gradients with differences of `loss`, at `most` elements of each input.
pub fn compare_differences(
    name: &str,
    inputs: &[Input],
    most: usize,
    compared: &mut Compared,
    loss: impl Fn(&[Vec<f64>]) -> f64,
) -> Result<(), String> {
    let rng = &mut Rng::named(name);
    let at: Vec<Vec<f64>> = inputs.iter().map(|input| input.x.clone()).collect();
    for (which, input) in inputs.iter().enumerate() {
        let Input { x, gradient, lever, .. } = input;
        if gradient.len() != x.len() {
            return Err(format!("{name}: {} has {} gradients of {}", input.name, gradient.len(), x.len()));
        }
        let step = STEP / lever.log2().ceil().exp2();
        let tolerance = TOLERANCE * (1.0 + largest(gradient.iter().copied())) * lever;
        let all = x.len() <= most;
        for n in 0..x.len().min(most) {
            let n = if all { n } else { rng.below(x.len()) };
            let moved = [step, -step, step / 2.0, -step / 2.0].map(|step| x[n] + step);
            if x[n] == f64::NEG_INFINITY && gradient[n] != 0.0 {
                return Err(format!("{name}: {}[{n}] is {} and has a gradient", input.name, x[n]));
            }
            let rounded = input.in_f32 && moved.iter().any(|x| f64::from(*x as f32) != *x);
            if rounded || x[n] == f64::NEG_INFINITY {
                continue;
            }
            let want = derivative(step, |step| {
                let mut moved = at.clone();
                moved[which][n] += step;
                loss(&moved)
            });
            let off = (gradient[n] - want).abs();
            if off > tolerance || off.is_nan() {
                let what = input.name;
                return Err(format!("{name}: the gradient of {what}[{n}] is {}, not {want}", gradient[n]));
            }
            *compared.entry(input.name).or_default() += usize::from(gradient[n].abs() > 1e-3);
        }
    }
    Ok(())
}

impl Rules {
    /// Returns the rules with other elements of bias, slopes, relative table and sinks.
    fn with_floats(&self, x: &[Vec<f64>]) -> Self {
        let mut rules = self.clone();
        let floats = [&mut rules.bias, &mut rules.slopes, &mut rules.relative, &mut rules.sinks];
        let floats = floats.into_iter().flatten();
        floats.zip(x).for_each(|(part, x)| part.data = x.iter().map(|x| *x as f32).collect());
        rules
    }
}

/// Returns the tensors of a mask that have gradients. Its slopes are multiplied by distances of up
/// to twice `lengths` plus the query offset.
fn mask_inputs(rules: &Rules, lengths: usize, gradients: [Option<Vec<f64>>; 4]) -> Vec<Input> {
    let past = rules.query_offsets.iter().flat_map(|part| &part.data).copied().max().unwrap_or(0);
    let furthest = 2.0 * lengths as f64 + f64::from(past);
    let all = [
        ("bias", &rules.bias, 1.0),
        ("slopes", &rules.slopes, furthest),
        ("relative", &rules.relative, 1.0),
        ("sinks", &rules.sinks, 1.0),
    ];
    let mut inputs = Vec::new();
    for ((name, part, lever), gradient) in all.into_iter().zip(gradients) {
        assert_eq!(part.is_some(), gradient.is_some(), "{name}");
        if let Some((part, gradient)) = part.as_ref().zip(gradient) {
            let x = widen::<f64>(&part.data);
            inputs.push(Input { lever, in_f32: true, ..Input::new(name, &x, &gradient) });
        }
    }
    inputs
}

/// Returns `Σ out · d_out + Σ lse · d_lse`, skipping NaN.
fn loss(got: &Attended<f64>, d_out: &[f64], d_lse: Option<&[f64]>) -> f64 {
    let sum = |x: &[f64], d: &[f64]| -> f64 {
        x.iter().zip(d).filter(|(_, d)| !d.is_nan()).map(|(x, d)| x * d).sum()
    };
    sum(&got.out, d_out) + d_lse.map_or(0.0, |d_lse| sum(&got.lse, d_lse))
}

/// An attention problem and the gradients of its results.
#[derive(Clone, Debug)]
pub struct Problem {
    pub case: Case,
    /// The number of last keys that every query sees.
    pub appended: usize,
    pub d_out: Vec<f64>,
    pub d_lse: Option<Vec<f64>>,
}

impl Problem {
    /// Draws random gradients of the results, with NaN for results without a key.
    pub fn new(case: Case, appended: usize, d_lse: bool) -> Self {
        let rng = &mut Rng::named(&case.name);
        let mut normals = |n: usize| widen::<f64>(&rng.normals(n));
        let (out, lse) = (case.shape.out().iter().product(), case.shape.lse().iter().product());
        let mut problem = Problem { case, appended, d_out: normals(out), d_lse: Some(normals(lse)) };
        let value_dim = problem.case.shape.value_dim;
        for (row, seen) in problem.seen_rows().into_iter().enumerate() {
            if !seen {
                problem.d_out[row * value_dim..][..value_dim].fill(f64::NAN);
            }
        }
        let lse = problem.attend(&problem.qkv(), &problem.case.rules, problem.vector().as_deref()).lse;
        let d_lse_of = problem.d_lse.iter_mut().flatten().zip(lse);
        d_lse_of.filter(|(_, lse)| *lse == f64::NEG_INFINITY).for_each(|(d, _)| *d = f64::NAN);
        problem.d_lse = problem.d_lse.filter(|_| d_lse);
        problem
    }

    /// Returns the weights before dropout.
    pub fn weights(&self) -> Vec<f64> {
        let undropped = Problem { case: self.case.clone().with(|c| c.dropout = None), ..self.clone() };
        let vector = undropped.vector();
        undropped
            .attend(&undropped.qkv(), &undropped.case.rules, vector.as_deref())
            .weights
            .expect("asked for")
    }

    /// Tells for each row if it has a weight.
    fn seen_rows(&self) -> Vec<bool> {
        self.weights().chunks_exact(self.case.shape.kv_len).map(|row| row.iter().any(|w| *w != 0.0)).collect()
    }

    pub fn qkv(&self) -> [Vec<f64>; 3] {
        [&self.case.q, &self.case.k, &self.case.v].map(|x| widen(x))
    }

    /// Returns the vector of additive scores.
    fn vector(&self) -> Option<Vec<f64>> {
        self.case.score_vector.as_ref().map(|x| widen(x))
    }

    fn attend(&self, [q, k, v]: &[Vec<f64>; 3], rules: &Rules, vector: Option<&[f64]>) -> Attended<f64> {
        let options = self.case.options().mask(rules.host()).appended(self.appended);
        let attended = match vector {
            Some(vector) => reference::additive_attention(q, k, v, vector, self.case.shape, &options),
            None => reference::attention(q, k, v, self.case.shape, &options),
        };
        attended.expect("the problem fits the reference")
    }

    pub fn gradients(&self) -> Gradients<f64> {
        let [q, k, v] = self.qkv();
        let options = self.case.options().appended(self.appended);
        let d_lse = self.d_lse.as_deref();
        let (shape, d_out) = (self.case.shape, &self.d_out);
        let gradients = match self.vector() {
            Some(vector) => {
                reference::additive_attention_backward(&q, &k, &v, &vector, d_out, d_lse, shape, &options)
            }
            None => reference::attention_backward(&q, &k, &v, d_out, d_lse, shape, &options),
        };
        gradients.expect("the problem fits the reference")
    }

    /// Returns `Σ out · d_out + Σ lse · d_lse`, skipping NaN.
    pub fn loss(&self, x: &[Vec<f64>]) -> f64 {
        let rules = self.case.rules.with_floats(&x[3..]);
        let vector = self.case.score_vector.as_ref().and(x.last());
        let got = self.attend(&[x[0].clone(), x[1].clone(), x[2].clone()], &rules, vector.map(|x| &x[..]));
        loss(&got, &self.d_out, self.d_lse.as_deref())
    }

    /// Returns the inputs, with the mask's last.
    pub fn inputs(&self) -> Vec<Input> {
        let got = self.gradients();
        let [q, k, v] = self.qkv();
        let mut inputs =
            vec![Input::new("q", &q, &got.d_q), Input::new("k", &k, &got.d_k), Input::new("v", &v, &got.d_v)];
        let rules = &self.case.rules;
        let lengths = self.case.shape.q_len + self.case.shape.kv_len;
        let of_mask = [got.d_bias, got.d_slopes, got.d_relative, got.d_sinks];
        inputs.extend(mask_inputs(rules, lengths, of_mask));
        inputs.extend(self.vector().zip(got.d_score_vector).map(|(x, d)| Input::new("score_vector", &x, &d)));
        inputs
    }

    /// Compares with differences at `most` elements of each input.
    #[track_caller]
    pub fn check(&self, most: usize, compared: &mut Compared) {
        compare_differences(&self.case.name, &self.inputs(), most, compared, |x| self.loss(x))
            .unwrap_or_else(|e| panic!("{e}\n{:?}\n{:?}", self.case.shape, self.case.rules));
    }
}

/// A layer and the gradients of its results.
#[derive(Clone, Debug)]
pub struct LayerProblem {
    pub case: LayerCase,
    pub d_out: Vec<f64>,
    pub d_lse: Option<Vec<f64>>,
}

impl LayerProblem {
    /// Draws random gradients of the results, with NaN where the lse is −∞.
    pub fn new(case: LayerCase, d_lse: bool) -> Self {
        let rng = &mut Rng::named(&case.name);
        let lse = case.exact().lse;
        let d_out = widen(&rng.normals(case.shape.batch * case.shape.q_len * case.config.out_features));
        let number = |x: &f64| if *x == f64::NEG_INFINITY { f64::NAN } else { f64::from(rng.normal()) };
        let d_lse = d_lse.then(|| lse.iter().map(number).collect());
        LayerProblem { case, d_out, d_lse }
    }

    /// Returns the tensors that have gradients, with the gradients `got`, or without any.
    fn inputs_with(&self, got: Option<MultiHeadGradients<f64>>) -> Vec<Input> {
        let LayerCase { inputs, linears, appended, norms, gate, rules, .. } = &self.case;
        let mut all: Vec<(&'static str, &[f32])> =
            ["query", "key", "value"].into_iter().zip(inputs.iter().map(|x| &x[..])).collect();
        all.extend(["w_q", "w_k", "w_v", "w_o"].into_iter().zip(linears.iter().map(|l| &l.weight[..])));
        let biases = ["b_q", "b_k", "b_v", "b_o"].into_iter().zip(linears);
        all.extend(biases.filter_map(|(name, l)| Some((name, l.bias.as_deref()?))));
        let appended = appended.iter().flatten().map(|x| &x[..]);
        all.extend(["bias_k", "bias_v"].into_iter().zip(appended));
        let names = ["q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"];
        let norms = names.into_iter().zip(norms.iter().flat_map(|norm| [&norm.weight, &norm.bias]));
        all.extend(norms.clone().filter_map(|(name, x)| Some((name, x.as_deref()?))));
        all.extend(gate.iter().map(|gate| ("w_gate", &gate.weight[..])));
        all.extend(gate.iter().filter_map(|gate| Some(("b_gate", gate.bias.as_deref()?))));
        let input =
            |(name, x): &(&'static str, &[f32]), gradient: &[f64]| Input::new(name, &widen(x), gradient);
        let Some(got) = got else {
            let mut inputs: Vec<Input> = all.iter().map(|part| input(part, &[])).collect();
            inputs.extend(rules.floats().map(|part| Input::new("mask", &widen(&part.data), &[])));
            return inputs;
        };
        let linears = [got.query, got.key, got.value, got.out];
        let mut gradients = vec![got.d_query, got.d_key, got.d_value];
        gradients.extend(linears.iter().map(|l| l.d_weight.clone()));
        gradients.extend(linears.into_iter().filter_map(|l| l.d_bias));
        gradients.extend(got.d_bias_kv.into_iter().flatten());
        let of_norms = got.qk_norm.into_iter().flatten().flat_map(|norm| [norm.d_weight, norm.d_bias]);
        gradients.extend(of_norms.zip(norms).filter(|(_, (_, x))| x.is_some()).map(|(d, _)| d));
        let of_gate = got.gate.into_iter().flat_map(|gate| [Some(gate.d_weight), gate.d_bias]);
        gradients.extend(of_gate.flatten());
        assert_eq!(all.len(), gradients.len(), "{}", self.case.name);
        let mut inputs: Vec<Input> = all.iter().zip(&gradients).map(|(part, d)| input(part, d)).collect();
        let lengths = self.case.shape.q_len + self.case.shape.kv_len;
        let of_mask = [got.d_bias, got.d_slopes, got.d_relative, got.d_sinks];
        inputs.extend(mask_inputs(rules, lengths, of_mask));
        inputs
    }

    pub fn inputs(&self) -> Vec<Input> {
        let x: Vec<Vec<f64>> = self.inputs_with(None).into_iter().map(|input| input.x).collect();
        let got = self.call(&x, |inputs, weights, options| {
            let (shape, config) = (self.case.shape, self.case.config.config());
            multi_head_backward(inputs, shape, &config, weights, options, &self.d_out, self.d_lse.as_deref())
        });
        self.inputs_with(Some(got.expect("the layer fits the reference")))
    }

    /// Calls `f` with the tensors `x`, in the order of `inputs_with`.
    fn call<T>(&self, x: &[Vec<f64>], f: impl FnOnce([&[f64]; 3], &HostWeights<f64>, &Options) -> T) -> T {
        let LayerCase { linears, appended, norms, gate, config, rules, dropout, rotary, .. } = &self.case;
        let mut rest = x[7..].iter();
        let mut next = || &rest.next().expect("a tensor")[..];
        let biases = linears.each_ref().map(|l| l.bias.is_some().then(&mut next));
        let bias_kv = appended.is_some().then(|| [next(), next()]);
        let norms = norms.each_ref().map(|norm| HostNorm {
            weight: norm.weight.is_some().then(&mut next),
            bias: norm.bias.is_some().then(&mut next),
        });
        let gate = gate
            .as_ref()
            .map(|gate| HostLinear { weight: next(), bias: gate.bias.is_some().then(&mut next) });
        let linear = |n: usize| HostLinear { weight: &x[3 + n], bias: biases[n] };
        let weights = HostWeights {
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            bias_kv,
            qk_norm: config.qk_norm.map(|_| norms),
            gate,
        };
        let rest: Vec<_> = rest.cloned().collect();
        let rules = rules.with_floats(&rest);
        let options = Options::new().mask(rules.host()).dropout(dropout.as_ref().map(DropoutData::host));
        let options = rotary.as_ref().map_or(options, |rotary| rotary.options(options));
        f([&x[0], &x[1], &x[2]], &weights, &options)
    }

    /// Compares with differences at `most` elements of each tensor.
    #[track_caller]
    pub fn check(&self, most: usize, compared: &mut Compared) {
        let case = &self.case;
        let of = |x: &[Vec<f64>]| {
            let got = self.call(x, |inputs, weights, options| {
                multi_head(inputs, case.shape, &case.config.config(), weights, options)
            });
            loss(&got.expect("the layer fits the reference"), &self.d_out, self.d_lse.as_deref())
        };
        compare_differences(&case.name, &self.inputs(), most, compared, of)
            .unwrap_or_else(|e| panic!("{e}\n{:?}\n{:?}\n{:?}", case.shape, case.config, case.rules));
    }
}
