//! Errors of layers and projections.

use wgpu_attention::layers::OutputGate;
use wgpu_attention::rows::{NormConfig, NormWeights};

use super::*;

pub(super) fn layers() -> Seen {
    let gpu = &full().gpu;
    let mut seen = Seen::new();
    let layer = Layer::new(gpu);
    let good = layer.weights();
    let other = gpu.buffer(1 << 12).expect("a buffer");
    let matrix = |rows, columns| TensorView::matrix(&other, DType::F32, [rows, columns]);
    let vector = |n| TensorView::vector(&other, DType::F32, n);
    let mut refused = |words: &[&str], config: LayerOptions, weights: MultiHeadWeights| {
        let error = MultiHeadAttention::with_pipelines(gpu.pipelines(), config.config(), &weights);
        seen.insert(read("a layer", &error.expect_err("refused"), words));
    };
    let c = layer.config;
    let weight = |weight| Linear { weight, bias: None };
    let biased = |n| Some(vector(n));
    // embed 12, 4 heads of 3, 2 kv heads.
    refused(
        &["`weights.query`", "out (rows) must be 12", "got 13"],
        c,
        MultiHeadWeights { query: weight(matrix(13, 12)), ..good },
    );
    refused(
        &["`weights.query`", "in (columns) must be 12", "got 11"],
        c,
        MultiHeadWeights { query: weight(matrix(12, 11)), ..good },
    );
    refused(
        &["`weights.key`", "out (rows) must be 6", "got 12"],
        c,
        MultiHeadWeights { key: weight(matrix(12, 12)), ..good },
    );
    refused(
        &["`weights.value`", "in (columns) must be 12", "got 6"],
        c,
        MultiHeadWeights { value: weight(matrix(6, 6)), ..good },
    );
    refused(
        &["`weights.out`", "out (rows) must be 12", "got 6"],
        c,
        MultiHeadWeights { out: weight(matrix(6, 12)), ..good },
    );
    refused(
        &["`bias.query`", "dim must be 12", "got 6"],
        c,
        MultiHeadWeights { query: Linear { bias: biased(6), ..good.query }, ..good },
    );
    refused(
        &["`bias.key`", "dim must be 6", "got 12"],
        c,
        MultiHeadWeights { key: Linear { bias: biased(12), ..good.key }, ..good },
    );
    refused(
        &["`bias.value`", "dim must be 6", "got 5"],
        c,
        MultiHeadWeights { value: Linear { bias: biased(5), ..good.value }, ..good },
    );
    refused(
        &["`bias.out`", "dim must be 12", "got 1"],
        c,
        MultiHeadWeights { out: Linear { bias: biased(1), ..good.out }, ..good },
    );
    refused(
        &["`bias_k`", "dim must be 6", "got 3"],
        c,
        MultiHeadWeights { bias_kv: Some([vector(3), vector(6)]), ..good },
    );
    refused(
        &["`bias_v`", "dim must be 6", "got 7"],
        c,
        MultiHeadWeights { bias_kv: Some([vector(6), vector(7)]), ..good },
    );
    let vectors = |weight, bias| NormWeights { weight: Some(weight), bias: Some(bias) };
    let norms = |q, k| MultiHeadWeights { qk_norm: Some([q, k]), ..good };
    let fits = vectors(vector(3), vector(3));
    refused(&["`qk_norm`", "`MultiHeadConfig::qk_norm`"], c, norms(fits, fits));
    let normed = LayerOptions { qk_norm: Some(NormConfig::rms()), ..c };
    let short = (vectors(vector(2), vector(3)), vectors(vector(3), vector(12)));
    refused(&["`q_norm.weight`", "dim must be 3", "got 2"], normed, norms(short.0, fits));
    refused(&["`q_norm.bias`", "dim must be 3", "got 12"], normed, norms(short.1, fits));
    refused(&["`k_norm.weight`", "dim must be 3", "got 2"], normed, norms(fits, short.0));
    refused(&["`k_norm.bias`", "dim must be 3", "got 12"], normed, norms(fits, short.1));
    let whole_norm = vectors(TensorView::vector(&other, DType::U32, 3), vector(3));
    refused(&["`k_norm.weight`", "F32, F16 or BF16", "U32"], normed, norms(fits, whole_norm));
    let eps = LayerOptions { qk_norm: Some(NormConfig::layer().eps(-1.0)), ..c };
    refused(&["`eps` is -1", "not below 0"], eps, good);
    let gated = |kind| LayerOptions { output_gate: Some(kind), ..c };
    let (element, head) = (gated(OutputGate::Elementwise), gated(OutputGate::Headwise));
    let gate = |rows, columns, bias| MultiHeadWeights {
        gate: Some(Linear { weight: matrix(rows, columns), bias: Some(vector(bias)) }),
        ..good
    };
    refused(&["`gate` of the weights", "`MultiHeadConfig::output_gate`"], c, gate(12, 12, 12));
    refused(&["`MultiHeadConfig::output_gate`", "set `gate`"], element, good);
    refused(&["`weights.gate`", "out (rows) must be 12", "got 4"], element, gate(4, 12, 12));
    refused(&["`weights.gate`", "out (rows) must be 4", "got 12"], head, gate(12, 12, 4));
    refused(&["`weights.gate`", "in (columns) must be 12", "got 6"], head, gate(4, 6, 4));
    refused(&["`bias.gate`", "dim must be 4", "got 12"], head, gate(4, 12, 12));
    let narrow_gate = LayerOptions { narrow: true, kv_heads: 4, ..head };
    let shared = MultiHeadWeights {
        query: weight(TensorView::new(&other, DType::F32, [1, 4, 3, 3])),
        ..gate(4, 12, 4)
    };
    let shared = MultiHeadWeights { key: shared.query, value: shared.query, ..shared };
    refused(&["`weights.gate`"], narrow_gate, shared);
    let whole = TensorView::matrix(&other, DType::U32, [12, 12]);
    let integers = MultiHeadWeights { gate: Some(weight(whole)), ..good };
    refused(&["`weights.gate`", "F32, F16 or BF16", "U32"], element, integers);
    refused(
        &["`weights.query`", "F32, F16 or BF16", "U32"],
        c,
        MultiHeadWeights { query: weight(whole), ..good },
    );
    let half = TensorView::matrix(&other, DType::F16, [6, 12]);
    refused(&["`weights.key`", "F32", "F16"], c, MultiHeadWeights { key: weight(half), ..good });
    let small = gpu.buffer(16).expect("a buffer");
    let short = TensorView::matrix(&small, DType::F32, [12, 12]);
    refused(&["`weights.out`", "byte 576", "has 16"], c, MultiHeadWeights { out: weight(short), ..good });
    refused(&["`layer`", "heads is 0"], LayerOptions { heads: 0, ..c }, good);
    refused(&["`layer`", "out_features is 0"], LayerOptions { out_features: 0, ..c }, good);
    refused(&["`heads` is 4", "3 (`kv_heads`)"], LayerOptions { kv_heads: 3, ..c }, good);
    let narrow = LayerOptions { narrow: true, kv_heads: 4, value_features: 10, ..c };
    refused(&["`value_features` is 10", "multiple of 4 (`heads`)"], narrow, good);
    refused(&["`softcap` is -1", "above 0"], LayerOptions { softcap: Some(-1.0), ..c }, good);
    refused(&["`scale` is 1000000", "finite"], LayerOptions { scale: Some(1e300), ..c }, good);
    for far in [usize::MAX, 1 << 63] {
        refused(&["heads · head_dim", "below 2^32"], LayerOptions { head_dim: far, ..c }, good);
        refused(&["heads · head_dim", "below 2^32"], LayerOptions { heads: far, kv_heads: 1, ..c }, good);
        refused(&["heads · value_dim", "below 2^32"], LayerOptions { value_dim: far, ..c }, good);
        refused(&["key_features", "below 2^32"], LayerOptions { key_features: far, ..c }, good);
    }
    seen.extend(layer.calls());
    seen
}

