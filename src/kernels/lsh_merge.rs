//! Twin of `lsh_merge.wgsl`.

use super::lsh_gather::{CONSTANTS, WORKGROUP};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the merge of rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LshMerge {
    pub dtype: DType,
    /// Whether the log-sum-exp is wanted.
    pub lse: bool,
}

const LSE: &str = "fn lse_put(o: u32, x: f32) { lse_store(o, x); }\n";
const NO_LSE: &str = "fn lse_put(o: u32, x: f32) {}\n";

params! {
    pub(crate) struct Params {
        part_out: View,
        part_lse: View,
        ranks: View,
        out: View,
        lse: View,
        rounds: u32,
        length: u32,
        value_dim: u32,
        neg_inf: f32,
    }
}

impl LshMerge {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::read("part_out", self.dtype, Width::One),
            Binding::read("part_lse", DType::F32, Width::One),
            Binding::read("ranks", DType::U32, Width::One),
            Binding::write("out", self.dtype, Width::One),
        ];
        bindings.extend(self.lse.then(|| Binding::write("lse", DType::F32, Width::One)));
        let [rows, lanes] = CONSTANTS;
        let constants = [rows, lanes, Constant::Bool("NATURAL_SCORES", true)];
        let lse = if self.lse { LSE } else { NO_LSE };
        let parts = [shader!("tensor/view"), shader!("softmax/online"), shader!("lsh_merge"), lse];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS
            .into_iter()
            .flat_map(|dtype| [false, true].into_iter().map(move |lse| LshMerge { dtype, lse }))
    }
}
