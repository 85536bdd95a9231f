//! Twin of `append_keys.wgsl`.

use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the appended keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AppendKeys {
    pub kv: DType,
    /// Type of the learned key and value, if there is one.
    pub learned: Option<DType>,
}

/// Invocations of a workgroup, as in the shader.
pub(crate) const WORKGROUP: usize = 64;

params! {
    pub(crate) struct Params {
        k: View,
        v: View,
        kv_heads: u32,
        head_dim: u32,
        value_dim: u32,
        start: u32,
        bias_k: [u32; 2],
        bias_v: [u32; 2],
    }
}

impl AppendKeys {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![Binding::write("kv", self.kv, Width::One)];
        let stubs = match self.learned {
            Some(dtype) => {
                bindings.push(Binding::read("bias_k", dtype, Width::One));
                bindings.push(Binding::read("bias_v", dtype, Width::One));
                ""
            }
            None => {
                "fn bias_k_at(o: u32) -> f32 { return 0.0; }\nfn bias_v_at(o: u32) -> f32 { return 0.0; }\n"
            }
        };
        let constants = [Constant::Bool("LEARNED", self.learned.is_some())];
        Kernel::new::<Params>(
            &constants,
            bindings,
            &[shader!("tensor/view"), shader!("append_keys"), stubs],
            WORKGROUP as u32,
        )
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS
            .into_iter()
            .flat_map(|kv| super::FLOATS_OR_NONE.into_iter().map(move |learned| AppendKeys { kv, learned }))
    }
}
