//! The tolerance of gradients in f32 permits sums in another order, and finds wrong terms.

use wgpu_attention::Shape;
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, compare};
use wgpu_attention::reference::{
    Gradients, Options, Real, attention_backward, attention_backward_magnitudes, widen,
};

use crate::harness::Rng;
use crate::harness::case::largest;

/// Returns the gradients of q, k and v in f64.
fn wide<R: Real>(got: &Gradients<R>) -> [Vec<f64>; 3] {
    [&got.d_q, &got.d_k, &got.d_v].map(|x| x.iter().map(|x| x.f64()).collect())
}

/// Returns the rows of `dim` in every head of `length` in reverse order.
fn backwards<R: Real>(x: &[R], length: usize, dim: usize) -> Vec<R> {
    x.chunks_exact(length * dim).flat_map(|head| head.chunks_exact(dim).rev().flatten()).copied().collect()
}

#[test]
fn reordered_sums_pass_wrong_terms_fail() {
    let mut wrong = [0; 3];
    for seed in 0..200 {
        let rng = &mut Rng::new(seed ^ 0x701);
        let kv_heads = rng.between(1, 2);
        let shape = Shape {
            batch: 1,
            heads: kv_heads * rng.between(1, 2),
            kv_heads,
            q_len: rng.between(1, 40),
            kv_len: rng.between(1, 40),
            head_dim: rng.between(1, 32),
            value_dim: rng.between(1, 32),
        };
        let mut normals = |shape: [usize; 4]| rng.normals(shape.iter().product());
        let (q, k, v) = (normals(shape.q()), normals(shape.k()), normals(shape.v()));
        let (d_out, d_lse) = (normals(shape.out()), normals(shape.lse()));
        let options = Options::new();
        let [wq, wk, wv, wd, wl] = [&q, &k, &v, &d_out, &d_lse].map(|x| widen::<f64>(x));
        let exact = attention_backward(&wq, &wk, &wv, &wd, Some(&wl), shape, &options).expect("it fits");
        let magnitudes =
            attention_backward_magnitudes(&wq, &wk, &wv, &wd, Some(&wl), shape, &options).expect("it fits");
        let naive = attention_backward(&q, &k, &v, &d_out, Some(&d_lse), shape, &options).expect("it fits");
        let without = attention_backward(&wq, &wk, &wv, &wd, None, shape, &options).expect("it fits");
        let Shape { q_len, kv_len, head_dim, value_dim, .. } = shape;
        let turned = attention_backward(
            &backwards(&q, q_len, head_dim),
            &backwards(&k, kv_len, head_dim),
            &backwards(&v, kv_len, value_dim),
            &backwards(&d_out, q_len, value_dim),
            Some(&backwards(&d_lse, q_len, 1)),
            shape,
            &options,
        )
        .expect("it fits");
        let [d_q, d_k, d_v] = wide(&turned);
        let turned = [
            backwards(&d_q, q_len, head_dim),
            backwards(&d_k, kv_len, head_dim),
            backwards(&d_v, kv_len, value_dim),
        ];
        let (exact, naive, magnitudes) = (wide(&exact), wide(&naive), wide(&magnitudes));
        let without = wide(&without);
        for n in 0..3 {
            assert!(exact[n].iter().zip(&magnitudes[n]).all(|(x, m)| x.abs() <= *m * (1.0 + 1e-12)));
            let magnitude = largest(magnitudes[n].iter().copied());
            let tolerance = Tolerance::gradient(&naive[n], &exact[n], magnitude, EPSILON_F32);
            assert!(tolerance.absolute < 1e-5 * magnitude, "{shape:?}: {tolerance:?}, {magnitude}");
            compare(&turned[n], &exact[n], tolerance).unwrap_or_else(|e| panic!("{shape:?}: {e}"));
            wrong[n] += usize::from(compare(&without[n], &exact[n], tolerance).is_err());
        }
    }
    // The log-sum-exp does not depend on the values.
    assert_eq!(wrong, [200, 200, 0]);
}
