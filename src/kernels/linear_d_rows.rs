//! Twin of `linear_d_rows.wgsl`.

use super::linear::{Pieces, RowsForm};
use super::shader;
use crate::kernel::{Binding, Kernel, Width};
use crate::tensor::DType;

/// What changes the text of the gradients of rows that random features were made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearDRows {
    pub form: RowsForm,
    pub rows: DType,
    pub gradient: DType,
}

impl LinearDRows {
    pub fn describe(&self) -> Kernel {
        Pieces::of_rows(self.form)
            .tensor("rows", "q", self.rows, "row4", "p.head_dim", ["", ""])
            .tensor("directions", "k", DType::F32, "direction4", "p.head_dim", ["", ""])
            .bind(Binding::read("d_features", DType::F32, Width::One))
            .text(shader!("linear/tile"))
            .store(self.gradient, "p.head_dim")
            .text(shader!("linear_d_rows"))
            .kernel()
    }

    pub fn all() -> impl Iterator<Item = Self> {
        RowsForm::all().map(|(form, rows)| LinearDRows { form, rows, gradient: rows })
    }
}
