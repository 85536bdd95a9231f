//! `d2l`: scaled dot-product and multi-head attention of Dive into Deep Learning.
//!
//! Their mask sets the scores of keys past `valid_lens` to −10⁶, so a length of 0 gives uniform
//! weights. Here a bias of −10⁶ on scores of 0 does that, as queries without a key give zeros. The
//! crate's lengths must give the same result if the length is not 0, and zeros if it is.

use wgpu_attention::Shape;
use wgpu_attention::reference::MultiHeadShape;
use wgpu_attention::reference::compare::{Tolerance, compare};

use crate::harness::layer::{LayerCase, LinearData};
use crate::harness::layer_options::LayerOptions;
use crate::harness::{Case, Expected, HostData, Report, Rules, Vector};
use crate::peers::sdpa::check_reference;

pub const FAMILY: &str = "d2l";
pub const DOT: &[&str] = &["d2l_dot_book", "d2l_dot_len_zero", "d2l_dot_lens_2d", "d2l_dot_random"];
pub const MULTIHEAD: &[&str] =
    &["d2l_multihead_book", "d2l_multihead_lens_2d", "d2l_multihead_ones", "d2l_multihead_random"];

/// The way in which a case states the lengths.
#[derive(Clone, Copy, PartialEq)]
enum By {
    Bias,
    Lengths,
}

/// Returns the length of every query, `[batch, q_len or 1]`.
fn lengths(vector: &Vector, batch: usize) -> HostData<u32> {
    let lens = vector.integers("valid_lens");
    let per_query = lens.len() / batch;
    HostData::new(lens.into_iter().map(|n| n as u32).collect(), [batch, 1, per_query, 1])
}

fn rules(by: By, lens: &HostData<u32>, mask_value: f32, q_len: usize, kv_len: usize) -> Rules {
    let batch = lens.shape[0];
    let bias = HostData::of([batch, 1, q_len, kv_len], |[b, _, i, j]| {
        let len = lens.host().at([b, 0, i, 0]).expect("a length");
        if j >= len as usize { mask_value } else { 0.0 }
    });
    match by {
        By::Bias => Rules { bias: Some(bias), ..Default::default() },
        By::Lengths => Rules { lengths: Some(lens.clone()), ..Default::default() },
    }
}

/// Sets the rows of queries of length 0 to zero. `x` is `[batch, heads, q_len, ..]`.
fn without_empty<T: Copy + Default>(x: &mut [T], lens: &HostData<u32>, heads: usize, q_len: usize) {
    let rows = lens.shape[0] * heads * q_len;
    let width = x.len() / rows;
    for (row, values) in x.chunks_exact_mut(width).enumerate() {
        if lens.host().at([row / q_len / heads, 0, row % q_len, 0]) == Some(0) {
            values.fill(T::default());
        }
    }
}

fn dot(name: &str, by: By) -> Case {
    let vector = Vector::load(FAMILY, name);
    let [_, batch, q_len, head_dim] = vector.shape4("q");
    let [_, _, kv_len, value_dim] = vector.shape4("v");
    let shape = Shape { batch, heads: 1, kv_heads: 1, q_len, kv_len, head_dim, value_dim };
    let lens = lengths(&vector, batch);
    let mask_value = vector.number("mask_value").expect("mask_value") as f32;
    let mut case = Case::random(name, shape);
    (case.q, case.k, case.v) = (vector.f32("q"), vector.f32("k"), vector.f32("v"));
    case.rules = rules(by, &lens, mask_value, q_len, kv_len);
    let own = |expected: Option<(Vec<f64>, Tolerance)>| {
        expected.map(|(mut want, tolerance)| {
            if by == By::Lengths {
                without_empty(&mut want, &lens, 1, q_len);
            }
            (want, tolerance)
        })
    };
    case.expected = Expected {
        out: own(vector.expected("out")),
        weights: own(vector.expected("weights")),
        ..Default::default()
    };
    match by {
        By::Bias => without_empty(&mut case.q, &lens, 1, q_len),
        By::Lengths => case.name += ", by lengths",
    }
    case
}

fn multihead(name: &str, by: By) -> LayerCase {
    let vector = Vector::load(FAMILY, name);
    let [_, batch, q_len, _] = vector.shape4("q");
    let kv_len = vector.shape4("k")[2];
    let lens = lengths(&vector, batch);
    assert!(lens.data.iter().all(|n| *n > 0), "{name}: an empty query needs a separate case");
    let mask_value = vector.number("mask_value").expect("mask_value") as f32;
    let inputs = ["q", "k", "v"].map(|t| vector.f32(t));
    LayerCase {
        name: format!("{name}{}", if by == By::Lengths { ", by lengths" } else { "" }),
        config: LayerOptions::new(vector.size("num_hiddens"), vector.size("num_heads")),
        shape: MultiHeadShape { batch, q_len, kv_len },
        one_input: inputs[0] == inputs[1] && inputs[0] == inputs[2],
        inputs,
        linears: ["w_q", "w_k", "w_v", "w_o"].map(|w| LinearData { weight: vector.f32(w), bias: None }),
        shared: false,
        appended: None,
        norms: Default::default(),
        gate: None,
        rotary: None,
        rules: rules(by, &lens, mask_value, q_len, kv_len),
        dropout: None,
        expected: Expected {
            out: vector.expected("out"),
            weights: vector.expected("weights"),
            ..Default::default()
        },
    }
}

const WAYS: [By; 2] = [By::Bias, By::Lengths];

#[test]
fn reference_matches_vectors() {
    for by in WAYS {
        DOT.iter().for_each(|name| check_reference(&dot(name, by)));
        for case in MULTIHEAD.iter().map(|name| multihead(name, by)) {
            let got = case.exact();
            let weights = got.weights.as_ref().expect("asked for");
            let all = [("out", &got.out, &case.expected.out), ("weights", weights, &case.expected.weights)];
            for (what, got, expected) in all {
                let (want, tolerance) = expected.as_ref().expect("both outputs are there");
                compare(got, want, *tolerance).unwrap_or_else(|e| panic!("{}: {what}: {e}", case.name));
            }
        }
    }
}

#[test]
fn every_device_matches_vectors() {
    crate::harness::in_turn!();
    let mut report = Report::new("d2l");
    for by in WAYS {
        DOT.iter().for_each(|name| report.check(&dot(name, by)));
        MULTIHEAD.iter().for_each(|name| report.check_layer(&multihead(name, by)));
    }
    report.finish();
}