pub(super) fn projections() -> Seen {
    let mut bench = Bench::new();
    let gpu = bench.gpu.clone();
    let projection = Projection::with_pipelines(gpu.pipelines());
    let buffers = [(); 3].map(|()| gpu.buffer(1 << 12).expect("a buffer"));
    let view = |n: usize, shape| TensorView::new(&buffers[n], DType::F32, shape);
    let linear = Linear { weight: view(1, [1, 1, 8, 6]), bias: None };
    let good = Product { x: view(0, [2, 1, 5, 6]), linear, out: view(2, [2, 4, 5, 2]), narrow: false };
    let aside = |n| Some(view(1, [1, 1, 1, n]).with_offset(512));
    let cases: [(&[&str], &[Product]); 9] = [
        (&["`x`", "heads must be 1", "got 2"], &[Product { x: view(0, [2, 2, 5, 6]), ..good }]),
        (&["`out`", "batch must be 2", "got 3"], &[Product { out: view(2, [3, 4, 5, 2]), ..good }]),
        (&["`out`", "length must be 5", "got 4"], &[Product { out: view(2, [2, 4, 4, 2]), ..good }]),
        (
            &["`linear.weight`", "in (columns) must be 6", "got 7"],
            &[good, Product { linear: Linear { weight: view(1, [1, 1, 8, 7]), bias: None }, ..good }],
        ),
        (
            &["`linear.bias`", "dim must be 8", "got 9"],
            &[Product { linear: Linear { bias: aside(9), ..linear }, ..good }],
        ),
        (
            &["narrow", "separate calls"],
            &[
                good,
                Product {
                    linear: Linear { weight: view(1, [1, 2, 2, 3]), bias: None },
                    out: view(2, [2, 2, 5, 2]).with_offset(512),
                    narrow: true,
                    ..good
                },
            ],
        ),
        (&["`out`", "`linear.weight`"], &[Product { out: view(1, [2, 4, 5, 2]), ..good }]),
        (&["`out`"], &[good, good]),
        (
            &["`x`", "F32, F16 or BF16", "Bool"],
            &[Product { x: TensorView::new(&buffers[0], DType::Bool, [2, 1, 5, 6]), ..good }],
        ),
    ];
    for (words, products) in cases {
        let calls: Vec<_> = products.iter().map(Product::call).collect();
        bench.refuses_with(words[0], words, |e| projection.forward(e, &calls));
    }
    bench.seen
}

