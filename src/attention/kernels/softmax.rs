//! Twin of `softmax.wgsl`.

use crate::device::Families;
use crate::device::family::STAGED;
use crate::kernel::{Kernel, Variant, WIDTHS, Width, families, kernel, shader};
use crate::mask::kernels::dropout::{DropoutKind, Dropped};
use crate::mask::kernels::{MaskVariant, Masked};
use crate::rows::plan::Rows;
use crate::tensor::DType;

kernel! {
    /// The kernel of the softmax.
    Softmax, SoftmaxCall
    tensors {
        // Stores as vec4 can write padding.
        scores: One Write F32 width view,
        lse: Opt Write F32 one view,
    }
    groups {
        mask: Masked MaskVariant,
        drop: Dropped DropoutKind,
    }
    numbers {
        heads: u32,
    }
    variant {
        rows: Rows,
        width: Width,
    }
}

impl Variant for Softmax {
    const LABEL: &'static str = "attention.softmax";

    fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.rows;
        let (combine, workgroup_memory) = match lanes {
            1 => (shader!("attention/softmax/row_per_invocation"), 0),
            _ => (shader!("attention/softmax/row_per_workgroup"), lanes * 8),
        };
        let parts = [
            shader!("tensor/view"),
            shader!("attention/softmax/online"),
            shader!("attention/softmax"),
            combine,
            &self.mask.wgsl(),
        ];
        self.declare()
            .u32("WORKGROUP", workgroup)
            .u32("ROW_LANES", lanes)
            .bool("IN_FOURS", self.width == Width::Four)
            .bool("PER_PAIR_MASK", self.mask.is_per_pair())
            .bool("NATURAL_SCORES", true)
            .kernel(&parts, workgroup, workgroup_memory)
    }

    fn families(&self) -> Families {
        families(&[Some(STAGED.of(self.rows.lanes == 1))], &[])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let rows = [
            Rows { workgroup: 8, lanes: 1 },
            Rows { workgroup: 32, lanes: 32 },
            Rows { workgroup: 256, lanes: 256 },
        ];
        rows.into_iter().flat_map(|rows| {
            MaskVariant::all().into_iter().flat_map(move |mask| {
                [(false, DropoutKind::None), (true, DropoutKind::Seeded), (true, DropoutKind::Given)]
                    .into_iter()
                    .flat_map(move |(lse, drop)| {
                        let lse = lse.then_some(DType::F32);
                        WIDTHS.map(|width| Softmax { scores: DType::F32, lse, mask, drop, rows, width })
                    })
            })
        })
    }
}
