//! Gates of the heads' outputs inside `MultiHeadAttention`: reference, devices, gradients.

use wgpu_attention::layers::OutputGate;
use wgpu_attention::position::{RopeConfig, RowPositions};
use wgpu_attention::reference::compare::{compare, max_error};
use wgpu_attention::reference::{
    HostLinear, HostWeights, MultiHeadShape, join_heads, multi_head, project, widen,
};
use wgpu_attention::rows::NormConfig;

use crate::harness::gradients::LayerProblem;
use crate::harness::layer::{LayerCase, LinearData};
use crate::harness::layer_backward::{
    COUNT, Each, LayerBackwardSetup, NAMES as GRADIENTS, run_layer_backward_async,
};
use crate::harness::layer_options::LayerOptions;
use crate::harness::rotary::RotaryData;
use crate::harness::{Expected, FORMS, Report, Rules, Vector, full};

pub const FAMILY: &str = "gates";
pub const NAMES: &[&str] = &["gated_element", "gated_head", "gated_cross_dv"];

/// Returns a weight that selects rows of `unit_len` channels from rows of `from`, from the channel
/// `first` on.
fn selection(unit_len: usize, from: usize, first: usize) -> LinearData {
    let row = |c: usize| (0..from).map(move |n| f32::from(u8::from(n == first + c)));
    LinearData { weight: (0..unit_len).flat_map(row).collect(), bias: None }
}

/// Returns the tensor `[batch, heads, length, dim]` of a vector as joined rows of heads.
fn joined<R: wgpu_attention::reference::Real>(x: &[R], [_, heads, length, dim]: [usize; 4]) -> Vec<R> {
    join_heads(x, length, heads, dim).expect("it fits")
}

/// Returns a vector's attention as a layer whose projections select channels. The queries' input
/// has the queries and the logits of the gates.
fn vector(name: &str) -> (LayerCase, Vector) {
    let vector = Vector::load(FAMILY, name);
    let [q, k, v, gate] = ["q", "k", "v", "gate"].map(|tensor| vector.shape4(tensor));
    let [batch, heads, q_len, head_dim] = q;
    let [_, kv_heads, kv_len, value_dim] = v;
    let rows = |tensor: &str| joined(&vector.f32(tensor), vector.shape4(tensor));
    let [of_queries, of_gate] = [heads * head_dim, heads * gate[3]];
    let (queries, logits) = (rows("q"), rows("gate"));
    let both = queries.chunks_exact(of_queries).zip(logits.chunks_exact(of_gate));
    let query = both.flat_map(|(q, gate)| [q, gate].concat()).collect();
    let headwise = vector.attrs["gate"] == "head";
    let kind = if headwise { OutputGate::Headwise } else { OutputGate::Elementwise };
    let config = LayerOptions {
        kv_heads,
        head_dim,
        value_dim,
        query_features: of_queries + of_gate,
        key_features: kv_heads * head_dim,
        value_features: kv_heads * value_dim,
        out_features: heads * value_dim,
        scale: vector.number("scale"),
        output_gate: Some(kind),
        ..LayerOptions::new(heads * head_dim, heads)
    };
    let [keys, values, outs] = [kv_heads * head_dim, kv_heads * value_dim, heads * value_dim];
    let expected = vector.expected("out").map(|(out, t)| (joined(&out, [batch, heads, q_len, value_dim]), t));
    let case = LayerCase {
        name: name.into(),
        config,
        shape: MultiHeadShape { batch, q_len, kv_len },
        inputs: [query, joined(&vector.f32("k"), k), rows("v")],
        one_input: false,
        linears: [
            selection(of_queries, of_queries + of_gate, 0),
            selection(keys, keys, 0),
            selection(values, values, 0),
            selection(outs, outs, 0),
        ],
        shared: false,
        appended: None,
        norms: Default::default(),
        gate: Some(selection(of_gate, of_queries + of_gate, of_queries)),
        rotary: None,
        rules: Rules { causal: vector.attrs["causal"] == "top_left", ..Default::default() },
        dropout: None,
        expected: Expected { out: expected, ..Default::default() },
    };
    (case, vector)
}

