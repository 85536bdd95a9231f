//! Twin of `linear_chunks.wgsl`.

use super::linear::Params;
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, Width};
use crate::tensor::DType;

/// What changes the text of the table of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearChunks {
    pub key_mask: bool,
    pub lengths: bool,
    pub packed: bool,
    /// Whether keys get logarithmic weights, and whether there are some already, of their features.
    pub scaled: bool,
    pub has_logs: bool,
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

impl LinearChunks {
    pub fn describe(&self) -> Kernel {
        let LinearChunks { key_mask, lengths, packed, scaled, has_logs } = *self;
        let read = |name, dtype| Binding::read(name, dtype, Width::One);
        let write = |name, dtype| Binding::write(name, dtype, Width::One);
        let bindings = [
            key_mask.then(|| read("key_mask", DType::Bool)),
            lengths.then(|| read("lengths", DType::U32)),
            packed.then(|| read("starts", DType::U32)),
            scaled.then(|| write("logs", DType::F32)),
            Some(write("chunks", DType::U32)),
        ];
        let mut seen = vec!["true"];
        seen.extend(key_mask.then_some("key_mask_at(view_at(p.k, b, kv, 0u, j))"));
        seen.extend(lengths.then_some("j < lengths_at(view_at(p.v, b, kv, 0u, 0u))"));
        let is_key =
            format!("fn is_key(b: u32, kv: u32, j: u32) -> bool {{ return {}; }}\n", seen.join(" && "));
        let log_of = format!(
            "fn log_of(o: u32) -> f32 {{ return {}; }}\n",
            if has_logs { "logs_at(o)" } else { "0.0" }
        );
        let start_of = if packed {
            "fn start_of(s: u32) -> u32 { return starts_at(view_at(p.q, 0u, 0u, 0u, s)); }\n"
        } else {
            "fn start_of(s: u32) -> u32 { return 0u; }\n"
        };
        let unweighed = "fn weigh_keys(b: u32, kv: u32, chunk: Chunk) -> f32 { return 0.0; }\n";
        let weigh = if scaled { [WEIGH, &is_key, &log_of].concat() } else { unweighed.to_string() };
        let constants = [Constant::U32("WORKGROUP", WORKGROUP as u32), Constant::Bool("IS_PACKED", packed)];
        let parts = [
            shader!("tensor/view"),
            shader!("linear/params"),
            shader!("linear/chunks"),
            shader!("linear_chunks"),
            start_of,
            &weigh,
        ];
        let bindings = bindings.into_iter().flatten().collect();
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        [false, true].into_iter().flat_map(|packed| {
            let of = move |key_mask, lengths, scaled, has_logs| LinearChunks {
                key_mask,
                lengths,
                packed,
                scaled,
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
