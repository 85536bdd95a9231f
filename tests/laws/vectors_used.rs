//! Every file of `tests/vectors` belongs to a test, and each name in a test has a file.

use std::collections::BTreeSet;

use crate::harness::vectors::folder;
use crate::ops::additive;
use crate::ops::attention::differential;
use crate::ops::cache::hadamard;
use crate::ops::layers::mha;
use crate::ops::layers::output_gate;
use crate::ops::layers::qk_norm;
use crate::ops::layers::stacks;
use crate::ops::linear_attention;
use crate::ops::linformer;
use crate::ops::local;
use crate::ops::lsh;
use crate::ops::mask::flex;
use crate::ops::mask::patterns;
use crate::ops::position;
use crate::ops::recurrent;
use crate::ops::rows::{causal_conv, gated_norm};
use crate::ops::selected::{self, indexer};
use crate::peers::d2l;
use crate::peers::minilm;
use crate::peers::onnx;
use crate::peers::sdpa;
use crate::peers::smollm2;

#[test]
fn every_vector_is_used_by_a_test() {
    let used = [
        (sdpa::FAMILY, sdpa::NAMES),
        (mha::FAMILY, mha::NAMES),
        (patterns::FAMILY, patterns::NAMES),
        (flex::FAMILY, flex::NAMES),
        (d2l::FAMILY, d2l::DOT),
        (d2l::FAMILY, d2l::MULTIHEAD),
        (onnx::FAMILY, onnx::NAMES),
        (linformer::FAMILY, linformer::NAMES),
        (local::FAMILY, local::NAMES),
        (lsh::FAMILY, lsh::NAMES),
        (minilm::FAMILY, minilm::NAMES),
        (smollm2::FAMILY, smollm2::NAMES),
        (position::FAMILY, position::ROPE),
        (position::FAMILY, position::SINUSOID),
        (d2l::FAMILY, position::D2L),
        (position::AXES_FAMILY, position::AXES_NAMES),
        (onnx::FAMILY, position::ONNX),
        (d2l::FAMILY, additive::D2L),
        (additive::FAMILY, additive::NAMES),
        (stacks::FAMILY, stacks::NAMES),
        (stacks::FAMILY, stacks::DECODERS),
        (d2l::FAMILY, stacks::D2L),
        (linear_attention::FAMILY, linear_attention::NAMES),
        (onnx::FAMILY, linear_attention::ONNX),
        (output_gate::FAMILY, output_gate::NAMES),
        (qk_norm::FAMILY, qk_norm::NAMES),
        (recurrent::FAMILY, recurrent::NAMES),
        (selected::FAMILY, selected::NAMES),
        (causal_conv::FAMILY, causal_conv::NAMES),
        (gated_norm::FAMILY, gated_norm::NAMES),
        (differential::FAMILY, differential::NAMES),
        (indexer::FAMILY, indexer::NAMES),
        (hadamard::FAMILY, hadamard::NAMES),
    ];
    let used: BTreeSet<String> = used
        .iter()
        .flat_map(|(family, names)| names.iter().map(move |name| format!("{family}/{name}.safetensors")))
        .collect();
    let mut there = BTreeSet::new();
    for family in std::fs::read_dir(folder()).expect("tests/vectors").map(|e| e.expect("an entry").path()) {
        if family.is_dir() {
            for file in std::fs::read_dir(&family).expect("a family").map(|e| e.expect("an entry").path()) {
                let name = file.strip_prefix(folder()).expect("inside").display().to_string();
                there.insert(name.replace('\\', "/"));
            }
        }
    }
    assert_eq!(there, used, "left: the files, right: what the tests load");
}
