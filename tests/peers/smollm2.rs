//! `smollm2`: the first layer's attention of a decoder with three query heads to a key head. It
//! starts from stored rotated queries and keys. The example `examples/chat`, which has the model,
//! uses the other vectors.

use wgpu_attention::Shape;
use wgpu_attention::reference::compare::Tolerance;
use wgpu_attention::reference::split_heads;

use crate::harness::{Case, Expected, Report, Vector};
use crate::peers::sdpa::check_reference;

pub const FAMILY: &str = "smollm2";
const FIRST_LAYER: &str = "smollm2_plain_short";
/// `examples/chat/src/tests.rs` names all of them.
pub const NAMES: &[&str] = &[FIRST_LAYER, "smollm2_chat", "smollm2_plain_long"];

fn case() -> Case {
    let vector = Vector::load(FAMILY, FIRST_LAYER);
    let (heads, kv_heads, dim) = (vector.size("num_heads"), vector.size("kv_heads"), vector.size("head_dim"));
    let length = vector.shape("l0.q")[0];
    let mut case = Case::random(FIRST_LAYER, Shape { kv_heads, ..Shape::new(1, heads, length, dim) });
    let split = |name, heads| split_heads(&vector.f32(name), length, heads, dim).expect("it fits");
    case.q = split("l0.q", heads);
    case.k = split("l0.k", kv_heads);
    case.v = split("l0.v", kv_heads);
    case.rules.causal = true;
    let heads_of = |(want, tolerance): (Vec<f64>, Tolerance)| {
        (split_heads(&want, length, heads, dim).expect("it fits"), tolerance)
    };
    case.expected = Expected { out: vector.expected("l0.context").map(heads_of), ..Default::default() };
    case
}

#[test]
fn reference_matches_vector() {
    check_reference(&case());
}

#[test]
fn every_device_matches_vector() {
    let mut report = Report::new("smollm2");
    report.check(&case());
    report.finish();
}

/// The example's tests compare with every vector of this family.
#[test]
fn the_example_names_every_vector() {
    let tests = crate::harness::root().join("examples/chat/src/tests.rs");
    let text = std::fs::read_to_string(tests).expect("the example's tests");
    assert!(NAMES.iter().all(|name| text.contains(&format!("\"{name}\""))));
}
