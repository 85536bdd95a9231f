//! The host side of `linear_logs.wgsl`.

use super::linear::LinearNumbers;
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The scales of states.
    LinearLogs, LinearLogsCall
    tensors {
        chunks: One Write U32 one,
        // The logarithms of the scales of the caller's states.
        state_log: Opt Write F32 one view,
    }
    numbers {
        numbers: LinearNumbers,
    }
    variant {
        causal: bool,
    }
}

const STATE: &str =
    "fn state_log_of(sequence: u32, kv: u32) -> u32 { return view_at(p.state_log, sequence, kv, 0u, 0u); }

// Packed rows have a sequence before the caller's and one after them.
fn is_of_caller(sequence: u32) -> bool {
    return p.sequences == 0u || (sequence > 0u && sequence + 1u < p.sequences);
}

fn own(sequence: u32) -> u32 {
    return select(sequence, sequence - 1u, p.sequences > 0u);
}

fn begin_logs(b: u32, kv: u32) {
    if p.has_state == 0u {
        if p.sequences == 0u {
            state_log_store(state_log_of(b, kv), p.neg_inf);
        }
        for (var s = 0u; s + 2u < p.sequences; s++) {
            state_log_store(state_log_of(s, kv), p.neg_inf);
        }
    }
}

fn first_log(sequence: u32, kv: u32) -> f32 {
    if is_of_caller(sequence) {
        return state_log_at(state_log_of(own(sequence), kv));
    } else {
        return p.neg_inf;
    }
}

fn keep_log(sequence: u32, kv: u32, log: f32) {
    if is_of_caller(sequence) {
        state_log_store(state_log_of(own(sequence), kv), log);
    }
}
";
const NO_STATE: &str = "fn begin_logs(b: u32, kv: u32) {}
fn first_log(sequence: u32, kv: u32) -> f32 { return p.neg_inf; }
fn keep_log(sequence: u32, kv: u32, log: f32) {}
";

impl Variant for LinearLogs {
    const LABEL: &'static str = "attention.linear_logs";
    const FAMILIES: Families = Families::of(Family::LinearAttention);

    fn describe(&self) -> Kernel {
        let state = if self.state_log.is_some() { STATE } else { NO_STATE };
        let parts = [shader!("tensor/view"), shader!("linear_attention/linear_logs"), state];
        self.declare().bool("IS_CAUSAL", self.causal).kernel(&parts, 1, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [false, true].into_iter().flat_map(|causal| {
            let of = move |state_log| LinearLogs { chunks: DType::U32, state_log, causal };
            [None, Some(DType::F32)].map(of)
        })
    }
}
