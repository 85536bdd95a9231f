//! The host side of `norm.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{Declared, FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::matmul::{Activation, activation_parts};
use crate::rows::plan::Rows;
use crate::tensor::DType;

/// The gate of a norm: the rows, before or after the norm, are multiplied by `f(gate)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Gating {
    pub activation: Activation,
    /// True if the gate comes before the norm.
    pub first: bool,
}

/// Adds the constant of a gate.
pub(super) fn gated(declared: Declared, gating: Option<Gating>) -> Declared {
    declared.bool("GATE_FIRST", gating.is_some_and(|gating| gating.first))
}

/// The text of a gate's activation.
pub(super) fn gate_parts(gating: Option<Gating>) -> &'static [&'static str] {
    activation_parts(gating.map(|gating| gating.activation))
}

/// The gates with which tests check every kernel, each with the type of its tensor.
pub(super) fn gates(dtype: DType) -> impl Iterator<Item = (DType, Gating)> {
    let of = move |activation, first| (dtype, Gating { activation, first });
    let all = Activation::ALL.into_iter().filter(move |_| dtype == DType::F32);
    let silu = [false, true].map(|first| of(Activation::Silu, first));
    silu.into_iter().chain(all.map(move |activation| of(activation, false)))
}

kernel! {
    /// LayerNorm or RMSNorm of each row.
    Norm, NormCall
    tensors {
        x: Source Read F32 width view,
        residual: Opt Read F32 width view,
        weight: Opt Read F32 width,
        bias: Opt Read F32 width,
        gate: Opt Read F32 width view,
        out: One Write F32 width view,
        sum: Opt Write F32 width view,
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
        width: Width,
    }
}

/// The text that adds the sums of a row, and its workgroup memory.
pub(crate) fn combine(rows: Rows) -> (&'static str, u32) {
    match rows.lanes {
        1 => (shader!("rows/norm/row_per_invocation"), 0),
        lanes => (shader!("rows/norm/row_per_workgroup"), lanes * 8),
    }
}

/// The distributions of rows with which tests check every kernel.
pub(crate) const ROWS: [Rows; 4] = [
    Rows { workgroup: 8, lanes: 1 },
    Rows { workgroup: 8, lanes: 8 },
    Rows { workgroup: 32, lanes: 32 },
    Rows { workgroup: 256, lanes: 256 },
];

/// Replaces the loads of x if the norm is in place.
const X_IS_OUT: &str =
    "fn x_at4(o: u32, stride: u32, n: u32) -> vec4<f32> { return out_at4(o, stride, n); }\n";

impl Variant for Norm {
    const LABEL: &'static str = "attention.norm";
    const FAMILIES: Families = Families::of(Family::Norms);

    fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.shares;
        let (combine, workgroup_memory) = combine(self.shares);
        let parts =
            [shader!("tensor/view"), shader!("rows/norm/statistics"), shader!("rows/norm/norm"), combine];
        let parts = [&parts, gate_parts(self.gating)].concat();
        gated(self.declare(), self.gating)
            .instead_of("x", X_IS_OUT)
            .u32("WORKGROUP", workgroup)
            .u32("ROW_LANES", lanes)
            .bool("CENTRED", self.centred)
            .bool("IN_FOURS", self.width == Width::Four)
            .kernel(&parts, workgroup, workgroup_memory)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        ROWS.into_iter().flat_map(|rows| {
            WIDTHS.into_iter().flat_map(move |width| {
                let of = move |dtype, out: DType, centred| {
                    let some = Some(dtype);
                    let plain = Norm {
                        shares: rows,
                        centred,
                        x: some,
                        residual: None,
                        weight: None,
                        bias: None,
                        gate: None,
                        out,
                        sum: None,
                        gating: None,
                        width,
                    };
                    let scaled = Norm { weight: some, bias: some, ..plain };
                    let weighted = Norm { weight: some, ..plain };
                    let in_place = [plain, weighted, scaled].map(|norm| Norm { x: None, ..norm });
                    let in_place = in_place.into_iter().filter(move |_| dtype == out);
                    let others = [plain, weighted, Norm { residual: some, sum: Some(out), ..scaled }];
                    let gated = gates(dtype).map(move |(gate, gating)| Norm {
                        gate: Some(gate),
                        gating: Some(gating),
                        ..if centred { scaled } else { weighted }
                    });
                    others.into_iter().chain(in_place).chain(gated)
                };
                FLOATS.into_iter().flat_map(move |dtype| {
                    let [_, f16, bf16] = FLOATS;
                    let others = if dtype == DType::F32 { vec![dtype, f16, bf16] } else { vec![dtype] };
                    others.into_iter().flat_map(move |out| {
                        [false, true].into_iter().flat_map(move |centred| of(dtype, out, centred))
                    })
                })
            })
        })
    }
}
