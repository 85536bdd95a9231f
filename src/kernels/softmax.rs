//! Twin of `softmax.wgsl`.

use super::dropout::DropoutKind;
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
    pub drop: DropoutKind,
    pub mask: mask::MaskVariant,
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
            1 => (shader!("softmax/row_per_invocation"), 0),
            _ => (shader!("softmax/row_per_workgroup"), lanes * 8),
        };
        let constants = [
            Constant::U32("WORKGROUP", workgroup),
            Constant::U32("ROW_LANES", lanes),
            Constant::Bool("HAS_LSE", self.lse),
            Constant::Bool("IN_FOURS", self.width == Width::Four),
            Constant::Bool("PER_PAIR_MASK", self.mask.is_per_pair()),
            Constant::Bool("NATURAL_SCORES", true),
            Constant::Bool("HAS_DROPOUT", self.drop != DropoutKind::None),
        ];
        let lse = if self.lse { "" } else { "fn lse_store(o: u32, x: f32) {}\n" };
        let parts = [
            shader!("tensor/view"),
            shader!("softmax/online"),
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
            mask::MaskVariant::all().into_iter().flat_map(move |mask| {
                [(false, DropoutKind::None), (true, DropoutKind::Seeded), (true, DropoutKind::Given)]
                    .into_iter()
                    .flat_map(move |(lse, drop)| {
                        super::WIDTHS.map(|width| Softmax { rows, width, lse, drop, mask })
                    })
            })
        })
    }
}
