//! Twin of `norm.wgsl`.

use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::Rows;
use crate::tensor::DType;

/// What changes the text of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Norm {
    pub rows: Rows,
    /// LayerNorm, or RMSNorm.
    pub centred: bool,
    /// That of `out`, if the norm is in place.
    pub x: DType,
    /// `out` holds x: one binding for both.
    pub in_place: bool,
    pub residual: Option<DType>,
    pub weight: Option<DType>,
    pub bias: Option<DType>,
    pub out: DType,
    pub sum: Option<DType>,
    pub width: Width,
}

params! {
    pub(crate) struct Params {
        x: View,
        residual: View,
        out: View,
        sum: View,
        affine: [u32; 4],
        features: u32,
        heads: u32,
        length: u32,
        rows: u32,
        step: u32,
        eps: f32,
        pad0: u32,
        pad1: u32,
    }
}

/// How the rows of a norm are shared out: the text, and its workgroup memory.
pub(super) fn combine(rows: Rows) -> (&'static str, u32) {
    match rows.lanes {
        1 => (shader!("norm/row_per_invocation"), 0),
        lanes => (shader!("norm/row_per_workgroup"), lanes * 8),
    }
}

/// The rows that are worth checking every kernel with.
pub(super) const ROWS: [Rows; 4] = [
    Rows { workgroup: 8, lanes: 1 },
    Rows { workgroup: 8, lanes: 8 },
    Rows { workgroup: 32, lanes: 32 },
    Rows { workgroup: 256, lanes: 256 },
];

const AT4: &str = "(o: u32, stride: u32, n: u32) -> vec4<f32> { return vec4<f32>(); }\n";

/// A tensor that is read, if it is there; else what stands for it.
pub(super) fn read_or_none(
    name: &'static str,
    dtype: Option<DType>,
    width: Width,
    bindings: &mut Vec<Binding>,
    text: &mut String,
) {
    match dtype {
        Some(dtype) => bindings.push(Binding::read(name, dtype, width)),
        None => text.push_str(&format!("fn {name}_at4{AT4}")),
    }
}

/// Stands for the binding of x where the norm is in place.
const X_IS_OUT: &str =
    "fn x_at4(o: u32, stride: u32, n: u32) -> vec4<f32> { return out_at4(o, stride, n); }\n";

impl Norm {
    pub fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.rows;
        let width = self.width;
        let mut none = String::new();
        let mut bindings = Vec::new();
        if self.in_place {
            none.push_str(X_IS_OUT);
        } else {
            bindings.push(Binding::read("x", self.x, width));
        }
        read_or_none("residual", self.residual, width, &mut bindings, &mut none);
        read_or_none("weight", self.weight, width, &mut bindings, &mut none);
        read_or_none("bias", self.bias, width, &mut bindings, &mut none);
        bindings.push(Binding::write("out", self.out, width));
        match self.sum {
            Some(sum) => bindings.push(Binding::write("sum", sum, width)),
            None => {
                none.push_str("fn sum_store(o: u32, x: f32) {}\nfn sum_store4(o: u32, x: vec4<f32>) {}\n")
            }
        }
        let (combine, workgroup_memory) = combine(self.rows);
        let constants = [
            Constant::U32("WORKGROUP", workgroup),
            Constant::U32("ROW_LANES", lanes),
            Constant::Bool("CENTRED", self.centred),
            Constant::Bool("HAS_RESIDUAL", self.residual.is_some()),
            Constant::Bool("HAS_WEIGHT", self.weight.is_some()),
            Constant::Bool("HAS_BIAS", self.bias.is_some()),
            Constant::Bool("HAS_SUM", self.sum.is_some()),
            Constant::Bool("IN_FOURS", width == Width::Four),
        ];
        let parts = [shader!("tensor/view"), shader!("norm/statistics"), shader!("norm"), combine, &none];
        Kernel { workgroup_memory, ..Kernel::new::<Params>(&constants, bindings, &parts, workgroup) }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        ROWS.into_iter().flat_map(|rows| {
            super::WIDTHS.into_iter().flat_map(move |width| {
                let of = move |dtype, out: DType, centred| {
                    let some = Some(dtype);
                    let plain = Norm {
                        rows,
                        centred,
                        x: dtype,
                        in_place: false,
                        residual: None,
                        weight: None,
                        bias: None,
                        out,
                        sum: None,
                        width,
                    };
                    let scaled = Norm { weight: some, bias: some, ..plain };
                    let weighted = Norm { weight: some, ..plain };
                    let in_place = [plain, weighted, scaled].map(|norm| Norm { in_place: true, ..norm });
                    let in_place = in_place.into_iter().filter(move |norm| norm.x == norm.out);
                    let others = [plain, weighted, Norm { residual: some, sum: Some(out), ..scaled }];
                    others.into_iter().chain(in_place)
                };
                super::FLOATS.into_iter().flat_map(move |dtype| {
                    let [_, f16, bf16] = super::FLOATS;
                    let others = if dtype == DType::F32 { vec![dtype, f16, bf16] } else { vec![dtype] };
                    others.into_iter().flat_map(move |out| {
                        [false, true].into_iter().flat_map(move |centred| of(dtype, out, centred))
                    })
                })
            })
        })
    }
}
