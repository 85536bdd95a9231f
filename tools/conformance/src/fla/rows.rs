//! Short convolutions and gated norms.

use wgpu_attention::matmul::Activation;
use wgpu_attention::rows::{
    CausalConv, CausalConvBackward, CausalConvForward, Norm, NormBackward, NormConfig, NormForward, NormGate,
};
use wgpu_attention::{Gpu, Scratch, TensorView};

use super::{computed, dense, dense_output, starts};
use crate::case::Case;
use crate::outcome::{Failed, Ran};
use crate::tensor::Placed;

/// Rows `[batch, length, channels]`, as `[batch, 1, length, channels]`.
fn sequence(placed: &Placed) -> TensorView<'_> {
    let [_, batch, length, channels] = placed.view().shape();
    placed.viewed([batch, 1, length, channels])
}

/// A state `[sequences, channels, rows]`, as `[sequences, 1, rows, channels]`.
fn state(placed: &Placed) -> TensorView<'_> {
    sequence(placed).transposed(2, 3)
}

pub fn convolution(gpu: &Gpu, case: &Case) -> Ran {
    let [x, weight, d_out] = ["x", "weight", "d_o"].map(|name| dense(gpu, case, name));
    let none = || Failed("a tensor is missing".into());
    let [x, weight, d_out] = [x?, weight?, d_out?].map(|t| t.ok_or_else(none));
    let (x, weight, d_out) = (x?, weight?, d_out?);
    let [bias, h0, d_ht] = ["bias", "h0", "d_ht"].map(|name| dense(gpu, case, name));
    let (bias, h0, d_ht) = (bias?, h0?, d_ht?);
    let names = ["o", "ht", "d_x", "d_weight", "d_bias", "d_h0"];
    let [out, ht, d_x, d_weight, d_bias, d_h0] = names.map(|name| dense_output(gpu, case, name));
    let (out, ht) = (out?.ok_or_else(none)?, ht?);
    let (d_x, d_weight, d_bias, d_h0) = (d_x?, d_weight?, d_bias?, d_h0?);
    let starts = starts(gpu, case)?;
    let convolution = CausalConv::with_pipelines(gpu.pipelines());
    let call = CausalConvForward::new(sequence(&x), weight.view(), sequence(&out))
        .bias(bias.as_ref().map(Placed::view))
        .activation(case.flag("activation").then_some(Activation::Silu))
        .packed(starts.as_ref().map(Placed::view))
        .initial_state(h0.as_ref().map(state))
        .final_state(ht.as_ref().map(state));
    gpu.submit(|e| convolution.forward(e, &call))?;
    let call = CausalConvBackward::new(call, sequence(&d_out))
        .d_final_state(d_ht.as_ref().map(state))
        .d_x(d_x.as_ref().map(sequence))
        .d_weight(d_weight.as_ref().map(Placed::view))
        .d_bias(d_bias.as_ref().map(Placed::view))
        .d_initial_state(d_h0.as_ref().map(state));
    let mut scratch = Scratch::new(gpu.device(), convolution.backward_scratch_size(&call)?)?;
    gpu.submit(|e| convolution.backward(e, &call, &mut scratch))?;
    let gradients = [("d_x", &d_x), ("d_weight", &d_weight), ("d_bias", &d_bias), ("d_h0", &d_h0)];
    let [x, weight, bias, h0] = gradients.map(|(name, placed)| (name, placed.as_ref()));
    computed(gpu, [("o", Some(&out)), ("ht", ht.as_ref()), x, weight, bias, h0])
}

pub fn gated_norm(gpu: &Gpu, case: &Case) -> Ran {
    let [x, g, d_out] = ["x", "g", "d_o"].map(|name| dense(gpu, case, name));
    let none = || Failed("a tensor is missing".into());
    let [x, g, d_out] = [x?, g?, d_out?].map(|t| t.ok_or_else(none));
    let (x, g, d_out) = (x?, g?, d_out?);
    let [weight, bias] = ["weight", "bias"].map(|name| dense(gpu, case, name));
    let (weight, bias) = (weight?, bias?);
    let names = ["o", "d_x", "d_g", "d_weight", "d_bias"];
    let [out, d_x, d_g, d_weight, d_bias] = names.map(|name| dense_output(gpu, case, name));
    let out = out?.ok_or_else(none)?;
    let (d_x, d_g, d_weight, d_bias) = (d_x?, d_g?, d_weight?, d_bias?);
    let config = if case.flag("rms") { NormConfig::rms() } else { NormConfig::layer() };
    let eps = case.number("eps").ok_or_else(|| Failed("no eps".into()))?;
    let norm = Norm::with_pipelines(gpu.pipelines(), config.eps(eps))?;
    let activation = match case.text("activation") {
        Some("silu") => Activation::Silu,
        _ => Activation::Sigmoid,
    };
    let call = NormForward::new(x.view(), out.view())
        .weight(weight.as_ref().map(Placed::view))
        .bias(bias.as_ref().map(Placed::view))
        .gate(NormGate::after(g.view(), activation));
    gpu.submit(|e| norm.forward(e, &call))?;
    let call = NormBackward::new(call, d_out.view())
        .d_x(d_x.as_ref().map(Placed::view))
        .d_gate(d_g.as_ref().map(Placed::view))
        .d_weight(d_weight.as_ref().map(Placed::view))
        .d_bias(d_bias.as_ref().map(Placed::view));
    let mut scratch = Scratch::new(gpu.device(), norm.backward_scratch_size(&call)?)?;
    gpu.submit(|e| norm.backward(e, &call, &mut scratch))?;
    let gradients = [("d_x", &d_x), ("d_g", &d_g), ("d_weight", &d_weight), ("d_bias", &d_bias)];
    let [x, g, weight, bias] = gradients.map(|(name, placed)| (name, placed.as_ref()));
    computed(gpu, [("o", Some(&out)), x, g, weight, bias])
}
