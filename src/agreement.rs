//! The numbers that shaders and Rust share. This test lists every literal `const` of a shader, with
//! the Rust constant that it must equal.

use std::collections::BTreeMap;
use std::path::Path;

use crate::attention::kernels::merge_splits;
use crate::attention::merge::kernels::merge;
use crate::attention::plan::MOST_SPLITS;
use crate::cache::kernels::cache::{
    COUNT, EXCHANGE, HIGH, LENGTH, LIMIT, MOVE_FROM, MOVE_TO, REFUSED, REMOVED, START, STORED, WORDS,
};
use crate::cache::kernels::cache_advance::Counts;
use crate::cache::storage::{LayoutKind, StorageKind};
use crate::lsh::kernels::lsh_codes;
use crate::mask::PatternPart;
use crate::mask::block_map::state;
use crate::mask::kernels::pattern;
use crate::mask::pattern::PatternParams;
use crate::matmul::quantized::format::QuantizedFormat;
use crate::position::kernels::rotation_table;
use crate::recurrent::kernels::recurrent_chunks::CHUNK_WORDS;
use crate::recurrent::plan::CHANNEL_CHUNK;
use crate::selected::kernels::selected_keys::RANGE_WORDS;
use crate::selected::kernels::selected_sums;
use crate::tensor::LONGEST_AXIS;

/// The Rust value of a shader's constant, by file and name. `None`: Rust has no such number.
fn meant() -> BTreeMap<(&'static str, &'static str), Option<u32>> {
    let part = |part| pattern(PatternParams { reach: None, stride: 1, summary: None, part });
    let shared = [
        ("cache/sequence_table", "CONTIGUOUS", LayoutKind::Contiguous as u32),
        ("cache/sequence_table", "RING", LayoutKind::Ring as u32),
        ("cache/sequence_table", "PAGED", LayoutKind::Paged as u32),
        ("cache/sequence_table", "WORDS", WORDS as u32),
        ("cache/sequence_table", "START", START as u32),
        ("cache/sequence_table", "LENGTH", LENGTH as u32),
        ("cache/sequence_table", "HIGH", HIGH as u32),
        ("cache/sequence_table", "REMOVED", REMOVED as u32),
        ("cache/sequence_table", "STORED", STORED as u32),
        ("cache/sequence_table", "LIMIT", LIMIT as u32),
        ("cache/sequence_table", "REFUSED", REFUSED as u32),
        ("cache/sequence_table", "COUNT", COUNT as u32),
        ("cache/sequence_table", "MOVE_TO", MOVE_TO as u32),
        ("cache/sequence_table", "MOVE_FROM", MOVE_FROM as u32),
        ("cache/sequence_table", "EXCHANGE", EXCHANGE),
        ("cache/cache_advance", "ALL", Counts::All as u32),
        ("cache/cache_advance", "EACH", Counts::Each as u32),
        ("cache/cache_advance", "DEVICE", Counts::Device as u32),
        ("attention/keys/tensors", "K_STORAGE", StorageKind::F32 as u32),
        ("attention/keys/tensors", "V_STORAGE", StorageKind::F32 as u32),
        ("attention/keys/storage", "F32", StorageKind::F32 as u32),
        ("attention/keys/storage", "F16", StorageKind::F16 as u32),
        ("attention/keys/storage", "BF16", StorageKind::BF16 as u32),
        ("attention/keys/storage", "Q8", StorageKind::Q8 as u32),
        ("attention/keys/storage", "E4M3", StorageKind::E4M3 as u32),
        ("attention/keys/storage", "E5M2", StorageKind::E5M2 as u32),
        ("attention/keys/storage", "Q4", StorageKind::Q4 as u32),
        ("attention/keys/storage", "GAUSSIAN4", StorageKind::Gaussian4 as u32),
        ("lsh/lsh_codes", "LOOK_BACK", lsh_codes::MOST_CHUNKS as u32),
        ("mask/blocks", "HIDDEN", state::HIDDEN),
        ("mask/blocks", "FULL", state::FULL),
        // None of the states.
        ("mask/blocks", "DIFFER", 3),
        ("mask/pattern", "SAME_BLOCK", part(PatternPart::Near)[1]),
        ("mask/pattern", "NEAR", part(PatternPart::Near)[3]),
        ("mask/pattern", "FAR", part(PatternPart::Far)[3]),
        ("mask/pattern", "BOTH", part(PatternPart::Both)[3]),
        ("mask/query_offsets", "FURTHEST_OFFSET", LONGEST_AXIS as u32),
        ("attention/merge/merge", "ROWS", merge::ROWS as u32),
        ("attention/merge_splits", "MOST_SPLITS", MOST_SPLITS as u32),
        ("attention/merge_splits", "ROWS", merge_splits::ROWS as u32),
        ("position/rotation_table", "DIGITS", rotation_table::DIGITS as u32),
        (
            "position/rotation_table",
            "LAST_POSITION",
            (rotation_table::DIGITS.pow(rotation_table::LEVELS as u32) - 1) as u32,
        ),
        ("position/rotation_table", "ORDER_HALF", rotation_table::ORDER_HALF),
        ("recurrent/chunks", "CHUNK_WORDS", CHUNK_WORDS as u32),
        ("recurrent/recurrent_d_channel_decays", "CHUNK_ROWS", CHANNEL_CHUNK as u32),
        ("recurrent/recurrent_d_channels", "CHUNK_ROWS", CHANNEL_CHUNK as u32),
        ("selected/selected_keys", "RANGE_WORDS", RANGE_WORDS),
        ("selected/selected_sums", "KEYS", selected_sums::KEYS),
        ("matmul/quantized/q4_1", "BLOCK_BYTES", QuantizedFormat::Q4_1.block_bytes() as u32),
        ("matmul/quantized/q8_0", "BLOCK_BYTES", QuantizedFormat::Q8_0.block_bytes() as u32),
    ];
    let own = [
        ("additive/gpu", "CHUNK_VECTORS"),
        ("additive/gpu", "LANE_KEYS"),
        ("mask/classify", "LANES"),
        ("mask/classify", "EIGHTHS"),
        ("mask/classify", "SEEN"),
        ("mask/classify", "UNSEEN"),
        ("mask/classify", "BIASED"),
        ("attention/decode/cpu", "SMALL"),
        ("attention/decode/reduce_subgroup", "REDUCE_SIZE"),
        ("attention/fused_backward", "SEARCH"),
        ("attention/fused_backward/cpu", "CHAINS"),
        ("attention/fused_backward/tiles", "LOOK"),
        ("attention/fused/tiles", "LOOK"),
        ("attention/fused/matrix", "ABOVE"),
        ("attention/fused/matrix", "RESCALED"),
        ("attention/fused/matrix", "MOST_LOADS"),
        ("linear_attention/chunks", "HIDDEN"),
        ("lsh/lsh_codes", "NOTHING"),
        ("mask/document_range", "RUN"),
        ("matmul/matrix", "BLOCKS"),
        ("attention/fused/dot", "SMALL_EXPONENT"),
        ("attention/merge/merge", "ROW_LANES"),
        ("attention/merge_splits", "AT_ONCE"),
        ("attention/merge_splits", "ROW_LANES"),
        ("matmul/quantized/few_rows_cpu", "LINE_BYTES"),
        ("matmul/quantized/q4_1_parts", "PART_STEP"),
        ("matmul/quantized/q8_0_parts", "PART_STEP"),
        ("tensor/view", "FAR_EXPONENT"),
        ("attention/keys/storage", "E4M3_SHIFT"),
        ("attention/keys/storage", "E4M3_FIRST"),
        ("attention/keys/storage", "E5M2_SHIFT"),
        ("attention/keys/storage", "E5M2_FIRST"),
    ];
    let shared = shared.into_iter().map(|(file, name, n)| ((file, name), Some(n)));
    shared.chain(own.map(|place| (place, None))).collect()
}

