//! `minilm`: the first layer's attention of a real sentence encoder, from its stored projections.

use wgpu_attention::Shape;
use wgpu_attention::reference::compare::Tolerance;
use wgpu_attention::reference::split_heads;

use crate::harness::{Case, Expected, HostData, Report, Vector};
use crate::peers::sdpa::check_reference;

pub const FAMILY: &str = "minilm";
pub const NAMES: &[&str] = &["minilm_sentences"];

fn case(name: &str) -> Case {
    let vector = Vector::load(FAMILY, name);
    let heads = vector.size("num_heads");
    let [_, batch, length, width] = vector.shape4("l0.q");
    let dim = width / heads;
    let mut case = Case::random(name, Shape::new(batch, heads, length, dim));
    let split = |x: &[f32]| split_heads(x, length, heads, dim).expect("it fits");
    case.q = split(&vector.f32("l0.q"));
    case.k = split(&vector.f32("l0.k"));
    case.v = split(&vector.f32("l0.v"));
    let real = vector.bools("key_mask").data;
    case.rules.key_padding_mask = Some(HostData::new(real.clone(), [batch, 1, 1, length]));
    // The vector has zeros for padding queries: such a query sees no key.
    case.rules.attn_mask = Some(HostData::new(real, [batch, 1, length, 1]));
    let heads_of = |(want, tolerance): (Vec<f64>, Tolerance)| {
        let want = split_heads(&want, length, heads, dim).expect("it fits");
        (want, tolerance)
    };
    case.expected = Expected {
        out: vector.expected("l0.context").map(heads_of),
        weights: vector.expected("l0.weights"),
        ..Default::default()
    };
    case
}

#[test]
fn reference_matches_vector() {
    NAMES.iter().for_each(|name| check_reference(&case(name)));
}

#[test]
fn every_device_matches_vector() {
    let mut report = Report::new("minilm");
    NAMES.iter().for_each(|name| report.check(&case(name)));
    report.finish();
}
