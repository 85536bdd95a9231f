//! Twin of `scores.wgsl`.

use crate::device::Families;
use crate::device::family::STAGED;
use crate::kernel::{Kernel, Variant, WIDTHS, Width, families, kernel, shader};
use crate::mask::kernels::{MaskVariant, Masked, floats_beside};
use crate::matmul::plan::Tiles;
use crate::matmul::product;
use crate::tensor::DType;

kernel! {
    /// The kernel of the scores.
    Scores, ScoresCall
    tensors {
        // The kernel loads q and k as vec4 along their channels.
        q: One Read F32 width view,
        k: One Read F32 width view,
        // Stores as vec4 can write padding.
        scores: Placed Write F32 store view,
    }
    // Only the rules that bound the range of keys.
    groups { mask: Masked MaskVariant, }
    numbers {
        heads: u32,
        group: u32,
        head_dim: u32,
        scale: f32,
    }
    variant {
        tiles: Tiles,
        width: Width,
        store: Width,
    }
}

impl Variant for Scores {
    const LABEL: &'static str = "attention.scores";

    fn describe(&self) -> Kernel {
        let product = product::Loop {
            tiles: self.tiles,
            a_along_m: false,
            b_along_n: false,
            ragged: self.width == Width::One,
            repairs: false,
        };
        let declared = self
            .declare()
            .bool("IN_FOURS", self.width == Width::Four)
            .bool("SCORES_IN_FOURS", self.store == Width::Four);
        product.around(declared, &[shader!("attention/scores"), &self.mask.wgsl()])
    }

    fn families(&self) -> Families {
        families(&[Some(STAGED.of(matches!(self.tiles, Tiles::Cpu { .. })))], &[self.q, self.k])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let ranges = MaskVariant::all().into_iter().map(MaskVariant::range_only);
        ranges.flat_map(|mask| {
            product::ALL.into_iter().flat_map(move |tiles| {
                floats_beside(&mask).iter().flat_map(move |&dtype| {
                    WIDTHS.into_iter().flat_map(move |width| {
                        WIDTHS.into_iter().map(move |store| Scores {
                            q: dtype,
                            k: dtype,
                            scores: DType::F32,
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
