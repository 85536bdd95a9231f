//! Twin of `linear_prefix.wgsl`.

use super::linear::{LinearForm, Pieces};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, Width};
use crate::tensor::DType;

/// What changes the text of the running sums of states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearPrefix {
    pub form: LinearForm,
    /// From the last chunk to the first, of gradients.
    pub reverse: bool,
    /// Whether rows are those of queries.
    pub of_queries: bool,
}

impl LinearPrefix {
    pub fn describe(&self) -> Kernel {
        let write = |name| Binding::write(name, DType::F32, Width::Four);
        Pieces::new(self.form)
            .constant(Constant::Bool("IS_REVERSE", self.reverse))
            .bind(write("states"))
            .bind(write("carry"))
            .chunks(false, if self.of_queries { "p.q_len" } else { "p.kv_len" })
            .text(shader!("linear_prefix"))
            .kernel()
    }

    pub fn all() -> impl Iterator<Item = Self> {
        LinearForm::all()
            .flat_map(|form| [false, true].map(|reverse| LinearPrefix { form, reverse, of_queries: reverse }))
    }
}
