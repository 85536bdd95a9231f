//! Stacks of layers: their calls create nothing after `prepare`.

use wgpu_attention::layers::{
    DecoderBackward, DecoderForward, DecoderLayerGradients, DecoderLayerWeights, DecoderMemory,
    EncoderBackward, EncoderForward, EncoderLayerGradients, EncoderLayerWeights, FeedForwardWeights,
    LinearGradients, NormOrder, OutputGate, TransformerLayerConfig,
};
use wgpu_attention::position::{Rope, RopeConfig, RowPositions};
use wgpu_attention::rows::{NormConfig, NormWeights};
use wgpu_attention::{TransformerDecoder, TransformerEncoder};

use super::*;

const FEATURES: usize = 16;
const LAYERS: usize = 2;

#[test]
fn prepared_stacks_create_nothing() {
    let own = Own::new();
    let gpu = &own.gpu;
    let e = FEATURES;
    let upload = |n: usize, seed| gpu.upload(&noise(n, seed)).expect("an upload");
    let (weight, bias) = (upload(2 * e * e, 0.3), upload(2 * e, 0.4));
    let linear = |out, from| Linear {
        weight: TensorView::matrix(&weight, DType::F32, [out, from]),
        bias: Some(TensorView::vector(&bias, DType::F32, out)),
    };
    let own_weights = linear(e, e);
    let attention = MultiHeadWeights {
        query: own_weights,
        key: own_weights,
        value: own_weights,
        out: own_weights,
        bias_kv: None,
        qk_norm: None,
        gate: None,
    };
    let feed_forward = FeedForwardWeights { up: linear(2 * e, e), gate: None, down: linear(e, 2 * e) };
    let norm =
        NormWeights { weight: Some(TensorView::vector(&bias, DType::F32, e)), ..NormWeights::default() };
    let encoded = EncoderLayerWeights { attention, feed_forward, norms: [norm; 2] };
    let decoded = DecoderLayerWeights {
        self_attention: attention,
        cross_attention: attention,
        feed_forward,
        norms: [norm; 3],
    };
    let rows = [upload(3 * e, 0.5), upload(5 * e, 0.6)];
    let outs: Vec<_> = (0..6).map(|_| gpu.buffer(4 * 8 * LAYERS * e * e).expect("a buffer")).collect();
    let sequence = |buffer, length| TensorView::sequence(buffer, DType::F32, [1, length, e]);
    let [x, memory] = [sequence(&rows[0], 3), sequence(&rows[1], 5)];
    let [out, d_x, d_memory] = [sequence(&outs[0], 3), sequence(&outs[1], 3), sequence(&outs[2], 5)];
    let heads = |n: usize| TensorView::new(&outs[n], DType::F32, [LAYERS, 2, 5, e / 2]);
    let projected = DecoderMemory { keys: heads(3), values: heads(4) };
    // The gradient of one weight in each layer.
    let places = TensorView::matrix(&outs[5], DType::F32, [LAYERS * e, e]);
    let gradient = |n| LinearGradients { weight: Some(places.slice(2, n * e, e)), bias: None };

    for order in [NormOrder::Post, NormOrder::Pre] {
        // One of the orders has norms of queries and keys, and gates of the heads' outputs.
        let pre = order == NormOrder::Pre;
        let inner = MultiHeadConfig::new(e, 2).qk_norm(pre.then(NormConfig::rms));
        let inner = inner.output_gate(pre.then_some(OutputGate::Elementwise));
        let gate = pre.then_some(own_weights);
        let attention = MultiHeadWeights { gate, ..attention };
        let encoded = EncoderLayerWeights { attention, ..encoded };
        let decoded =
            DecoderLayerWeights { self_attention: attention, cross_attention: attention, ..decoded };
        let config = TransformerLayerConfig::new(inner, 2 * e).order(order);
        let pipelines = gpu.pipelines();
        let encoder = TransformerEncoder::with_pipelines(pipelines, config, &[encoded; LAYERS], Some(norm));
        let encoder = encoder.expect("a stack");
        let decoder = TransformerDecoder::with_pipelines(pipelines, config, &[decoded; LAYERS], Some(norm));
        let decoder = decoder.expect("a stack");
        let rope = Rope::new(gpu.device(), RopeConfig::new(e / 2)).expect("a rope");
        let start = RowPositions::Start(0);
        let encodes = EncoderForward::new(x, out).mask(Mask::causal()).rotary(&rope, start);
        let mut of_encoder = [EncoderLayerGradients::default(); LAYERS];
        of_encoder.iter_mut().enumerate().for_each(|(n, to)| to.attention.key = gradient(n));
        let encodes_back = EncoderBackward::new(encodes, x).d_x(d_x).d_layers(&of_encoder);
        let decodes = DecoderForward::new(x, projected, out).mask(Mask::causal()).rotary(&rope, start);
        let mut of_decoder = [DecoderLayerGradients::default(); LAYERS];
        of_decoder.iter_mut().enumerate().for_each(|(n, to)| to.cross_attention.key = gradient(n));
        let decodes_back =
            DecoderBackward::new(decodes, memory, x).d_x(d_x).d_memory(d_memory).d_layers(&of_decoder);
        let sizes = [
            encoder.scratch_size(&encodes),
            encoder.backward_scratch_size(&encodes_back),
            decoder.scratch_size(&decodes),
            decoder.backward_scratch_size(&decodes_back),
        ];
        let size = sizes.into_iter().fold(ScratchSize::default(), |all, size| all.max(size.expect("a size")));
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        encoder.prepare(&encodes, &mut scratch).expect("a preparation");
        encoder.prepare_backward(&encodes_back, &mut scratch).expect("a preparation");
        decoder.prepare(&decodes, &mut scratch).expect("a preparation");
        decoder.prepare_backward(&decodes_back, &mut scratch).expect("a preparation");
        let alive = || {
            gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
            (gpu.pipelines().compiled(), own.alive().expect("wgpu counts resources on this backend"))
        };
        let prepared = alive();
        assert!(prepared.0 >= 10 && prepared.1.bind_groups >= 60, "{prepared:?}");
        for n in 0..3 {
            let record = |e: &mut wgpu::CommandEncoder| {
                encoder.forward(e, &encodes, &mut scratch)?;
                encoder.backward(e, &encodes_back, &mut scratch)?;
                decoder.forward(e, &decodes, &mut scratch)?;
                decoder.backward(e, &decodes_back, &mut scratch)
            };
            gpu.submit(record).expect("a recording");
            assert_eq!(alive(), prepared, "{order:?}, recording {n}");
        }
        let written = gpu.download::<f32>(&outs[2], 5 * e).expect("a read-back");
        assert!(written.iter().any(|d| *d != 0.0), "no gradient of the memory");
    }
}