/// The tensors of a product, to be spoiled one by one.
#[derive(Clone, Copy)]
struct Product<'a> {
    x: TensorView<'a>,
    linear: Linear<'a>,
    out: TensorView<'a>,
    narrow: bool,
}

impl<'a> Product<'a> {
    fn call(&self) -> ProjectionForward<'a> {
        ProjectionForward::new(self.x, self.linear, self.out).narrow(self.narrow)
    }
}

/// The parts of a layer's call, to be spoiled one by one.
#[derive(Clone, Copy)]
struct LayerParts<'a> {
    query: TensorView<'a>,
    key: TensorView<'a>,
    value: TensorView<'a>,
    out: TensorView<'a>,
    mask: DeviceMask<'a>,
    lse: Option<TensorView<'a>>,
    dropout: Option<Dropout<TensorView<'a>>>,
}

impl<'a> LayerParts<'a> {
    fn call(&self) -> MultiHeadForward<'a> {
        let LayerParts { query, key, value, out, mask, lse, dropout } = *self;
        MultiHeadForward::new(query, key, value, out).mask(mask).lse(lse).dropout(dropout)
    }
}

/// A small layer on a device.
pub(super) struct Layer {
    pub(super) gpu: Gpu,
    pub(super) config: LayerOptions,
    pub(super) buffer: wgpu::Buffer,
    pub(super) data: Vec<f32>,
}

impl Layer {
    pub(super) fn new(gpu: &Gpu) -> Self {
        let data = noise(12 * 12 * 4, 0.7);
        let config = LayerOptions { kv_heads: 2, ..LayerOptions::new(12, 4) };
        Layer { gpu: gpu.clone(), config, buffer: gpu.upload(&data).expect("an upload"), data }
    }

