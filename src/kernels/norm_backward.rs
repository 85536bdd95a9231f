//! Twin of `norm_backward.wgsl`.

use super::norm::{ROWS, combine, read_or_none};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::Rows;
use crate::tensor::DType;

/// What changes the text of the gradient of a norm's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NormBackward {
    pub rows: Rows,
    /// LayerNorm, or RMSNorm.
    pub centred: bool,
    pub x: DType,
    pub residual: Option<DType>,
    pub weight: Option<DType>,
    pub d_out: DType,
    pub d_sum: Option<DType>,
    pub d_x: Option<DType>,
    /// Whether the statistics of rows are wanted.
    pub statistics: bool,
    pub accumulates: bool,
    pub width: Width,
}

params! {
    pub(crate) struct Params {
        x: View,
        residual: View,
        d_out: View,
        d_sum: View,
        d_x: View,
        weight: [u32; 2],
        features: u32,
        heads: u32,
        length: u32,
        rows: u32,
        step: u32,
        eps: f32,
    }
}

const NO_D_X: &str = "fn d_x_at4(o: u32, stride: u32, n: u32) -> vec4<f32> { return vec4<f32>(); }
fn d_x_store(o: u32, x: f32) {}
fn d_x_store4(o: u32, x: vec4<f32>) {}
";

impl NormBackward {
    pub fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.rows;
        let width = self.width;
        let mut none = String::new();
        let mut bindings = vec![Binding::read("x", self.x, width)];
        read_or_none("residual", self.residual, width, &mut bindings, &mut none);
        read_or_none("weight", self.weight, width, &mut bindings, &mut none);
        // Without d_x nothing but the statistics is wanted.
        let d_out = self.d_x.is_some().then_some(self.d_out);
        read_or_none("d_out", d_out, width, &mut bindings, &mut none);
        read_or_none("d_sum", self.d_sum, width, &mut bindings, &mut none);
        match self.d_x {
            Some(d_x) => bindings.push(Binding::write("d_x", d_x, width)),
            None => none.push_str(NO_D_X),
        }
        if self.statistics {
            bindings.push(Binding::write("statistics", DType::F32, Width::One));
        } else {
            none.push_str("fn statistics_store(o: u32, x: f32) {}\n");
        }
        let (combine, workgroup_memory) = combine(self.rows);
        let constants = [
            Constant::U32("WORKGROUP", workgroup),
            Constant::U32("ROW_LANES", lanes),
            Constant::Bool("CENTRED", self.centred),
            Constant::Bool("HAS_RESIDUAL", self.residual.is_some()),
            Constant::Bool("HAS_WEIGHT", self.weight.is_some()),
            Constant::Bool("HAS_D_SUM", self.d_sum.is_some()),
            Constant::Bool("HAS_D_X", self.d_x.is_some()),
            Constant::Bool("HAS_STATISTICS", self.statistics),
            Constant::Bool("ACCUMULATES", self.accumulates),
            Constant::Bool("IN_FOURS", width == Width::Four),
        ];
        let parts =
            [shader!("tensor/view"), shader!("norm/statistics"), shader!("norm_backward"), combine, &none];
        Kernel { workgroup_memory, ..Kernel::new::<Params>(&constants, bindings, &parts, workgroup) }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        ROWS.into_iter().flat_map(|rows| {
            super::WIDTHS.into_iter().flat_map(move |width| {
                super::FLOATS.into_iter().flat_map(move |x| {
                    super::FLOATS.into_iter().flat_map(move |gradient| {
                        [false, true].into_iter().flat_map(move |centred| {
                            let plain = NormBackward {
                                rows,
                                centred,
                                x,
                                residual: None,
                                weight: None,
                                d_out: gradient,
                                d_sum: None,
                                d_x: Some(gradient),
                                statistics: false,
                                accumulates: false,
                                width,
                            };
                            let some = Some(x);
                            let whole = NormBackward {
                                residual: some,
                                weight: some,
                                d_sum: Some(gradient),
                                statistics: true,
                                accumulates: true,
                                ..plain
                            };
                            let only =
                                NormBackward { d_x: None, d_out: DType::F32, statistics: true, ..plain };
                            [plain, whole, only, NormBackward { residual: some, ..only }]
                        })
                    })
                })
            })
        })
    }
}