/// Compares the gradients of a run with the vector's. The list gives each of our names, and the
/// channels of the vector's tensor in it.
fn compare_gradients(name: &str, vector: &Vector, got: &Each<Vec<f64>>) {
    let [_, heads, _, head_dim] = vector.shape4("q");
    let of = |own: &str| {
        let n = GRADIENTS.iter().position(|name| *name == own).expect("a name");
        got[n].as_ref().expect("it was wanted")
    };
    let split = heads * head_dim;
    let width = split + heads * vector.shape4("gate")[3];
    let columns = |first: usize, end: usize| -> Vec<f64> {
        of("d_query").chunks_exact(width).flat_map(|row| row[first..end].to_vec()).collect()
    };
    let all = [
        ("dq", "q", columns(0, split)),
        ("dgate", "gate", columns(split, width)),
        ("dk", "k", of("d_key").clone()),
        ("dv", "v", of("d_value").clone()),
    ];
    for (theirs, shaped, got) in all {
        let (want, tolerance) = vector.expected(theirs).expect("a gradient");
        let want = joined(&want, vector.shape4(shaped));
        compare(&got, &want, tolerance).unwrap_or_else(|e| panic!("{name}: {theirs}: {e}"));
    }
}

#[test]
fn reference_matches_the_vectors() {
    for name in NAMES {
        let (case, vector) = vector(name);
        let (want, tolerance) = case.expected.out.clone().expect("an output");
        compare(&case.exact().out, &want, tolerance).unwrap_or_else(|e| panic!("{name}: {e}"));
        if vector.has("dout") {
            compare_gradients(name, &vector, &problem(case, &vector).exact());
        }
    }
}

fn problem(case: LayerCase, vector: &Vector) -> LayerProblem {
    let d_out = joined(&vector.f64("dout"), vector.shape4("dout"));
    LayerProblem { case, d_out, d_lse: None }
}

#[test]
fn devices_match_the_vectors() {
    crate::harness::in_turn!();
    let mut report = Report::new("gates of outputs, vectors");
    NAMES.iter().for_each(|name| report.check_layer(&vector(name).0));
    report.finish();
}

#[test]
fn gradients_match_the_vectors() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients of gates of outputs, vectors");
    for name in NAMES {
        let (case, vector) = vector(name);
        if !vector.has("dout") {
            continue;
        }
        let problem = problem(case, &vector);
        for (form, keeps) in FORMS.into_iter().zip([true, false]) {
            let setup = LayerBackwardSetup { keeps, ..LayerBackwardSetup::plain(full(), form) };
            report.check_layer_backward(&problem, &setup);
            let got = pollster::block_on(run_layer_backward_async(&problem, &setup, |kernel_options| {
                kernel_options
            }));
            compare_gradients(name, &vector, &got.expect("it ran for the report"));
        }
    }
    report.finish();
}

const SELF: MultiHeadShape = MultiHeadShape { batch: 2, q_len: 19, kv_len: 19 };
const CROSS: MultiHeadShape = MultiHeadShape { batch: 2, q_len: 7, kv_len: 22 };

/// Both kinds of gates, with grouped heads, other value widths, norms and rotation. Also with
/// attention to other rows, with narrow projections with and without a bias, and with appended
/// keys.
fn cases() -> Vec<LayerCase> {
    let options = LayerOptions { kv_heads: 2, head_dim: 8, value_dim: 5, ..LayerOptions::new(24, 4) };
    let narrow = LayerOptions { narrow: true, out_features: 10, ..options };
    let wide = LayerOptions { value_dim: 8, key_features: 9, value_features: 13, ..options };
    let (element, head) = (OutputGate::Elementwise, OutputGate::Headwise);
    let kinds = [
        ("elementwise", element, options, SELF, false),
        ("headwise", head, options, SELF, false),
        ("elementwise, narrow", element, narrow, SELF, true),
        ("headwise, narrow", head, narrow, SELF, true),
        ("elementwise, attention to other rows", element, wide, CROSS, true),
        ("headwise, attention to other rows", head, wide, CROSS, false),
    ];
    let case =
        |(n, (name, gate, options, shape, appends)): (usize, (&str, OutputGate, LayerOptions, _, _))| {
            let mut case = LayerCase::random(format!("gates of outputs: {name}"), options, shape, appends);
            if n < 2 {
                case = case.with_norms(NormConfig::rms());
                let rope = RopeConfig::new(8).base(100.0);
                case.rotary = Some(RotaryData { rope, at: RowPositions::Start(3), tables: false });
            }
            case.one_input = n < 2;
            if case.one_input {
                case.inputs = [(); 3].map(|()| case.inputs[0].clone());
            }
            case = case.with_gate(gate);
            case.gate.iter_mut().for_each(|gate| gate.bias = gate.bias.take().filter(|_| n != 1));
            case.rules.causal = n % 2 == 0;
            case
        };
    kinds.into_iter().enumerate().map(case).collect()
}

