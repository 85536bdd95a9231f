//! The layer against Burn's `MultiHeadAttention`: results, gradients, records.

use burn::module::Module;
use burn::nn::attention::{MhaInput as BurnInput, MultiHeadAttentionConfig};
use burn::tensor::{Bool, Device, Tensor};
use wgpu_attention_burn::{MhaInput, MultiHeadAttention};

use crate::support::{assert_close, device, numbers, tensor};

const WIDTH: usize = 24;

fn config() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(WIDTH, 3).with_dropout(0.0)
}

fn masks(device: &Device) -> (Tensor<2, Bool>, Tensor<3, Bool>) {
    let padding: Vec<bool> = (0..2 * 11).map(|n| n % 11 >= 9 - n / 11).collect();
    // The first key is always seen.
    let hidden: Vec<bool> =
        numbers(3, 2 * 11 * 11).into_iter().enumerate().map(|(n, x)| x > 0.4 && n % 11 != 0).collect();
    let bools = |data: &[bool]| Tensor::<1, Bool>::from_bool(data, device);
    (bools(&padding).reshape([2, 11]), bools(&hidden).reshape([2, 11, 11]))
}

#[test]
fn layer_matches_burns() {
    let device = device();
    for config in [config(), config().with_quiet_softmax(true), config().with_key_bias(false)] {
        let burn = config.init(&device);
        let layer = MultiHeadAttention::from(burn.clone());
        let x = tensor(1, [2, 11, WIDTH], &device);
        let (padding, hidden) = masks(&device);
        let own =
            burn.forward(BurnInput::self_attn(x.clone()).mask_pad(padding.clone()).mask_attn(hidden.clone()));
        let input = MhaInput::self_attn(x).mask_pad(padding).mask_attn(hidden);
        let ours = layer.forward_with_weights(input.clone()).unwrap();
        assert_close(ours.weights, own.weights, 2e-5);
        assert_close(ours.context, own.context.clone(), 2e-5);
        assert_close(layer.forward(input).unwrap(), own.context, 2e-5);
    }
}

#[test]
fn cross_attention_matches_burns() {
    let device = device();
    let burn = config().init(&device);
    let layer = MultiHeadAttention::from(burn.clone());
    let [q, k, v] = [(1, 5), (2, 9), (3, 9)].map(|(seed, n)| tensor(seed, [2, n, WIDTH], &device));
    let own = burn.forward(BurnInput::new(q.clone(), k.clone(), v.clone())).context;
    assert_close(layer.forward(MhaInput::new(q, k, v)).unwrap(), own, 2e-5);
}

#[test]
fn layer_gradients_match_burns() {
    let device = device().autodiff();
    let burn = config().init(&device);
    let layer = MultiHeadAttention::from(burn.clone());
    let weights = tensor::<3>(4, [2, 11, WIDTH], &device);
    for crossed in [false, true] {
        let x = tensor::<3>(1, [2, 11, WIDTH], &device).require_grad();
        let y = tensor::<3>(2, [2, 11, WIDTH], &device).require_grad();
        let own = if crossed {
            burn.forward(BurnInput::new(x.clone(), y.clone(), y.clone())).context
        } else {
            burn.forward(BurnInput::self_attn(x.clone())).context
        };
        let own = (own * weights.clone()).sum().backward();
        let input = if crossed {
            MhaInput::new(x.clone(), y.clone(), y.clone())
        } else {
            MhaInput::self_attn(x.clone())
        };
        let ours = (layer.forward(input).unwrap() * weights.clone()).sum().backward();
        assert_close(x.grad(&ours).unwrap(), x.grad(&own).unwrap(), 1e-4);
        if crossed {
            assert_close(y.grad(&ours).unwrap(), y.grad(&own).unwrap(), 1e-4);
        }
        let pairs = [
            (&layer.query, &burn.query),
            (&layer.key, &burn.key),
            (&layer.value, &burn.value),
            (&layer.output, &burn.output),
        ];
        for (ours_linear, own_linear) in pairs {
            let [a, b] = [ours_linear.weight.val().grad(&ours), own_linear.weight.val().grad(&own)];
            assert_close(a.unwrap(), b.unwrap(), 1e-4);
            let [a, b] =
                [&ours_linear.bias, &own_linear.bias].map(|bias| bias.as_ref().expect("a bias").val());
            assert_close(a.grad(&ours).unwrap(), b.grad(&own).unwrap(), 1e-4);
        }
    }
}

#[test]
fn burns_record_loads() {
    let device = device();
    let [trained, other] = [(); 2].map(|()| config().init(&device));
    let x = tensor::<3>(1, [1, 7, WIDTH], &device);
    let own = trained.forward(BurnInput::self_attn(x.clone())).context;
    let layer = MultiHeadAttention::from(other).load_record(trained.into_record());
    assert_close(layer.forward(MhaInput::self_attn(x)).unwrap(), own, 2e-5);
}

#[test]
fn dropout_acts_in_training_alone() {
    let plain = device();
    let burn = MultiHeadAttentionConfig::new(WIDTH, 3).with_dropout(0.5).init(&plain);
    let x = tensor::<3>(1, [1, 7, WIDTH], &plain);
    let own = burn.forward(BurnInput::self_attn(x.clone())).context;
    let layer = MultiHeadAttention::from(burn);
    assert_close(layer.forward(MhaInput::self_attn(x.clone())).unwrap(), own, 2e-5);
    let tracking = plain.autodiff();
    let training = layer.fork(&tracking);
    let x = Tensor::from_inner(x);
    let [a, b] = [(); 2].map(|()| training.forward(MhaInput::self_attn(x.clone())).unwrap().inner());
    assert!((a - b).abs().max().into_scalar::<f32>() > 1e-3);
}
