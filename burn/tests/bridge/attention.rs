//! Forward attention: dtypes, masks, strides, shared buffers, functions of scores, errors.

use burn::tensor::module::attention_fallback;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Int, Tensor};
use wgpu_attention::mask::{HostMask, MaskMod, ScoreMod};
use wgpu_attention::reference::{self, Options};
use wgpu_attention::{HostTensor, Shape};
use wgpu_attention_burn::{Attend, CapturedTensor, Error, Mask, attention};

use crate::support::{assert_close, assert_values, device, numbers, read, tensor};

const Q: [usize; 4] = [2, 6, 33, 24];
const K: [usize; 4] = [2, 2, 47, 24];
const V: [usize; 4] = [2, 2, 47, 40];

fn inputs() -> [Tensor<4>; 3] {
    let device = device();
    [tensor(1, Q, &device), tensor(2, K, &device), tensor(3, V, &device)]
}

/// The reference's result for [`inputs`].
fn expected(mask: HostMask) -> Vec<f32> {
    let [q, k, v] = [(1, Q), (2, K), (3, V)].map(|(seed, shape)| numbers(seed, shape.iter().product()));
    let shape = Shape { batch: 2, heads: 6, kv_heads: 2, q_len: 33, kv_len: 47, head_dim: 24, value_dim: 40 };
    let [q, k, v] = [&q, &k, &v].map(|x| reference::widen::<f64>(x));
    let options = Options::new().mask(mask);
    let out = reference::attention(&q, &k, &v, shape, &options).expect("a valid call").out;
    out.into_iter().map(|x| x as f32).collect()
}

#[test]
fn grouped_heads_match_reference() {
    let [q, k, v] = inputs();
    assert_values(&read(Attend::new(q, k, v).forward().unwrap()), &expected(HostMask::none()), 2e-5);
}

#[test]
fn arguments_match_burns_meaning() {
    let device = device();
    let shape = [2, 3, 20, 16];
    let [q, k, v] = [1, 2, 3].map(|seed| tensor(seed, shape, &device));
    let hidden = tensor::<4>(4, [2, 1, 20, 20], &device).greater_elem(0.5);
    let bias = tensor(5, [2, 3, 20, 20], &device);
    let options = AttentionModuleOptions { scale: Some(0.3), softcap: Some(2.0), is_causal: false };
    let call = |f: &dyn Fn(
        Tensor<4>,
        Tensor<4>,
        Tensor<4>,
        Option<Tensor<4, Bool>>,
        Option<Tensor<4>>,
    ) -> Tensor<4>| {
        f(q.clone(), k.clone(), v.clone(), Some(hidden.clone().expand([2, 3, 20, 20])), Some(bias.clone()))
    };
    let own = call(&|q, k, v, mask, bias| attention_fallback(q, k, v, mask, bias, options));
    let ours = call(&|q, k, v, mask, bias| attention(q, k, v, mask, bias, options).unwrap());
    assert_close(ours, own, 2e-5);
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
    let own = attention_fallback(q.clone(), k.clone(), v.clone(), None, None, options);
    assert_close(attention(q, k, v, None, None, options).unwrap(), own, 2e-5);
}

#[test]
fn masks_match_reference() {
    let device = device();
    let lengths = [40u32, 21];
    let seen: Vec<bool> = numbers(7, 2 * 33 * 47).into_iter().map(|x| x > -0.7).collect();
    let keys: Vec<bool> = numbers(8, 47).into_iter().map(|x| x > -0.8).collect();
    let bias = numbers(9, 6 * 33 * 47);
    let slopes = numbers(10, 6);
    let host = HostMask::causal()
        .window(30, 0)
        .lengths(HostTensor::new(&lengths, [2, 1, 1, 1]))
        .attn_mask(HostTensor::new(&seen, [2, 1, 33, 47]))
        .key_padding_mask(HostTensor::new(&keys, [1, 1, 1, 47]))
        .bias(HostTensor::new(&bias, [1, 6, 33, 47]))
        .alibi(HostTensor::new(&slopes, [1, 6, 1, 1]));
    let bools = |data: &[bool], shape: [usize; 4]| Tensor::<1, Bool>::from_bool(data, &device).reshape(shape);
    let mask = Mask::causal()
        .window(30, 0)
        .lengths(Tensor::<1, Int>::from_ints([40, 21], &device).reshape([2, 1, 1, 1]))
        .attn_mask(bools(&seen, [2, 1, 33, 47]))
        .key_padding_mask(bools(&keys, [1, 1, 1, 47]))
        .bias(tensor(9, [1, 6, 33, 47], &device))
        .alibi(tensor(10, [1, 6, 1, 1], &device));
    let [q, k, v] = inputs();
    assert_values(&read(Attend::new(q, k, v).mask(mask).forward().unwrap()), &expected(host), 2e-5);
}

