//! Twin of `weighted_sum.wgsl`.

use crate::device::Families;
use crate::device::family::STAGED;
use crate::kernel::{Kernel, Variant, WIDTHS, Width, families, kernel, shader};
use crate::mask::kernels::{MaskVariant, Masked, floats_beside};
use crate::matmul::plan::Tiles;
use crate::matmul::product;
use crate::tensor::DType;

kernel! {
    /// The kernel of the weighted sum.
    WeightedSum, WeightedSumCall
    tensors {
        // The kernel loads weights and v as vec4, v along its channels.
        weights: One Read F32 width view,
        v: One Read F32 width view,
        out: One Write F32 store view,
    }
    // Only the rules that bound the range of keys.
    groups { mask: Masked MaskVariant, }
    numbers {
        heads: u32,
        group: u32,
        value_dim: u32,
    }
    variant {
        tiles: Tiles,
        width: Width,
        store: Width,
    }
}

impl Variant for WeightedSum {
    const LABEL: &'static str = "attention.weighted_sum";

    fn describe(&self) -> Kernel {
        let product = product::Loop {
            tiles: self.tiles,
            a_along_m: false,
            b_along_n: true,
            ragged: true,
            repairs: true,
        };
        let declared = self
            .declare()
            .bool("IN_FOURS", self.width == Width::Four)
            .bool("OUT_IN_FOURS", self.store == Width::Four);
        product.around(declared, &[shader!("attention/weighted_sum"), &self.mask.wgsl()])
    }

    fn families(&self) -> Families {
        families(&[Some(STAGED.of(matches!(self.tiles, Tiles::Cpu { .. })))], &[self.v, self.out])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let ranges = MaskVariant::all().into_iter().map(MaskVariant::range_only);
        ranges.flat_map(|mask| {
            product::ALL.into_iter().flat_map(move |tiles| {
                floats_beside(&mask).iter().flat_map(move |&v| {
                    WIDTHS.into_iter().flat_map(move |width| {
                        WIDTHS.into_iter().map(move |store| WeightedSum {
                            weights: DType::F32,
                            v,
                            out: v,
                            mask,
                            tiles,
                            width,
                            store,
                        })
                    })
                })
            })
        })
    }
}
