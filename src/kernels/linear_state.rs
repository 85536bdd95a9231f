//! Twin of `linear_state.wgsl`.

use super::linear::{LinearForm, Phi, Pieces, listed};
use super::shader;
use crate::kernel::{Binding, Kernel, Width};
use crate::tensor::DType;

/// What changes the text of the states of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearState {
    pub form: LinearForm,
    pub phi: Phi,
    /// Of the features' rows, and of the values' or of the gradients of results.
    pub features: DType,
    pub values: DType,
    /// Of queries, for the backward pass.
    pub of_queries: bool,
}

impl LinearState {
    pub fn describe(&self) -> Kernel {
        let pieces = Pieces::new(self.form).product().phi(self.phi);
        let pieces = if self.of_queries {
            let pieces = pieces.queries(self.features).d_out(self.values).stats();
            pieces.chunks(false, "p.q_len").text(shader!("linear/query_items"))
        } else {
            let pieces = pieces.keys(self.features).values(self.values);
            pieces.chunks(true, "p.kv_len").text(shader!("linear/key_items"))
        };
        pieces.bind(Binding::write("states", DType::F32, Width::Four)).text(shader!("linear_state")).kernel()
    }

    pub fn all() -> Vec<Self> {
        let of = |of_queries| {
            listed(move |form, dtype, phi| LinearState {
                form,
                phi,
                features: dtype,
                values: dtype,
                of_queries,
            })
        };
        [of(false), of(true)].concat()
    }
}
