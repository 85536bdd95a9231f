//! Errors of `MultiHeadAttention::backward`, and of forward calls that save activations for it.

use wgpu_attention::layers::{LinearGradients, MultiHeadBackward, MultiHeadGradients, OutputGate};
use wgpu_attention::rows::{NormConfig, NormGradients, NormWeights};

use super::*;

/// The sizes batch, q_len, kv_len; then the features of queries, keys, values, out.
const LENGTHS: [usize; 3] = [2, 5, 7];
const FEATURES: [usize; 4] = [12, 10, 9, 11];

fn options() -> LayerOptions {
    LayerOptions {
        kv_heads: 2,
        value_dim: 6,
        key_features: FEATURES[1],
        value_features: FEATURES[2],
        out_features: FEATURES[3],
        ..LayerOptions::new(12, 4)
    }
}

/// The shapes of the four weights.
const WEIGHTS: [[usize; 2]; 4] = [[12, 12], [6, 10], [12, 9], [11, 24]];

/// Selects the gradients of one linear layer.
type Linears = for<'g, 'a> fn(&'g mut MultiHeadGradients<'a>) -> &'g mut LinearGradients<'a>;

/// The tensors of a backward call, to be spoiled one by one.
#[derive(Clone, Copy)]
struct Call<'a> {
    /// The inputs query, key, value.
    inputs: [TensorView<'a>; 3],
    out: TensorView<'a>,
    kept: [Option<TensorView<'a>>; 2],
    weights: Option<TensorView<'a>>,
    d_out: TensorView<'a>,
    d_lse: Option<TensorView<'a>>,
    d_inputs: [Option<TensorView<'a>>; 3],
    d_weights: MultiHeadGradients<'a>,
    d_bias: Option<TensorView<'a>>,
    mask: DeviceMask<'a>,
    dropout: Option<Dropout<TensorView<'a>>>,
}

impl<'a> Call<'a> {
    /// Returns the call with other gradients of a linear layer, where given.
    fn with(mut self, of: Linears, weight: Option<TensorView<'a>>, bias: Option<TensorView<'a>>) -> Self {
        let of = of(&mut self.d_weights);
        (of.weight, of.bias) = (weight.or(of.weight), bias.or(of.bias));
        self
    }

    fn forward(&self) -> MultiHeadForward<'a> {
        let [query, key, value] = self.inputs;
        let call = MultiHeadForward::new(query, key, value, self.out).mask(self.mask).dropout(self.dropout);
        call.context(self.kept[0]).lse(self.kept[1]).weights(self.weights)
    }

    fn backward(&self) -> MultiHeadBackward<'a> {
        let [d_query, d_key, d_value] = self.d_inputs;
        let call = MultiHeadBackward::new(self.forward(), self.d_out).d_lse(self.d_lse);
        call.d_query(d_query).d_key(d_key).d_value(d_value).d_weights(self.d_weights).d_bias(self.d_bias)
    }
}

