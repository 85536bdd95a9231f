//! Twin of `linear_features.wgsl`.

use super::linear::{Pieces, RowsForm};
use super::shader;
use crate::kernel::Kernel;
use crate::tensor::DType;

/// What changes the text of products with random directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearFeatures {
    pub form: RowsForm,
    pub rows: DType,
}

impl LinearFeatures {
    pub fn describe(&self) -> Kernel {
        Pieces::of_rows(self.form)
            .tensor("rows", "q", self.rows, "row4", "p.head_dim", ["", ""])
            .tensor("directions", "k", DType::F32, "direction4", "p.head_dim", ["", ""])
            .text(shader!("linear/tile"))
            .store(DType::F32, "p.directions")
            .text(shader!("linear_features"))
            .kernel()
    }

    pub fn all() -> impl Iterator<Item = Self> {
        RowsForm::all().map(|(form, rows)| LinearFeatures { form, rows })
    }
}
