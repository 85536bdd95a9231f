//! Elements that get and give no gradient, NaN that must show, and exact results.

use wgpu_attention::reference::{Gradients, Options, Real, attention_backward};
use wgpu_attention::{Mask, Shape};

use super::attention::Draw;
use crate::harness::gradients::Problem;
use crate::harness::meaning::sees;
use crate::harness::{Case, HostData, Rng};

/// Returns all gradients, by name.
fn all(got: &Gradients<f64>) -> Vec<(&'static str, &[f64])> {
    let given = [("q", &got.d_q), ("k", &got.d_k), ("v", &got.d_v)].into_iter();
    let mask = [
        ("bias", &got.d_bias),
        ("slopes", &got.d_slopes),
        ("relative", &got.d_relative),
        ("sinks", &got.d_sinks),
    ];
    let mask = mask.into_iter().filter_map(|(name, x)| Some((name, x.as_ref()?)));
    given.chain(mask).map(|(name, x)| (name, &x[..])).collect()
}

/// NaN and infinity in hidden keys, or in queries without a key, change no gradient and have none.
#[test]
fn hidden_elements_have_no_gradient() {
    let (mut keys, mut values, mut queries) = (0, 0, 0);
    for seed in 0..3000 {
        let rng = &mut Rng::new(seed ^ 0x81dde);
        let draw = Draw::random(rng);
        let clean = draw.problem(&format!("hidden {seed}"));
        let (shape, weights) = (clean.case.shape, clean.weights());
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
        let masked = Shape { kv_len: kv_len - draw.appended, ..shape };
        let sees = |index: [usize; 4]| index[3] >= masked.kv_len || sees(&clean.case.rules, &masked, index);
        let garbage = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        let mut poisoned = clean.clone();
        let case = &mut poisoned.case;
        let mut none: Vec<(&str, usize)> = Vec::new();
        for row in 0..batch * kv_heads * kv_len {
            let (b, kv_head, j) = (row / kv_len / kv_heads, row / kv_len % kv_heads, row % kv_len);
            let group = heads / kv_heads;
            let queries =
                (kv_head * group..(kv_head + 1) * group).flat_map(|h| (0..q_len).map(move |i| [h, i]));
            let unseen = queries.clone().all(|[h, i]| !sees([b, h, i, j]));
            if unseen {
                case.k[row * head_dim..][..head_dim].fill(rng.pick(&garbage));
                none.extend((0..head_dim).map(|d| ("k", row * head_dim + d)));
                keys += 1;
            }
            let mut weights = queries.map(|[h, i]| weights[((b * heads + h) * q_len + i) * kv_len + j]);
            if weights.all(|w| w == 0.0) {
                case.v[row * value_dim..][..value_dim].fill(rng.pick(&garbage));
                none.extend((0..value_dim).map(|d| ("v", row * value_dim + d)));
                values += 1;
            }
        }
        for row in 0..batch * heads * q_len {
            let (b, h, i) = (row / q_len / heads, row / q_len % heads, row % q_len);
            if (0..kv_len).all(|j| !sees([b, h, i, j])) {
                case.q[row * head_dim..][..head_dim].fill(rng.pick(&garbage));
                poisoned.d_out[row * value_dim..][..value_dim].fill(f64::from(rng.pick(&garbage)));
                none.extend((0..head_dim).map(|d| ("q", row * head_dim + d)));
                queries += 1;
            }
        }
        let (want, got) = (clean.gradients(), poisoned.gradients());
        for ((name, want), (_, got)) in all(&want).into_iter().zip(all(&got)) {
            assert!(want.iter().all(|x| x.is_finite()), "{}: {name}: {want:?}", clean.case.name);
            assert!(want == got, "{}: {name}: {want:?}, poisoned {got:?}", clean.case.name);
            let zero = none.iter().filter(|(of, _)| *of == name).all(|(_, n)| got[*n] == 0.0);
            assert!(zero, "{}: {name}: {got:?} at {none:?}", clean.case.name);
        }
    }
    assert!(keys > 100 && values > keys && queries > 100, "{keys} keys, {values} values, {queries} queries");
}

/// A causal problem of one head, 4 queries and keys.
fn causal() -> Problem {
    let case = Case::random("gradients, causal", Shape::new(1, 1, 4, 2)).with(|c| c.rules.causal = true);
    Problem::new(case, 0, true)
}

/// Returns the rows of `dim` elements that contain a NaN.
fn nan_rows(x: &[f64], dim: usize) -> Vec<usize> {
    let rows = x.chunks_exact(dim).enumerate();
    rows.filter(|(_, row)| row.iter().any(|x| x.is_nan())).map(|(n, _)| n).collect()
}

