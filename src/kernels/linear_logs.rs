//! Twin of `linear_logs.wgsl`.

use super::linear::Params;
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, Width};
use crate::tensor::DType;

/// What changes the text of the scales of states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearLogs {
    pub causal: bool,
    /// Whether the caller has the logarithms of states' scales.
    pub state: bool,
}

const STATE: &str =
    "fn state_log_of(sequence: u32, kv: u32) -> u32 { return view_at(p.x, sequence, kv, 0u, 0u); }

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

impl LinearLogs {
    pub fn describe(&self) -> Kernel {
        let write = |name, dtype| Binding::write(name, dtype, Width::One);
        let mut bindings = vec![write("chunks", DType::U32)];
        bindings.extend(self.state.then(|| write("state_log", DType::F32)));
        let constants = [Constant::Bool("IS_CAUSAL", self.causal)];
        let state = if self.state { STATE } else { NO_STATE };
        let parts = [shader!("tensor/view"), shader!("linear/params"), shader!("linear_logs"), state];
        Kernel::new::<Params>(&constants, bindings, &parts, 1)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        [false, true].into_iter().flat_map(|causal| [false, true].map(|state| LinearLogs { causal, state }))
    }
}
