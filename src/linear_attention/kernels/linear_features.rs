//! The host side of `linear_features.wgsl`.

use super::linear::{LinearNumbers, Pieces, listed_of_rows};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, Width, kernel, shader};
use crate::linear_attention::plan::LinearTiles;
use crate::tensor::DType;

kernel! {
    /// Products with random directions.
    LinearFeatures, LinearFeaturesCall
    tensors {
        rows: One Read F32 width view,
        directions: One Read F32 width view,
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

impl Variant for LinearFeatures {
    const LABEL: &'static str = "attention.linear_features";
    const FAMILIES: Families = Families::of(Family::LinearAttention);

    fn describe(&self) -> Kernel {
        Pieces::of_rows(self.tiles, self.width, self.declare())
            .tensor("rows", "row4", "p.head_dim", ["", ""])
            .tensor("directions", "direction4", "p.head_dim", ["", ""])
            .product()
            .store("p.direction_count")
            .text(shader!("linear_attention/linear_features"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        listed_of_rows().map(|(tiles, rows, width)| LinearFeatures {
            rows,
            directions: DType::F32,
            written: DType::F32,
            tiles,
            width,
        })
    }
}
