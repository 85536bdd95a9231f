//! Twin of `scores.wgsl`.

use super::{mask, matmul, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::Tiles;
use crate::tensor::DType;

/// What changes the text of the scores kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Scores {
    pub tiles: Tiles,
    pub dtype: DType,
    /// Whether q and k load in fours along their channels.
    pub width: Width,
    /// Whether four scores can be stored at once; padding may be written.
    pub store: Width,
    /// Only the parts that bound the range of keys.
    pub range: mask::MaskVariant,
}

params! {
    pub(crate) struct Params {
        q: View,
        k: View,
        scores: View,
        mask: mask::MaskParams,
        heads: u32,
        group: u32,
        head_dim: u32,
        scale: f32,
    }
}

impl Scores {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::read("q", self.dtype, self.width),
            Binding::read("k", self.dtype, self.width),
            Binding::write("scores", DType::F32, self.store),
        ];
        bindings.extend(self.range.bindings());
        matmul::describe::<Params>(matmul::MatmulStage {
            tiles: self.tiles,
            a_along_m: false,
            b_along_n: false,
            repairs: false,
            constants: vec![
                Constant::Bool("IN_FOURS", self.width == Width::Four),
                Constant::Bool("SCORES_IN_FOURS", self.store == Width::Four),
            ],
            bindings,
            parts: &[shader!("scores"), &self.range.wgsl()],
        })
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let ranges = mask::MaskVariant::all().into_iter().map(mask::MaskVariant::range_only);
        ranges.flat_map(|range| {
            matmul::ALL.into_iter().flat_map(move |tiles| {
                super::floats_beside(&range).iter().flat_map(move |&dtype| {
                    super::WIDTHS.into_iter().flat_map(move |width| {
                        super::WIDTHS.into_iter().map(move |store| Scores {
                            tiles,
                            dtype,
                            width,
                            store,
                            range,
                        })
                    })
                })
            })
        })
    }
}
