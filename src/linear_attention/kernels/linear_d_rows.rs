//! The host side of `linear_d_rows.wgsl`.

use super::linear::{LinearNumbers, Pieces, listed_of_rows};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, Width, kernel, shader};
use crate::linear_attention::plan::LinearTiles;
use crate::tensor::DType;

kernel! {
    /// The gradients of the rows from which random features were computed.
    LinearDRows, LinearDRowsCall
    tensors {
        rows: One Read F32 width view,
        directions: One Read F32 width view,
        d_features: One Read F32 one view,
        written: One Write F32 width view,
    }
    numbers {
        numbers: LinearNumbers,
    }
    variant {
        tiles: LinearTiles,
        width: Width,
    }
}

impl Variant for LinearDRows {
    const LABEL: &'static str = "attention.linear_d_rows";
    const FAMILIES: Families = Families::of(Family::LinearGradients);

    fn describe(&self) -> Kernel {
        Pieces::of_rows(self.tiles, self.width, self.declare())
            .tensor("rows", "row4", "p.head_dim", ["", ""])
            .tensor("directions", "direction4", "p.head_dim", ["", ""])
            .product()
            .store("p.head_dim")
            .text(shader!("linear_attention/linear_d_rows"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        listed_of_rows().map(|(tiles, rows, width)| LinearDRows {
            rows,
            directions: DType::F32,
            d_features: DType::F32,
            written: rows,
            tiles,
            width,
        })
    }
}
