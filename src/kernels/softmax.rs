//! Twin of `softmax.wgsl`.

use super::dropout::Drop;
use super::{mask, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::Rows;
use crate::tensor::DType;

/// What changes the text of the softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Softmax {
    pub rows: Rows,
    /// Whether scores move in fours; padding may be written.
    pub width: Width,
    pub lse: bool,
    pub drop: Drop,
    pub mask: mask::Parts,
}

params! {
    pub(crate) struct Params {
        scores: View,
        lse: View,
        dropout: View,
        mask: mask::MaskParams,
        seed: [u32; 2],
        heads: u32,
        dropout_threshold: u32,
        dropout_scale: f32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl Softmax {
    pub fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.rows;
        let mut bindings = vec![Binding::write("scores", DType::F32, self.width)];
        if self.lse {
            bindings.push(Binding::write("lse", DType::F32, Width::One));
        }
        bindings.extend(self.mask.bindings());
        bindings.extend(self.drop.binding());
        let (combine, workgroup_memory) = match lanes {
            1 => (shader!("shared/row_alone"), 0),
            _ => (shader!("shared/row_workgroup"), lanes * 8),
        };
        let constants = [
            Constant::U32("WORKGROUP", workgroup),
            Constant::U32("LANES", lanes),
            Constant::Bool("HAS_LSE", self.lse),
            Constant::Bool("IN_FOURS", self.width == Width::Four),
            Constant::Bool("ASKS_PAIRS", self.mask.asks_pairs()),
            Constant::Bool("DROPS", self.drop != Drop::None),
        ];
        let lse = if self.lse { "" } else { "fn lse_put(o: u32, x: f32) {}\n" };
        let parts = [
            shader!("shared/view"),
            shader!("shared/online"),
            shader!("softmax"),
            lse,
            self.drop.wgsl(),
            combine,
            &self.mask.wgsl(),
        ];
        Kernel { workgroup_memory, ..Kernel::new::<Params>(&constants, bindings, &parts, workgroup) }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let rows = [
            Rows { workgroup: 8, lanes: 1 },
            Rows { workgroup: 32, lanes: 32 },
            Rows { workgroup: 256, lanes: 256 },
        ];
        rows.into_iter().flat_map(|rows| {
            mask::Parts::all().into_iter().flat_map(move |mask| {
                [(false, Drop::None), (true, Drop::Seeded), (true, Drop::Given)].into_iter().flat_map(
                    move |(lse, drop)| super::WIDTHS.map(|width| Softmax { rows, width, lse, drop, mask }),
                )
            })
        })
    }
}
