//! Twin of `weighted_sum.wgsl`.

use super::{mask, matmul, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::Tiles;
use crate::tensor::DType;

/// What changes the text of the weighted sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WeightedSum {
    pub tiles: Tiles,
    pub v: DType,
    pub out: DType,
    /// Whether the weights and v load in fours, v along its channels.
    pub width: Width,
    pub store: Width,
    pub range: mask::MaskVariant,
}

params! {
    pub(crate) struct Params {
        weights: View,
        v: View,
        out: View,
        mask: mask::MaskParams,
        heads: u32,
        group: u32,
        value_dim: u32,
        pad: u32,
    }
}

impl WeightedSum {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::read("weights", DType::F32, self.width),
            Binding::read("v", self.v, self.width),
            Binding::write("out", self.out, self.store),
        ];
        bindings.extend(self.range.bindings());
        matmul::describe::<Params>(matmul::MatmulStage {
            tiles: self.tiles,
            a_along_m: false,
            b_along_n: true,
            repairs: true,
            constants: vec![
                Constant::Bool("IN_FOURS", self.width == Width::Four),
                Constant::Bool("OUT_IN_FOURS", self.store == Width::Four),
            ],
            bindings,
            parts: &[shader!("weighted_sum"), &self.range.wgsl()],
        })
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let ranges = mask::MaskVariant::all().into_iter().map(mask::MaskVariant::range_only);
        ranges.flat_map(|range| {
            matmul::ALL.into_iter().flat_map(move |tiles| {
                super::floats_beside(&range).iter().flat_map(move |&v| {
                    super::WIDTHS.into_iter().flat_map(move |width| {
                        super::WIDTHS.into_iter().map(move |store| WeightedSum {
                            tiles,
                            v,
                            out: v,
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
