//! Gradients against Burn's composed attention, and of a model against differences.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::module::attention_fallback;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Tensor};
use wgpu_attention::mask::ScoreMod;
use wgpu_attention_burn::{Attend, CapturedTensor, Error, Mask, attention};

use crate::support::{assert_close, device, read, tensor};

const SHAPE: [usize; 4] = [2, 3, 21, 16];

fn leaves(device: &Device) -> [Tensor<4>; 4] {
    let [q, k, v] = [1, 2, 3].map(|seed| tensor(seed, SHAPE, device).require_grad());
    [q, k, v, tensor(4, [2, 3, 21, 21], device).require_grad()]
}

/// A loss with a gradient that differs for each element.
fn loss(out: Tensor<4>) -> Tensor<1> {
    let weights = tensor::<4>(5, out.dims(), &out.device());
    (out * weights).sum()
}

fn check(options: AttentionModuleOptions, device: &Device) {
    let own = leaves(device);
    let [q, k, v, bias] = own.clone();
    let own_grads = loss(attention_fallback(q, k, v, None, Some(bias), options)).backward();
    let ours = leaves(device);
    let [q, k, v, bias] = ours.clone();
    let our_grads = loss(attention(q, k, v, None, Some(bias), options).unwrap()).backward();
    for (ours, own) in ours.iter().zip(&own) {
        assert_close(ours.grad(&our_grads).unwrap(), own.grad(&own_grads).unwrap(), 5e-5);
    }
}

#[test]
fn gradients_match_burns() {
    check(AttentionModuleOptions::default(), &device().autodiff());
    let options = AttentionModuleOptions { scale: Some(0.4), softcap: Some(1.5), is_causal: true };
    check(options, &device().autodiff());
}

#[test]
fn gradients_with_checkpointing_match_burns() {
    check(AttentionModuleOptions::default(), &device().autodiff().gradient_checkpointing());
}

#[test]
fn shared_input_gets_summed_gradient() {
    let device = device().autodiff();
    let [own, ours] = [(); 2].map(|()| tensor::<4>(6, SHAPE, &device).require_grad());
    let composed = attention_fallback(own.clone(), own.clone(), own.clone(), None, None, Default::default());
    let own_grads = loss(composed).backward();
    let out = attention(ours.clone(), ours.clone(), ours.clone(), None, None, Default::default()).unwrap();
    let our_grads = loss(out).backward();
    assert_close(ours.grad(&our_grads).unwrap(), own.grad(&own_grads).unwrap(), 1e-4);
}

#[test]
fn constants_get_no_gradient() {
    let tracking = device().autodiff();
    let q = tensor::<4>(1, SHAPE, &tracking).require_grad();
    let constant = tensor::<4>(2, SHAPE, &tracking);
    let plain = tensor::<4>(3, SHAPE, &device());
    let out = attention(q.clone(), constant.clone(), plain, None, None, Default::default()).unwrap();
    let grads = loss(out).backward();
    assert!(q.grad(&grads).is_some());
    assert!(constant.grad(&grads).is_none());
}

#[test]
fn captured_and_sinks_have_gradients() {
    let device = device().autodiff();
    let text = "fn score_mod(score: f32, at: At) -> f32 { return score * gain_at(0u, at.head, 0u, 0u); }";
    let function = ScoreMod::capturing(text, &[wgpu_attention::mask::Captured::float("gain")]).unwrap();
    let [q, k, v, _] = leaves(&device);
    let gain = (tensor::<4>(7, [1, 3, 1, 1], &device) + 2.0).detach().require_grad();
    let sinks = tensor::<4>(8, [1, 3, 1, 1], &device).require_grad();
    let out = Attend::new(q.clone(), k.clone(), v.clone())
        .score_mod(function, vec![CapturedTensor::Float(gain.clone())], &[])
        .mask(Mask::none().sink_logits(sinks.clone()))
        .forward()
        .unwrap();
    let ours = loss(out).backward();
    // The same by Burn's operations.
    let scores = q.clone().matmul(k.clone().transpose()) / 4.0 * gain.clone();
    let with_sink = Tensor::cat(vec![scores, sinks.clone().expand([2, 3, 21, 1])], 3);
    let weights = burn::tensor::activation::softmax(with_sink, 3).narrow(3, 0, 21);
    let own = loss(weights.matmul(v.clone())).backward();
    for leaf in [&q, &k, &v, &gain, &sinks] {
        assert_close(leaf.grad(&ours).unwrap(), leaf.grad(&own).unwrap(), 1e-4);
    }
}

#[test]
fn nondifferentiable_function_is_error() {
    let device = device().autodiff();
    let [q, k, v, _] = leaves(&device);
    let text = "fn score_mod(score: f32, at: At) -> f32 { return f32(bitcast<i32>(score)); }";
    let result = ScoreMod::new(text)
        .map_err(Error::from)
        .and_then(|f| Attend::new(q, k, v).score_mod(f, Vec::new(), &[]).forward());
    assert!(matches!(result, Err(Error::Attention(_))), "{result:?}");
}

/// Two layers of projection and attention, with a sum between them.
#[derive(Module, Debug)]
struct Model {
    layers: Vec<Linear>,
}

impl Model {
    fn new(device: &Device) -> Self {
        let mut layers = Vec::new();
        for seed in 0..2 {
            let mut linear = LinearConfig::new(8, 24).with_bias(false).init(device);
            linear.weight = burn::module::Param::from_tensor(tensor::<2>(20 + seed, [8, 24], device));
            layers.push(linear);
        }
        Model { layers }
    }

    fn loss(&self, x: Tensor<3>) -> Tensor<1> {
        let mut x = x;
        for layer in &self.layers {
            let [b, l, _] = x.dims();
            let heads = layer.forward(x.clone()).reshape([b, l, 6, 4]).swap_dims(1, 2);
            let [q, k, v] = [0, 2, 4].map(|n| heads.clone().narrow(1, n, 2));
            let out = Attend::new(q, k, v).mask(Mask::causal()).forward().unwrap();
            x = x + out.swap_dims(1, 2).reshape([b, l, 8]).tanh();
        }
        (x.clone() * x).sum()
    }
}

#[test]
fn model_gradients_match_differences() {
    let tracking = device().autodiff();
    let model = Model::new(&tracking);
    let x = tensor::<3>(30, [2, 5, 8], &tracking);
    let grads = model.loss(x.clone()).backward();
    let plain = device();
    let x = x.inner();
    for (n, layer) in model.layers.iter().enumerate() {
        let gradient = read(layer.weight.val().grad(&grads).unwrap());
        // The derivative along one direction, by central differences.
        let direction = tensor::<2>(40 + n as u64, [8, 24], &plain);
        let along = |step: f32| {
            let mut moved = Model::new(&plain);
            let weight = moved.layers[n].weight.val() + direction.clone() * step;
            moved.layers[n].weight = burn::module::Param::from_tensor(weight);
            moved.loss(x.clone()).into_scalar::<f32>()
        };
        let step = 4e-3;
        let difference = f64::from(along(step) - along(-step)) / f64::from(2.0 * step);
        let dot: f64 = gradient.iter().zip(read(direction)).map(|(a, b)| f64::from(*a) * f64::from(b)).sum();
        assert!(
            (dot - difference).abs() < 5e-3 * dot.abs().max(1.0),
            "layer {n}: {dot}, expected {difference}"
        );
    }
}