#[test]
fn half_types_match_f32() {
    let [q, k, v] = inputs();
    let full = Attend::new(q.clone(), k.clone(), v.clone()).mask(Mask::causal()).forward().unwrap();
    for (dtype, tolerance) in [(DType::F16, 2e-3), (DType::BF16, 2e-2)] {
        if !device().supports_dtype(dtype) {
            println!("{dtype:?}: not supported here");
            continue;
        }
        let [q, k, v] = [&q, &k, &v].map(|t| t.clone().cast(dtype));
        let out = Attend::new(q, k, v).mask(Mask::causal()).forward().unwrap();
        assert_eq!(out.dtype(), dtype);
        assert_close(out.cast(DType::F32), full.clone(), tolerance);
    }
}

#[test]
fn strided_tensors_match_contiguous_ones() {
    let device = device();
    let packed = tensor::<4>(11, [2, 20, 3 * 4, 16], &device);
    let parts = packed.clone().swap_dims(1, 2).chunk(3, 1);
    let [q, k, v] = <[Tensor<4>; 3]>::try_from(parts).unwrap();
    let own = attention_fallback(q.clone(), k.clone(), v.clone(), None, None, Default::default());
    assert_close(attention(q, k, v, None, None, Default::default()).unwrap(), own, 2e-5);
    // One head of keys, expanded with a stride of 0.
    let q = tensor::<4>(12, [2, 4, 9, 16], &device);
    let one = tensor::<4>(13, [2, 1, 9, 16], &device);
    let all = one.clone().expand([2, 4, 9, 16]);
    let own = attention_fallback(q.clone(), all.clone(), all.clone(), None, None, Default::default());
    assert_close(attention(q, all.clone(), all, None, None, Default::default()).unwrap(), own, 2e-5);
}

#[test]
fn queued_operations_run_first() {
    let device = device();
    let x = tensor::<4>(14, [1, 2, 12, 16], &device);
    let call = |x: Tensor<4>| {
        // Fused operations before and behind the call.
        let q = (x.clone() * 2.0 + 1.0).sin();
        let k = (x.clone() - 0.5).cos();
        (q, k, x * 3.0)
    };
    for _ in 0..3 {
        let (q, k, v) = call(x.clone());
        let out = attention(q, k, v, None, None, Default::default()).unwrap();
        let after = (out * 0.5 + 2.0).exp();
        let (q, k, v) = call(x.clone());
        let own = attention_fallback(q, k, v, None, None, Default::default());
        assert_close(after, (own * 0.5 + 2.0).exp(), 2e-4);
    }
}

#[test]
fn functions_of_scores_read_tensors() {
    let device = device();
    let [q, k, v] = inputs();
    let text =
        "fn score_mod(score: f32, at: At) -> f32 { return score + table_at(0u, at.head, 0u, at.key); }";
    let captured = [wgpu_attention::mask::Captured::float("table")];
    let score = ScoreMod::capturing(text, &captured).unwrap();
    let pairs = MaskMod::new("fn mask_mod(at: At) -> bool { return at.key % 3u != 1u; }").unwrap();
    let table = tensor::<4>(15, [1, 6, 1, 47], &device);
    let by_function = Attend::new(q.clone(), k.clone(), v.clone())
        .score_mod(score, vec![CapturedTensor::Float(table.clone())], &[])
        .mask_mod(pairs, Vec::new(), &[])
        .forward()
        .unwrap();
    let seen: Vec<bool> = (0..47).map(|key| key % 3 != 1).collect();
    let seen = Tensor::<1, Bool>::from_bool(seen.as_slice(), &device).reshape([1, 1, 1, 47]);
    let by_mask = Attend::new(q, k, v).mask(Mask::none().bias(table).attn_mask(seen)).forward().unwrap();
    assert_close(by_function, by_mask, 2e-5);
}

#[test]
fn lse_matches_reference() {
    let device = device();
    let [q, k] = [1, 2].map(|seed| tensor::<4>(seed, [1, 2, 7, 8], &device));
    let scores = q.clone().matmul(k.clone().transpose()) / 8f32.sqrt();
    let own = scores.exp().sum_dim(3).log();
    let (_, lse) = Attend::new(q, k.clone(), k).forward_with_lse().unwrap();
    assert_close(lse, own, 1e-5);
}

#[test]
fn wrong_tensors_are_named() {
    let device = device();
    let [q, k, v] = inputs();
    let short = k.clone().narrow(3, 0, 20);
    let error = Attend::new(q.clone(), short, v.clone()).forward().unwrap_err().to_string();
    assert!(error.starts_with("`k`: dim must be 24, got 20"), "{error}");
    let error =
        Attend::new(q.clone(), k.clone(), v.clone().narrow(2, 0, 40)).forward().unwrap_err().to_string();
    assert!(error.starts_with("`v`: length must be 47, got 40"), "{error}");
    let bias = tensor(1, [2, 6, 33, 46], &device);
    let error =
        Attend::new(q.clone(), k.clone(), v.clone()).mask(Mask::none().bias(bias)).forward().unwrap_err();
    assert!(error.to_string().starts_with("`bias`"), "{error}");
    if device.supports_dtype(DType::F16) {
        let error = Attend::new(q, k.cast(DType::F16), v).forward().unwrap_err();
        assert!(
            matches!(error, Error::Attention(wgpu_attention::Error::Type { tensor: "k", .. })),
            "{error}"
        );
    }
}
