//! The host side of `norm_backward.wgsl`.

use super::norm::{Gating, ROWS, combine, gate_parts, gated, gates};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::rows::plan::Rows;
use crate::tensor::DType;

kernel! {
    /// The gradient of a norm's input.
    NormBackward, NormBackwardCall
    tensors {
        x: One Read F32 width view,
        residual: Opt Read F32 width view,
        // Without d_x and d_gate the kernel only computes the statistics. Then weight, d_out and
        // d_sum are absent too.
        weight: Opt Read F32 width,
        // Only the gradient of a gate after the norm depends on the bias.
        bias: Opt Read F32 width,
        gate: Opt Read F32 width view,
        d_out: Opt Read F32 width view,
        d_sum: Opt Read F32 width view,
        d_x: Opt Write F32 width view,
        d_gate: Opt Write F32 width view,
        statistics: Opt Write F32 one,
    }
    numbers {
        /// First elements and strides of weight and of bias.
        affine: [u32; 4],
        features: u32,
        heads: u32,
        length: u32,
        rows: u32,
        /// The distance from one row of a workgroup or an invocation to its next row.
        step: u32,
        eps: f32,
    }
    variant {
        shares: Rows,
        /// True for LayerNorm, false for RMSNorm.
        centred: bool,
        /// The use of `gate`.
        gating: Option<Gating>,
        accumulates: bool,
        width: Width,
    }
}

impl Variant for NormBackward {
    const LABEL: &'static str = "attention.norm_backward";
    const FAMILIES: Families = Families::of(Family::NormGradients);

    fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.shares;
        let (combine, workgroup_memory) = combine(self.shares);
        let parts = [
            shader!("tensor/view"),
            shader!("rows/norm/statistics"),
            shader!("rows/norm/norm_backward"),
            combine,
        ];
        let parts = [&parts, gate_parts(self.gating)].concat();
        gated(self.declare(), self.gating)
            .u32("WORKGROUP", workgroup)
            .u32("ROW_LANES", lanes)
            .bool("CENTRED", self.centred)
            .bool("ACCUMULATES", self.accumulates)
            .bool("IN_FOURS", self.width == Width::Four)
            .kernel(&parts, workgroup, workgroup_memory)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        ROWS.into_iter().flat_map(|rows| {
            WIDTHS.into_iter().flat_map(move |width| {
                FLOATS.into_iter().flat_map(move |x| {
                    FLOATS.into_iter().flat_map(move |gradient| {
                        [false, true].into_iter().flat_map(move |centred| {
                            let plain = NormBackward {
                                shares: rows,
                                centred,
                                x,
                                residual: None,
                                weight: None,
                                bias: None,
                                gate: None,
                                d_out: Some(gradient),
                                d_sum: None,
                                d_x: Some(gradient),
                                d_gate: None,
                                statistics: None,
                                gating: None,
                                accumulates: false,
                                width,
                            };
                            let some = Some(x);
                            let whole = NormBackward {
                                residual: some,
                                weight: some,
                                d_sum: Some(gradient),
                                statistics: Some(DType::F32),
                                accumulates: true,
                                ..plain
                            };
                            let only = NormBackward {
                                d_x: None,
                                d_out: None,
                                statistics: Some(DType::F32),
                                ..plain
                            };
                            let gated = gates(x).map(move |(gate, gating)| NormBackward {
                                residual: None,
                                d_sum: None,
                                bias: some.filter(|_| centred && !gating.first),
                                gate: Some(gate),
                                d_gate: Some(gradient),
                                gating: Some(gating),
                                accumulates: gating.first,
                                ..whole
                            });
                            let others = [plain, whole, only, NormBackward { residual: some, ..only }];
                            others.into_iter().chain(gated)
                        })
                    })
                })
            })
        })
    }
}