/// The gate multiplies the input of the output projection. Its logits come from the queries' input.
#[test]
fn reference_equals_its_stages() {
    for case in cases() {
        let plain = LayerCase { config: LayerOptions { output_gate: None, ..case.config }, ..case.clone() };
        let plain = LayerCase { gate: None, ..plain };
        let LayerOptions { heads, value_dim, out_features, query_features, .. } = case.config;
        let width = heads * value_dim;
        let identity: Vec<f64> = selection(width, width, 0).weight.iter().map(|w| f64::from(*w)).collect();
        let weights = plain.wide_weights::<f64>();
        let inner = LayerOptions { out_features: width, ..plain.config };
        let weights_of_inner =
            HostWeights { out: HostLinear { weight: &identity, bias: None }, ..weights.host() };
        let inputs = case.inputs.each_ref().map(|x| widen::<f64>(x));
        let inputs = inputs.each_ref().map(|x| &x[..]);
        let context = multi_head(inputs, case.shape, &inner.config(), &weights_of_inner, &plain.options());
        let context = context.expect("it fits").out;

        let gate = case.gate.as_ref().expect("every case has a gate");
        let (_, [_, channels, _]) = case.gate_side().expect("every case has a gate");
        let weight = widen::<f64>(&case.wide_of(&gate.weight, (heads, channels, query_features)));
        let bias = gate.bias.as_ref().map(|bias| widen::<f64>(bias));
        let project_out = |x: &[f64]| {
            let out = weights.host().out;
            project(x, out.weight, out.bias, width, out_features).expect("it fits")
        };
        let logits = project(inputs[0], &weight, bias.as_deref(), query_features, heads * channels);
        let logits = logits.expect("it fits");
        let gated: Vec<f64> = context
            .iter()
            .enumerate()
            .map(|(n, x)| {
                let (row, h, c) = (n / width, n % width / value_dim, n % value_dim);
                let logit = logits[(row * heads + h) * channels + if channels == 1 { 0 } else { c }];
                x / (1.0 + (-logit).exp())
            })
            .collect();
        let got = case.exact().out;
        assert!(max_error(&got, &project_out(&gated)) < 1e-12, "{}", case.name);
        assert!(max_error(&got, &project_out(&context)) > 1e-2, "{}: the gate changes nothing", case.name);
    }
}

#[test]
fn devices_match_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("gates of outputs");
    cases().iter().for_each(|case| report.check_layer(case));
    report.finish();
}

#[test]
fn gradients_match_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients of gates of outputs");
    // All gradients; the gate's alone; all except the gate's; the output projection's alone.
    let of_gate = GRADIENTS.map(|name| name.contains("gate"));
    let of_out = GRADIENTS.map(|name| name == "d_w_o");
    report.check_layer_gradients(cases(), &[[true; COUNT], of_gate, of_gate.map(|is| !is), of_out]);
    report.finish();
}

#[test]
fn slices_are_gated_too() {
    crate::harness::in_turn!();
    for case in cases() {
        let weights = case.wide_weights::<f32>();
        let inputs = case.inputs.each_ref().map(|x| &x[..]);
        let options = case.options().weights(false);
        let got = full().gpu.multi_head(inputs, case.shape, &case.config.config(), &weights.host(), &options);
        let off = max_error(&widen::<f64>(&got.expect("an answer").out), &case.exact().out);
        assert!(off < 1e-4, "{}: {off}", case.name);
    }
}
