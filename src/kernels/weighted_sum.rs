//! Twin of `weighted_sum.wgsl`.

use super::{mask, shader, tile};
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
    pub put: Width,
    pub range: mask::Parts,
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
            Binding::write("out", self.out, self.put),
        ];
        bindings.extend(self.range.bindings());
        tile::describe::<Params>(tile::Stage {
            tiles: self.tiles,
            b_along_n: true,
            repairs: true,
            constants: vec![
                Constant::Bool("IN_FOURS", self.width == Width::Four),
                Constant::Bool("OUT_IN_FOURS", self.put == Width::Four),
            ],
            bindings,
            parts: &[shader!("weighted_sum"), &self.range.wgsl()],
        })
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let ranges = mask::Parts::all().into_iter().map(mask::Parts::range_only);
        ranges.flat_map(|range| {
            tile::ALL.into_iter().flat_map(move |tiles| {
                super::FLOATS.into_iter().flat_map(move |v| {
                    super::WIDTHS.into_iter().flat_map(move |width| {
                        super::WIDTHS.into_iter().map(move |put| WeightedSum {
                            tiles,
                            v,
                            out: v,
                            width,
                            put,
                            range,
                        })
                    })
                })
            })
        })
    }
}
