//! Linear attention against Burn's operations.

use burn::tensor::{Bool, Tensor};
use wgpu_attention_burn::{Error, LinearAttend};

use crate::support::{assert_close, device, tensor};

const SHAPE: [usize; 4] = [2, 3, 19, 8];

fn elu_plus_one(x: Tensor<4>) -> Tensor<4> {
    let negative = x.clone().lower_elem(0.0);
    let exp = x.clone().clamp_max(0.0).exp();
    (x + 1.0).mask_where(negative, exp)
}

/// φ(q) (φ(k)ᵀ v) / φ(q) Σ φ(k), with or without later keys.
fn composed(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, causal: bool) -> Tensor<4> {
    let mut weights = elu_plus_one(q).matmul(elu_plus_one(k).transpose());
    if causal {
        let [.., queries, keys] = weights.dims();
        let hidden = Tensor::<2, Bool>::tril_mask([queries, keys], 0, &weights.device())
            .reshape([1, 1, queries, keys]);
        weights = weights.mask_fill(hidden.expand([2, 3, 19, 19]), 0.0);
    }
    let norm = weights.clone().sum_dim(3) + 1e-6;
    weights.matmul(v) / norm
}

#[test]
fn results_and_gradients_match_burns() {
    let device = device().autodiff();
    for causal in [false, true] {
        let leaves = [1, 2, 3].map(|seed| tensor::<4>(seed, SHAPE, &device).require_grad());
        let weights = tensor::<4>(4, SHAPE, &device);
        let [q, k, v] = leaves.clone();
        let configure =
            if causal { |c: wgpu_attention::linear_attention::LinearConfig| c.causal(true) } else { |c| c };
        let ours = LinearAttend::new(q.clone(), k.clone(), v.clone()).configure(configure).forward().unwrap();
        let own = composed(q, k, v, causal);
        assert_close(ours.clone().inner(), own.clone().inner(), 2e-5);
        let ours = (ours * weights.clone()).sum().backward();
        let own = (own * weights).sum().backward();
        for leaf in &leaves {
            assert_close(leaf.grad(&ours).unwrap(), leaf.grad(&own).unwrap(), 1e-4);
        }
    }
}

#[test]
fn masked_keys_do_not_count() {
    let device = device();
    let [q, k, v] = [1, 2, 3].map(|seed| tensor::<4>(seed, SHAPE, &device));
    let seen: Vec<bool> = (0..19).map(|key| key < 13).collect();
    let seen = Tensor::<1, Bool>::from_bool(seen.as_slice(), &device).reshape([1, 1, 1, 19]);
    let ours = LinearAttend::new(q.clone(), k.clone(), v.clone()).key_mask(seen).forward().unwrap();
    let own = composed(q, k.narrow(2, 0, 13), v.narrow(2, 0, 13), false);
    assert_close(ours, own, 2e-5);
}

#[test]
fn tracked_decay_is_an_error() {
    let device = device().autodiff();
    let [q, k, v] = [1, 2, 3].map(|seed| tensor::<4>(seed, SHAPE, &device));
    let decay = tensor::<4>(5, [2, 3, 19, 1], &device).require_grad();
    let call = LinearAttend::new(q, k, v).decay(decay);
    assert!(matches!(call.forward(), Err(Error::Unsupported { .. })));
}