pub(super) fn gradients_of_layers() -> Seen {
    let mut bench = Bench::new();
    let gpu = bench.gpu.clone();
    let [batch, q_len, kv_len] = LENGTHS;
    let buffers: Vec<_> = (0..24).map(|_| gpu.upload(&[POISON; 1 << 11]).expect("a buffer")).collect();
    let view = |n: usize, shape| TensorView::new(&buffers[n], DType::F32, shape);
    let matrix = |n: usize, shape| TensorView::matrix(&buffers[n], DType::F32, shape);
    let vector = |n: usize, len| TensorView::vector(&buffers[n], DType::F32, len);
    let sequence = |n: usize, shape| TensorView::sequence(&buffers[n], DType::F32, shape);
    let inputs = [
        sequence(0, [batch, q_len, FEATURES[0]]),
        sequence(1, [batch, kv_len, FEATURES[1]]),
        sequence(2, [batch, kv_len, FEATURES[2]]),
    ];
    let d_inputs = [3, 4, 5].map(|n| {
        let [batch, _, length, features] = inputs[n - 3].shape();
        Some(sequence(n, [batch, length, features]))
    });
    let lse = [batch, 4, q_len, 1];
    // Buffers 6 to 9: weights; 10 to 13: biases; 14 and 15: appended key and value.
    let linear =
        |n: usize| Linear { weight: matrix(6 + n, WEIGHTS[n]), bias: Some(vector(10 + n, WEIGHTS[n][0])) };
    let biased = MultiHeadWeights {
        query: linear(0),
        key: linear(1),
        value: linear(2),
        out: linear(3),
        bias_kv: Some([vector(14, 6), vector(15, 12)]),
        qk_norm: None,
        gate: None,
    };
    let of = |n: usize| LinearGradients {
        weight: Some(matrix(16 + n, WEIGHTS[n])),
        bias: Some(vector(16 + n, WEIGHTS[n][0]).with_offset(1024)),
    };
    let good = Call {
        inputs,
        out: sequence(20, [batch, q_len, FEATURES[3]]),
        kept: [Some(sequence(21, [batch, q_len, 24])), Some(view(22, lse))],
        weights: None,
        d_out: sequence(20, [batch, q_len, FEATURES[3]]).with_offset(512),
        d_lse: Some(view(22, lse).with_offset(512)),
        d_inputs,
        d_weights: MultiHeadGradients {
            query: of(0),
            key: of(1),
            value: of(2),
            out: of(3),
            bias_kv: Some([vector(16, 6).with_offset(1536), vector(17, 12).with_offset(1536)]),
            qk_norm: Default::default(),
            gate: Default::default(),
        },
        d_bias: None,
        mask: DeviceMask::none(),
        dropout: None,
    };
    let make = |weights: &MultiHeadWeights| {
        MultiHeadAttention::with_pipelines(gpu.pipelines(), options().config(), weights).expect("a layer")
    };
    let layer = make(&biased);
    let unbiased = |n: usize| Linear { bias: None, ..linear(n) };
    let without = make(&MultiHeadWeights {
        query: unbiased(0),
        key: unbiased(1),
        value: unbiased(2),
        out: unbiased(3),
        bias_kv: None,
        qk_norm: None,
        gate: None,
    });
    let size = layer.backward_scratch_size(&good.backward()).expect("a size");
    let size = size.max(layer.scratch_size(&good.forward()).expect("a size"));
    let untouched = |context: &str| {
        for (n, buffer) in buffers.iter().enumerate() {
            let after = gpu.download::<f32>(buffer, 1 << 11).expect("a read-back");
            assert!(after.iter().all(|x| *x == POISON), "{context}: buffer {n} was written");
        }
    };
    let mut refused_by = |layer: &MultiHeadAttention, context: &str, words: &[&str], call: Call| {
        let call = call.backward();
        let sized = layer.backward_scratch_size(&call).expect_err(context);
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        bench.refuses_with(context, words, |e| layer.backward(e, &call, &mut scratch));
        let recorded = layer.prepare_backward(&call, &mut scratch).expect_err(context);
        assert_eq!(sized.to_string(), recorded.to_string());
        untouched(context);
    };
    let mut refused = |context: &str, words: &[&str], call: Call| refused_by(&layer, context, words, call);
    fn longer(t: TensorView<'_>, axis: usize) -> [usize; 4] {
        let mut shape = t.shape();
        shape[axis] += 1;
        shape
    }

    // Inputs of the call.
    for (n, name) in ["query", "key", "value"].into_iter().enumerate() {
        let with = |t| {
            let mut call = good;
            call.inputs[n] = t;
            call
        };
        let (t, quoted) = (good.inputs[n], format!("`{name}`"));
        refused(name, &[&quoted, "dim must be"], with(reshaped(&t, longer(t, 3))));
        refused(name, &[&quoted, "heads must be 1"], with(reshaped(&t, longer(t, 1))));
        refused(name, &[&quoted, "F32", "U32"], with(TensorView::new(t.buffer(), DType::U32, t.shape())));
        refused(name, &[&quoted, "byte"], with(t.with_offset(1 << 20)));
        refused(name, &["`d_key`", &quoted], with(TensorView::new(&buffers[4], DType::F32, t.shape())));
    }
    let kept = |n: usize, t| {
        let mut call = good;
        call.kept[n] = Some(t);
        call
    };
    for axis in 0..4 {
        let d_out = reshaped(&good.d_out, longer(good.d_out, axis));
        refused("d_out", &["`d_out`", "must be"], Call { d_out, ..good });
        let [context, lse] = good.kept.map(|t| t.expect("given"));
        refused("context", &["`context`", "must be"], kept(0, reshaped(&context, longer(context, axis))));
        refused("lse", &["`lse`", "must be"], kept(1, reshaped(&lse, longer(lse, axis))));
        let d_lse = good.d_lse.map(|t| reshaped(&t, longer(t, axis)));
        refused("d_lse", &["`d_lse`", "must be"], Call { d_lse, ..good });
    }
    let of_type = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let out = good.d_out.shape();
    refused("d_out", &["`d_out`", "F32", "BF16"], Call { d_out: of_type(20, DType::BF16, out), ..good });
    refused(
        "context",
        &["`context`", "F32", "BF16"],
        kept(0, of_type(21, DType::BF16, [batch, 1, q_len, 24])),
    );
    refused("lse", &["`lse`", "F32", "BF16"], kept(1, of_type(22, DType::BF16, lse)));
    refused("d_lse", &["`d_lse`", "F32"], Call { d_lse: Some(of_type(22, DType::F16, lse)), ..good });
    let p = Some(Dropout::Seeded { p: 1.0, seed: 0 });
    refused("dropout", &["`dropout.p` is 1"], Call { dropout: p, ..good });
    let keep = of_type(23, DType::Bool, [1, 1, q_len, kv_len]);
    let given = Some(Dropout::Given { p: 0.5, keep });
    // The layer has one more key, the appended one.
    refused("dropout", &["`dropout`", "kv_len must be 8 or 1"], Call { dropout: given, ..good });
    let bias = |n: usize, kv_len| Mask::none().bias(view(n, [1, 1, q_len, kv_len]));
    refused("mask", &["`bias`", "kv_len must be 7 or 1"], Call { mask: bias(23, 8), ..good });

    // Outputs of the call.
    let none = MultiHeadGradients::default();
    let nothing = Call { d_inputs: [None; 3], d_weights: none, ..good };
    refused("no gradient", &["no gradient is requested", "`d_query`", "`d_weights`"], nothing);
    for (n, name) in ["d_query", "d_key", "d_value"].into_iter().enumerate() {
        let with = |t| {
            let mut call = good;
            call.d_inputs[n] = Some(t);
            call
        };
        let (t, quoted) = (good.d_inputs[n].expect("given"), format!("`{name}`"));
        for axis in 0..4 {
            refused(name, &[&quoted, "must be"], with(reshaped(&t, longer(t, axis))));
        }
        refused(name, &[&quoted, "F32, F16 or BF16", "U32"], with(of_type(3 + n, DType::U32, t.shape())));
        refused(name, &[&quoted, "share memory"], with(t.with_strides([0, 0, 12, 1])));
        refused(name, &[&quoted, "`weights.out`"], with(TensorView::new(&buffers[9], DType::F32, t.shape())));
        refused(name, &[&quoted, "`bias.key`"], with(TensorView::new(&buffers[11], DType::F32, t.shape())));
        refused(name, &[&quoted, "`bias_k`"], with(TensorView::new(&buffers[14], DType::F32, t.shape())));
        let over_d_out = TensorView::new(&buffers[20], DType::F32, t.shape()).with_offset(512);
        refused(name, &[&quoted, "`d_out`"], with(over_d_out));
        refused(name, &[&quoted, "`context`"], with(TensorView::new(&buffers[21], DType::F32, t.shape())));
        refused(name, &[&quoted, "`lse`"], with(TensorView::new(&buffers[22], DType::F32, t.shape())));
        let weights = ["query", "key"][usize::from(n == 0)];
        let other = if n == 0 { 17 } else { 16 };
        let there = TensorView::new(&buffers[other], DType::F32, t.shape());
        refused(name, &[&quoted, &format!("`d_weights.{weights}`"), "overlap"], with(there));
    }
    // Another view of the same memory cannot receive a sum.
    let other = good.d_inputs[1].map(|t| reshaped(&t, good.inputs[2].shape()));
    let d_inputs = [good.d_inputs[0], good.d_inputs[1], other];
    refused("d_value", &["`d_key`", "`d_value`", "overlap"], Call { d_inputs, ..good });
    let linears: [(&str, Linears); 4] = [
        ("query", |d| &mut d.query),
        ("key", |d| &mut d.key),
        ("value", |d| &mut d.value),
        ("out", |d| &mut d.out),
    ];
    for (n, (side, linear)) in linears.into_iter().enumerate() {
        let with = |weight, bias| good.with(linear, weight, bias);
        let [rows, columns] = WEIGHTS[n];
        let (weight, bias) = (format!("`d_weights.{side}`"), format!("`d_bias.{side}`"));
        let wrong = with(Some(matrix(16 + n, [rows + 1, columns])), None);
        refused(side, &[&weight, &format!("out (rows) must be {rows}")], wrong);
        let wrong = with(Some(matrix(16 + n, [rows, columns + 1])), None);
        refused(side, &[&weight, &format!("in (columns) must be {columns}")], wrong);
        let wrong = with(Some(view(16 + n, [1, 2, rows, columns])), None);
        refused(side, &[&weight, "heads must be 1"], wrong);
        let wrong = with(Some(of_type(16 + n, DType::Bool, [1, 1, rows, columns])), None);
        refused(side, &[&weight, "F32, F16 or BF16", "Bool"], wrong);
        let wrong = with(Some(matrix(6 + n, [rows, columns])), None);
        refused(side, &[&weight, &format!("`weights.{side}`")], wrong);
        refused(side, &[&bias, &format!("dim must be {rows}")], with(None, Some(vector(16 + n, rows + 1))));
        refused(side, &[&bias, &format!("`bias.{side}`")], with(None, Some(vector(10 + n, rows))));
        refused(side, &[&weight, &bias, "overlap"], with(None, Some(vector(16 + n, rows))));
    }
    let pair = |k, v| {
        let d_weights = MultiHeadGradients { bias_kv: Some([k, v]), ..good.d_weights };
        Call { d_weights, ..good }
    };
    let [k, v] = good.d_weights.bias_kv.expect("given");
    refused("d_bias_k", &["`d_bias_k`", "dim must be 6"], pair(vector(23, 7), v));
    refused("d_bias_v", &["`d_bias_v`", "dim must be 12"], pair(k, vector(23, 6)));
    refused("d_bias_v", &["`d_bias_k`", "`d_bias_v`", "overlap"], pair(vector(23, 6), vector(23, 12)));
    refused("d_bias_v", &["`d_bias_v`", "`bias_v`"], pair(k, vector(15, 12)));
    let d_bias = Some(view(23, [1, 1, q_len, kv_len]));
    refused("d_bias", &["d_bias", "the mask has no bias"], Call { d_bias, ..good });
    let appended = Some(view(23, [1, 1, q_len, kv_len + 1]));
    let masked = Call { mask: bias(19, kv_len), d_weights: none, ..good };
    refused("d_bias", &["`d_bias`", "must be 7", "got 8"], Call { d_bias: appended, ..masked });
    refused("d_bias", &["`d_bias`", "`bias`"], Call { d_bias, mask: bias(23, kv_len), ..masked });

    // Gradients of tensors that this layer does not have.
    let none_of = |d_weights| Call { d_weights, ..good };
    let bias_of = |n: usize| LinearGradients { weight: None, bias: of(n).bias };
    let missing = [
        ("d_bias.query", MultiHeadGradients { query: bias_of(0), ..none }),
        ("d_bias.key", MultiHeadGradients { key: bias_of(1), ..none }),
        ("d_bias.value", MultiHeadGradients { value: bias_of(2), ..none }),
        ("d_bias.out", MultiHeadGradients { out: bias_of(3), ..none }),
        ("d_bias_k", MultiHeadGradients { bias_kv: good.d_weights.bias_kv, ..none }),
    ];
    for (name, d_weights) in missing {
        refused_by(&without, name, &[name, "made without it"], none_of(d_weights));
    }

    // Gradients of norms of queries and keys.
    let own = |n| NormWeights { weight: Some(vector(n, 3)), bias: Some(vector(n, 3).with_offset(64)) };
    let (norms, config) =
        (Some([own(14), own(15)]), LayerOptions { qk_norm: Some(NormConfig::rms()), ..options() });
    let weights = MultiHeadWeights { qk_norm: norms, bias_kv: None, ..biased };
    let normed =
        MultiHeadAttention::with_pipelines(gpu.pipelines(), config.config(), &weights).expect("a layer");
    let bare = MultiHeadWeights { qk_norm: None, ..biased };
    let bare = MultiHeadAttention::with_pipelines(gpu.pipelines(), config.config(), &bare).expect("a layer");
    for (n, side) in ["q", "k"].into_iter().enumerate() {
        for (part, name) in ["weight", "bias"].into_iter().enumerate() {
            let to = |t| {
                let mut d_weights = none;
                let of = &mut d_weights.qk_norm[n];
                *[&mut of.weight, &mut of.bias][part] = Some(t);
                Call { d_weights, ..good }
            };
            let name = &format!("`d_{side}_norm.{name}`");
            refused_by(&layer, name, &[name.trim_matches('`'), "made without it"], to(vector(23, 3)));
            refused_by(&bare, name, &[name.trim_matches('`'), "made without it"], to(vector(23, 3)));
            refused_by(&normed, name, &[name, "dim must be 3", "got 4"], to(vector(23, 4)));
            refused_by(&normed, name, &[name, "F32, F16 or BF16"], to(of_type(23, DType::U32, [1, 1, 1, 3])));
            let read = &format!("`{side}_norm.weight`");
            refused_by(&normed, name, &[name, read], to(vector(14 + n, 3)));
        }
    }
    let mut both = none;
    both.qk_norm =
        [NormGradients { weight: Some(vector(23, 3)), bias: Some(vector(23, 3)) }, NormGradients::default()];
    let words = ["`d_q_norm.weight`", "`d_q_norm.bias`", "overlap"];
    refused_by(&normed, "one place for two", &words, none_of(both));

    // Gradients of the gate of outputs.
    let gate = Some(Linear { weight: matrix(14, [4, 12]), bias: Some(vector(15, 4)) });
    let config = LayerOptions { output_gate: Some(OutputGate::Headwise), ..options() };
    let weights = MultiHeadWeights { gate, bias_kv: None, ..biased };
    let gated =
        MultiHeadAttention::with_pipelines(gpu.pipelines(), config.config(), &weights).expect("a layer");
    let of_gate = |gate| Call { d_weights: MultiHeadGradients { gate, ..none }, ..good };
    let of_weight = |t| of_gate(LinearGradients { weight: Some(t), bias: None });
    let of_bias = |t| of_gate(LinearGradients { weight: None, bias: Some(t) });
    refused_by(
        &layer,
        "a gate's weight",
        &["d_weights.gate", "made without it"],
        of_weight(matrix(23, [4, 12])),
    );
    refused_by(&layer, "a gate's bias", &["d_bias.gate", "made without it"], of_bias(vector(23, 4)));
    let words = ["`d_weights.gate`", "out (rows) must be 4", "got 12"];
    refused_by(&gated, "a gate's rows", &words, of_weight(matrix(23, [12, 12])));
    refused_by(&gated, "a gate's bias", &["`d_bias.gate`", "dim must be 4", "got 3"], of_bias(vector(23, 3)));
    let words = ["`d_bias.gate`", "F32, F16 or BF16"];
    refused_by(&gated, "a gate's type", &words, of_bias(of_type(23, DType::U32, [1, 1, 1, 4])));
    let words = ["`d_weights.gate`", "`weights.gate`"];
    refused_by(&gated, "a gate's own weight", &words, of_weight(matrix(14, [4, 12])));
    let both = LinearGradients { weight: Some(matrix(23, [4, 12])), bias: Some(vector(23, 4)) };
    refused_by(
        &gated,
        "one place for both",
        &["`d_weights.gate`", "`d_bias.gate`", "overlap"],
        of_gate(both),
    );

    // A scratch without room.
    let call = good.backward();
    let mut empty = Scratch::new(gpu.device(), ScratchSize::default()).expect("no memory");
    bench.refuses_with("scratch", &["scratch_size"], |e| layer.backward(e, &call, &mut empty));
    // Errors of a forward call that shall save its context.
    let mut forward = |words: &[&str], call: Call| {
        let call = call.forward();
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        bench.refuses_with(words[0], words, |e| layer.forward(e, &call, &mut scratch));
        untouched(words[0]);
    };
    let context = good.kept[0].expect("given");
    for axis in 0..4 {
        forward(&["`context`", "must be"], kept(0, reshaped(&context, longer(context, axis))));
    }
    forward(&["`context`", "F32", "BF16"], kept(0, of_type(21, DType::BF16, context.shape())));
    forward(&["`context`", "share memory"], kept(0, context.with_strides([0, 0, 24, 1])));
    let at = |n: usize| kept(0, TensorView::new(&buffers[n], DType::F32, context.shape()));
    forward(&["`context`", "`query`"], at(0));
    forward(&["`context`", "`weights.out`"], at(9));
    forward(&["`context`", "`out`"], at(20));
    forward(&["`context`", "`lse`"], kept(0, TensorView::new(&buffers[22], DType::F32, context.shape())));
    let weights = Some(view(21, [batch, 4, q_len, kv_len + 1]));
    forward(&["`context`", "`weights`"], Call { weights, ..good });
    bench.seen
}
