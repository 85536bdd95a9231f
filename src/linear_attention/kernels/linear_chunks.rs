//! The host side of `linear_chunks.wgsl`.

use super::linear::LinearNumbers;
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The table of chunks.
    LinearChunks, LinearChunksCall
    tensors {
        key_mask: Opt Read Bool one repeating,
        lengths: Opt Read U32 one repeating,
        // The starts of packed sequences.
        starts: Opt Read U32 one view,
        // The logarithmic weights of keys.
        logs: Opt Write F32 one,
        chunks: One Write U32 one,
    }
    numbers {
        numbers: LinearNumbers,
    }
    variant {
        /// True if `logs` already holds the logarithms of the features.
        has_logs: bool,
    }
}

pub(crate) const WORKGROUP: usize = 64;

const WEIGH: &str = "fn weigh_keys(b: u32, kv: u32, chunk: Chunk) -> f32 {
    var largest = p.neg_inf;
    for (var t = 0u; t < chunk.count; t++) {
        let j = chunk.first + t;
        let o = (b * p.kv_heads + kv) * p.kv_len + j;
        let log = select(p.neg_inf, log_of(o), is_key(b, kv, j));
        logs_store(o, log);
        largest = max(largest, log);
    }
    return largest;
}
";

impl Variant for LinearChunks {
    const LABEL: &'static str = "attention.linear_chunks";
    const FAMILIES: Families = Families::of(Family::LinearAttention);

    fn describe(&self) -> Kernel {
        let mut seen = vec!["true"];
        seen.extend(self.key_mask.map(|_| "key_mask_at(view_at(p.key_mask, b, kv, 0u, j))"));
        seen.extend(self.lengths.map(|_| "j < lengths_at(view_at(p.lengths, b, kv, 0u, 0u))"));
        let is_key =
            format!("fn is_key(b: u32, kv: u32, j: u32) -> bool {{ return {}; }}\n", seen.join(" && "));
        let log_of = format!(
            "fn log_of(o: u32) -> f32 {{ return {}; }}\n",
            if self.has_logs { "logs_at(o)" } else { "0.0" }
        );
        let packed = self.starts.is_some();
        let start_of = if packed {
            "fn start_of(s: u32) -> u32 { return starts_at(view_at(p.starts, 0u, 0u, 0u, s)); }\n"
        } else {
            "fn start_of(s: u32) -> u32 { return 0u; }\n"
        };
        let unweighed = "fn weigh_keys(b: u32, kv: u32, chunk: Chunk) -> f32 { return 0.0; }\n";
        let weigh =
            if self.logs.is_some() { [WEIGH, &is_key, &log_of].concat() } else { unweighed.to_string() };
        let parts = [
            shader!("tensor/view"),
            shader!("linear_attention/chunks"),
            shader!("linear_attention/linear_chunks"),
            start_of,
            &weigh,
        ];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).bool("IS_PACKED", packed).kernel(
            &parts,
            WORKGROUP as u32,
            0,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [None, Some(DType::U32)].into_iter().flat_map(|starts| {
            let of = move |key_mask: bool, lengths: bool, scaled: bool, has_logs| LinearChunks {
                key_mask: key_mask.then_some(DType::Bool),
                lengths: lengths.then_some(DType::U32),
                starts,
                logs: scaled.then_some(DType::F32),
                chunks: DType::U32,
                has_logs,
            };
            [
                of(false, false, false, false),
                of(true, false, true, false),
                of(false, true, true, false),
                of(true, true, true, true),
                of(false, false, true, true),
            ]
        })
    }
}
