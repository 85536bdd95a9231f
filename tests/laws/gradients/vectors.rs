//! Gradients from PyTorch.

use wgpu_attention::reference;
use wgpu_attention::reference::compare::compare;
use wgpu_attention::reference::widen;

use crate::harness::gradients::LayerProblem;
use crate::harness::{Case, Vector};
use crate::ops::layers::mha;
use crate::ops::mask::flex;
use crate::ops::mask::patterns;
use crate::peers::sdpa;

/// Checks that the reference in f64 gives the vector's results, by the vectors' pass rule.
fn check(vector: &Vector, case: &Case) {
    let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| widen::<f64>(x));
    let got =
        reference::attention_backward(&q, &k, &v, &vector.f64("dout"), None, case.shape, &case.options())
            .expect("the vector fits the reference");
    let all = [("dq", Some(got.d_q)), ("dk", Some(got.d_k)), ("dv", Some(got.d_v)), ("dbias", got.d_bias)];
    for (tensor, got) in all {
        let Some((want, tolerance)) = vector.expected(tensor) else {
            assert_eq!(tensor, "dbias", "{}: nothing to compare with", case.name);
            continue;
        };
        let got = got.unwrap_or_else(|| panic!("{}: no {tensor}", case.name));
        compare(&got, &want, tolerance).unwrap_or_else(|e| panic!("{}: {tensor}: {e}", case.name));
    }
}

fn with_gradients<'a>(family: &str, names: &[&'a str]) -> Vec<(&'a str, Vector)> {
    let all = names.iter().map(|name| (*name, Vector::load(family, name)));
    all.filter(|(_, vector)| vector.has("dout")).collect()
}

#[test]
fn reference_gradients_match_sdpa_vectors() {
    let vectors = with_gradients(sdpa::FAMILY, sdpa::NAMES);
    assert_eq!(vectors.len(), 8);
    assert!(vectors.iter().any(|(_, vector)| vector.has("dbias")));
    vectors.iter().for_each(|(name, vector)| check(vector, &sdpa::case(name)));
}

#[test]
fn reference_gradients_match_softcap_vector() {
    let vectors = with_gradients(flex::FAMILY, flex::NAMES);
    assert_eq!(vectors.len(), 1);
    vectors.iter().for_each(|(name, vector)| check(vector, &flex::case(name)));
}

#[test]
fn reference_gradients_match_pattern_vector() {
    let vectors = with_gradients(patterns::FAMILY, patterns::NAMES);
    assert_eq!(vectors.len(), 1);
    for (_, vector) in &vectors {
        check(vector, &patterns::dense(vector));
        check(vector, &patterns::ruled(vector));
    }
}

#[test]
fn reference_gradients_match_layer_vectors() {
    let vectors = with_gradients(mha::FAMILY, mha::NAMES);
    assert_eq!(vectors.len(), 2);
    for (name, vector) in &vectors {
        let problem = LayerProblem { case: mha::case(name), d_out: vector.f64("dout"), d_lse: None };
        let names = [("query", "q"), ("key", "k"), ("value", "v")];
        let inputs = problem.inputs();
        assert_eq!(inputs.len(), 11);
        for input in inputs {
            let tensor = names.iter().find(|(name, _)| *name == input.name).map_or(input.name, |(_, t)| t);
            let (want, tolerance) = vector.expected(&format!("d{tensor}")).expect("a gradient");
            compare(&input.gradient, &want, tolerance).unwrap_or_else(|e| panic!("{name}: {tensor}: {e}"));
        }
    }
}