/// The constants of a shader that are numbers themselves.
fn literals(code: &str) -> Vec<(String, u32)> {
    let literal = |line: &str| {
        let (name, value) = line.strip_prefix("const ")?.split_once(": u32 = ")?;
        let value = value.split_once("u;")?.0;
        let number = match value.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16),
            None => value.parse(),
        };
        Some((name.to_string(), number.ok()?))
    };
    code.lines().filter_map(literal).collect()
}

fn collect(folder: &Path, stem: &str, found: &mut Vec<(String, String, u32)>) {
    for entry in std::fs::read_dir(folder).expect("a folder of shaders") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().expect("a name").to_string_lossy();
        let stem = if stem.is_empty() { name.to_string() } else { format!("{stem}/{name}") };
        if path.is_dir() {
            collect(&path, &stem, found);
        } else if path.extension().is_some_and(|e| e == "wgsl") {
            let code = std::fs::read_to_string(&path).expect("a shader");
            found.extend(literals(&code).into_iter().map(|(name, n)| (stem.clone(), name, n)));
        }
    }
}

#[test]
fn literals_are_found() {
    let code =
        "const A: u32 = 3u; // three\nconst B: u32 = A + 1u;\nconst C: u32 = 0xffu;\nconst D: f32 = 1.0;";
    assert_eq!(literals(code), [("A".to_string(), 3), ("C".to_string(), 255)]);
}

#[test]
fn shaders_and_rust_mean_the_same_numbers() {
    let mut found = Vec::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders"), "", &mut found);
    let mut meant: BTreeMap<(String, String), Option<u32>> =
        meant().into_iter().map(|((f, n), v)| ((f.into(), n.into()), v)).collect();
    let mut wrong = Vec::new();
    for (file, name, said) in found {
        match meant.remove(&(file.clone(), name.clone())) {
            Some(Some(wanted)) if said != wanted => {
                wrong.push(format!("{file}.wgsl: {name} is {said}, in Rust {wanted}"));
            }
            Some(_) => {}
            None => wrong.push(format!("{file}.wgsl: {name} is not in src/agreement.rs")),
        }
    }
    wrong.extend(meant.keys().map(|(file, name)| format!("{file}.wgsl has no {name} any more")));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The text that replaces the block map in kernels without one.
#[test]
fn no_blocks_says_the_same_states() {
    assert_eq!(
        literals(crate::attention::kernels::fused::NO_BLOCKS),
        [("HIDDEN".to_string(), state::HIDDEN), ("FULL".to_string(), state::FULL)]
    );
    assert!(crate::attention::kernels::fused::NO_BLOCKS.contains(&format!("return {}u;", state::MIXED)));
}