    pub(super) fn weights(&self) -> MultiHeadWeights<'_> {
        let linear = |rows, offset| Linear {
            weight: TensorView::matrix(&self.buffer, DType::F32, [rows, 12]).with_offset(offset),
            bias: None,
        };
        MultiHeadWeights {
            query: linear(12, 0),
            key: linear(6, 144),
            value: linear(6, 288),
            out: linear(12, 432),
            bias_kv: None,
            qk_norm: None,
            gate: None,
        }
    }

    /// Runs spoiled calls, each followed by a correct one.
    fn calls(&self) -> Seen {
        let gpu = &self.gpu;
        let mut seen = Seen::new();
        let layer =
            MultiHeadAttention::with_pipelines(gpu.pipelines(), self.config.config(), &self.weights())
                .expect("a layer");
        let x = noise(2 * 5 * 12, 0.9);
        let context = noise(2 * 7 * 12, 1.3);
        let input = gpu.upload(&[&x[..], &[POISON; RESCALE_THRESHOLD]].concat()).expect("an upload");
        let keys = gpu.upload(&[&context[..], &[POISON; RESCALE_THRESHOLD]].concat()).expect("an upload");
        let out = gpu.upload(&vec![POISON; 2 * 5 * 12 + RESCALE_THRESHOLD]).expect("an upload");
        let sequence = |buffer, shape| TensorView::sequence(buffer, DType::F32, shape);
        let keys_view = sequence(&keys, [2, 7, 12]);
        let good = LayerParts {
            query: sequence(&input, [2, 5, 12]),
            key: keys_view,
            value: keys_view,
            out: sequence(&out, [2, 5, 12]),
            mask: Mask::none(),
            lse: None,
            dropout: None,
        };
        let part = |offset, n| HostLinear {
            weight: &widen::<f64>(&self.data)[offset..][..n].to_vec().leak()[..],
            bias: None,
        };
        let weights = HostWeights {
            query: part(0, 144),
            key: part(144, 72),
            value: part(288, 72),
            out: part(432, 144),
            bias_kv: None,
            qk_norm: None,
            gate: None,
        };
        let inputs = [widen(&x), widen(&context), widen(&context)];
        let shape = MultiHeadShape { batch: 2, q_len: 5, kv_len: 7 };
        let want = multi_head::<f64>(
            inputs.each_ref().map(|i| &i[..]),
            shape,
            &self.config.config(),
            &weights,
            &Options::default(),
        )
        .expect("a truth");

        let bad = [
            (
                &["`query`", "dim must be 12", "got 11"][..],
                LayerParts { query: sequence(&input, [2, 5, 11]), ..good },
            ),
            (
                &["`query`", "heads must be 1", "got 2"],
                LayerParts { query: TensorView::new(&input, DType::F32, [2, 2, 5, 6]), ..good },
            ),
            (&["`key`", "batch must be 2", "got 1"], LayerParts { key: sequence(&keys, [1, 7, 12]), ..good }),
            (&["`key`", "dim must be 12", "got 13"], LayerParts { key: sequence(&keys, [2, 7, 13]), ..good }),
            (
                &["`value`", "length must be 7", "got 6"],
                LayerParts { value: sequence(&keys, [2, 6, 12]), ..good },
            ),
            (&["`out`", "length must be 5", "got 7"], LayerParts { out: sequence(&out, [2, 7, 12]), ..good }),
            (&["`out`", "dim must be 12", "got 6"], LayerParts { out: sequence(&out, [2, 5, 6]), ..good }),
            (&["`out`", "`query`"], LayerParts { out: sequence(&input, [2, 5, 12]), ..good }),
            (&["`out`", "weights."], LayerParts { out: sequence(&self.buffer, [2, 5, 12]), ..good }),
            (&["`out`", "share memory"], LayerParts { out: good.out.with_strides([60, 60, 0, 1]), ..good }),
            (
                &["`key`", "F32", "U32"],
                LayerParts { key: TensorView::sequence(&keys, DType::U32, [2, 7, 12]), ..good },
            ),
            (&["`query`", "length is 0"], LayerParts { query: sequence(&input, [2, 0, 12]), ..good }),
            (
                &["`value`", "byte"],
                LayerParts { value: good.value.with_offset(RESCALE_THRESHOLD + 1), ..good },
            ),
            (
                &["`key_padding_mask`", "kv_len must be 7 or 1", "got 5"],
                LayerParts {
                    mask: Mask::none().key_padding_mask(TensorView::new(&input, DType::Bool, [2, 1, 1, 5])),
                    ..good
                },
            ),
            (
                &["`lse`", "q_len must be 5", "got 4"],
                LayerParts { lse: Some(TensorView::new(&keys, DType::F32, [2, 4, 4, 1])), ..good },
            ),
            (
                &["`dropout.p`", "-1"],
                LayerParts { dropout: Some(Dropout::Seeded { p: -1.0, seed: 0 }), ..good },
            ),
            (
                &["2^32"],
                LayerParts {
                    key: sequence(&keys, [2, usize::MAX, 12]).with_strides([0, 0, 0, 1]),
                    value: sequence(&keys, [2, usize::MAX, 12]).with_strides([0, 0, 0, 1]),
                    ..good
                },
            ),
        ];
        let size = layer.scratch_size(&good.call()).expect("a size");
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        let mut check =
            |words: &[&str], encoder: wgpu::CommandEncoder, error: Error, scratch: &mut Scratch| {
                seen.insert(read("a layer's call", &error, words));
                gpu.queue().submit([encoder.finish()]);
                let after = gpu.download::<f32>(&out, 2 * 5 * 12).expect("a read-back");
                assert!(after.iter().all(|x| *x == POISON), "{words:?}: something was recorded");
                let mut encoder = gpu.device().create_command_encoder(&Default::default());
                layer.forward(&mut encoder, &good.call(), scratch).expect("the correct call");
                gpu.queue().submit([encoder.finish()]);
                let after = gpu.download::<f32>(&out, 2 * 5 * 12).expect("a read-back");
                let error = max_error(&widen(&after), &want.out);
                assert!(error < 1e-4, "after {words:?}: off by {error}");
                gpu.queue().write_buffer(&out, 0, bytemuck::cast_slice(&[POISON; 2 * 5 * 12]));
            };
        for (words, call) in bad {
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            let error = layer.forward(&mut encoder, &call.call(), &mut scratch).expect_err(words[0]);
            check(words, encoder, error, &mut scratch);
        }
        let mut none = Scratch::new(gpu.device(), ScratchSize::default()).expect("no memory");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = layer.forward(&mut encoder, &good.call(), &mut none).expect_err("no scratch");
        check(&["0 bytes", "scratch_size"], encoder, error, &mut scratch);
        seen
    }
}
