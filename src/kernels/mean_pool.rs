//! Twin of `mean_pool.wgsl`, and what it shares with its gradient.

use super::norm::{ROWS, combine};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::Rows;
use crate::tensor::DType;

/// Which rows a mean is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pooled {
    All,
    Lengths,
    Keep,
    Packed,
}

impl Pooled {
    const ALL: [Pooled; 4] = [Pooled::All, Pooled::Lengths, Pooled::Keep, Pooled::Packed];

    /// What says which they are, and the texts of what there is not.
    pub(super) fn declare(self, bindings: &mut Vec<Binding>, text: &mut String) -> [Constant; 3] {
        match self {
            Pooled::Lengths | Pooled::Packed => {
                bindings.push(Binding::read("numbers", DType::U32, Width::One));
            }
            _ => text.push_str("fn numbers_at(o: u32) -> u32 { return 0u; }\n"),
        }
        match self {
            Pooled::Keep => bindings.push(Binding::read("keep", DType::Bool, Width::One)),
            _ => text.push_str("fn keep_at(o: u32) -> bool { return true; }\n"),
        }
        [
            Constant::Bool("LENGTHS", self == Pooled::Lengths),
            Constant::Bool("PACKED", self == Pooled::Packed),
            Constant::Bool("KEEP", self == Pooled::Keep),
        ]
    }
}

/// What changes the text of a mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MeanPool {
    pub rows: Rows,
    pub pooled: Pooled,
    pub l2: bool,
    pub x: DType,
    pub out: DType,
    pub width: Width,
}

params! {
    pub(crate) struct Params {
        x: View,
        numbers: View,
        keep: View,
        out: View,
        features: u32,
        length: u32,
        sequences: u32,
        step: u32,
        eps: f32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl MeanPool {
    pub fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.rows;
        let mut none = String::new();
        let mut bindings = vec![Binding::read("x", self.x, self.width)];
        let [lengths, packed, keep] = self.pooled.declare(&mut bindings, &mut none);
        bindings.push(Binding::write("out", self.out, self.width));
        let (combine, workgroup_memory) = combine(self.rows);
        let constants = [
            lengths,
            packed,
            keep,
            Constant::U32("WORKGROUP", workgroup),
            Constant::U32("ROW_LANES", lanes),
            Constant::Bool("L2", self.l2),
            Constant::Bool("IN_FOURS", self.width == Width::Four),
        ];
        let parts =
            [shader!("tensor/view"), shader!("mean_pool/sequence"), shader!("mean_pool"), combine, &none];
        Kernel { workgroup_memory, ..Kernel::new::<Params>(&constants, bindings, &parts, workgroup) }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        each().map(|(rows, pooled, l2, [x, out], width)| MeanPool { rows, pooled, l2, x, out, width })
    }
}

/// What kernels of means are listed with: not every type beside every other.
pub(super) fn each() -> impl Iterator<Item = (Rows, Pooled, bool, [DType; 2], Width)> {
    let [f32, f16, bf16] = super::FLOATS;
    let dtypes = [[f32; 2], [f16; 2], [bf16; 2], [f32, f16], [bf16, f32]];
    ROWS.into_iter().flat_map(move |rows| {
        Pooled::ALL.into_iter().flat_map(move |pooled| {
            [false, true].into_iter().flat_map(move |l2| {
                dtypes
                    .into_iter()
                    .flat_map(move |dtypes| super::WIDTHS.map(move |width| (rows, pooled, l2, dtypes, width)))
            })
        })
    })
}