#[test]
fn visible_nan_reaches_gradients() {
    let rows = |problem: &Problem| {
        let got = problem.gradients();
        [got.d_q, got.d_k, got.d_v].map(|x| nan_rows(&x, 2))
    };
    let mut d_out = causal();
    d_out.d_out[2] = f64::NAN; // query 1, which sees keys 0 and 1
    assert_eq!(rows(&d_out), [vec![1], vec![0, 1], vec![0, 1]]);
    let mut d_lse = causal();
    d_lse.d_lse.as_mut().expect("asked for")[2] = f64::NAN;
    assert_eq!(rows(&d_lse), [vec![2], vec![0, 1, 2], vec![]]);
    let mut values = causal();
    values.case.v[4] = f32::NAN; // key 2, which queries 2 and 3 see
    assert_eq!(rows(&values), [vec![2, 3], vec![0, 1, 2, 3], vec![]]);
    let mut keys = causal();
    keys.case.k[6] = f32::NAN; // key 3, which query 3 sees
    assert_eq!(rows(&keys), [vec![3], vec![0, 1, 2, 3], vec![0, 1, 2, 3]]);
}

/// Two equal scores of 10⁴ and one of −10⁴ with weight zero: exact in f32, too.
fn large<R: Real>() {
    let of = |x: &[f64]| x.iter().map(|x| R::of(*x)).collect::<Vec<_>>();
    let shape = Shape { kv_len: 3, ..Shape::new(1, 1, 1, 1) };
    let (q, k, v) = (of(&[100.0]), of(&[100.0, 100.0, -100.0]), of(&[1.0, 3.0, 7.0]));
    let of_lse = |d_lse: Option<&[R]>| {
        let options = Options::new().scale(1.0);
        attention_backward(&q, &k, &v, &of(&[1.0]), d_lse, shape, &options).expect("it fits")
    };
    let got = of_lse(None);
    assert!(got.d_q == of(&[0.0]) && got.d_k == of(&[-50.0, 50.0, 0.0]) && got.d_v == of(&[0.5, 0.5, 0.0]));
    let got = of_lse(Some(&of(&[2.0])));
    assert!(got.d_q == of(&[200.0]) && got.d_k == of(&[50.0, 150.0, 0.0]), "{:?}", got.d_q[0].f64());
}

#[test]
fn large_scores_are_exact() {
    large::<f64>();
    large::<f32>();
}

#[test]
fn one_key_has_the_whole_weight() {
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 3, kv_len: 1, head_dim: 2, value_dim: 3 };
    let case = Case::random("gradients, one key", shape);
    let mut got = Problem::new(case.clone(), 0, true);
    let d_lse = got.d_lse.take().expect("asked for");
    let alone = got.gradients();
    // 1 · (dP − 1 · dP) is zero to the bit.
    assert!(alone.d_q.iter().chain(&alone.d_k).all(|x| *x == 0.0));
    for (n, d_v) in alone.d_v.iter().enumerate() {
        let (head, d) = (n / 3, n % 3);
        let sum: f64 = (0..2 * 3).map(|row| got.d_out[(head * 2 * 3 + row) * 3 + d]).sum();
        assert!((d_v - sum).abs() < 1e-14);
    }
    got.d_lse = Some(d_lse.clone());
    let scale = f64::from(0.5f32.sqrt());
    for (n, d_q) in got.gradients().d_q.iter().enumerate() {
        let (row, d) = (n / 2, n % 2);
        let want = scale * d_lse[row] * f64::from(case.k[row / 6 * 2 + d]);
        assert!((d_q - want).abs() < 1e-14, "{d_q} {want}");
    }
}

/// The log-sum-exp of a query without a visible key is its head's sink.
#[test]
fn lone_sink_gets_lse_gradient() {
    let shape = Shape::new(1, 2, 2, 1);
    let case = Case::random("gradients, sink alone", shape).with(|c| {
        c.rules.sinks = Some(HostData::new(vec![0.5, f32::NEG_INFINITY], [1, 2, 1, 1]));
        c.rules.lengths = Some(HostData::new(vec![0, 2, 0, 2], [1, 2, 2, 1]));
    });
    let mut problem = Problem::new(case, 0, true);
    // Rows with a key would contribute, too. They are disabled here.
    problem.d_out.fill(f64::NAN);
    problem.d_out[1] = 0.0;
    problem.d_out[3] = 0.0;
    problem.d_lse = Some(vec![3.0, 0.0, f64::NAN, 0.0]);
    let got = problem.gradients();
    assert_eq!(got.d_sinks, Some(vec![3.0, 0.0]));
    assert!([got.d_q, got.d_k, got.d_v].iter().flatten().all(|x| *x == 0.0));
}

#[test]
fn wrong_lengths_are_errors() {
    let shape = Shape { value_dim: 3, ..Shape::new(1, 1, 2, 2) };
    let (x, v) = ([0.0; 4], [0.0; 6]);
    let refused = |d_out: &[f64], d_lse: Option<&[f64]>, words: [&str; 2]| {
        let error =
            attention_backward(&x, &x, &v, d_out, d_lse, shape, &Options::new()).expect_err("refused");
        assert!(words.iter().all(|w| error.to_string().contains(w)), "{error}");
    };
    refused(&[0.0; 4], None, ["d_out", "6"]);
    refused(&v, Some(&[0.0]), ["d_lse", "2"]);
    let mask =
        Options::new().mask(Mask::none().bias(wgpu_attention::HostTensor::new(&[0.0; 3], [1, 1, 1, 3])));
    assert!(attention_backward(&x, &x, &v, &v, None, shape, &mask).is_err());
}
