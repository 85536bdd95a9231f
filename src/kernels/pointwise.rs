//! Twin of `pointwise.wgsl`.

use super::shader;
use crate::block_config::Activation;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What is done with the second tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Join {
    /// There is none.
    Alone,
    Times,
    Plus,
}

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Pointwise {
    pub activation: Option<Activation>,
    pub join: Join,
    pub x: DType,
    pub other: Option<DType>,
    pub out: DType,
    /// Width of loads and stores: of `other` and `out`, and of `x` unless `x` repeats.
    pub width: Width,
    /// True if `x` has one channel, which is that of all channels of a row.
    pub x_repeats: bool,
}

/// How `x` is loaded: one channel that repeats is not loaded as a vector.
pub(super) fn x_width(width: Width, x_repeats: bool) -> Width {
    if x_repeats { Width::One } else { width }
}

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: usize = 64;

params! {
    pub(crate) struct Params {
        x: View,
        other: View,
        out: View,
        dim: u32,
        fours: u32,
        work: u32,
        step: u32,
    }
}

/// The text of an activation and its slope.
pub(crate) fn activation_parts(activation: Option<Activation>) -> &'static [&'static str] {
    const EXP: &str = shader!("activation/exp");
    match activation {
        None => &[shader!("activation/none")],
        Some(Activation::Relu) => &[shader!("activation/relu")],
        Some(Activation::Gelu) => &[EXP, shader!("activation/gelu")],
        Some(Activation::GeluTanh) => &[EXP, shader!("activation/gelu_tanh")],
        Some(Activation::Silu) => &[EXP, shader!("activation/silu")],
        Some(Activation::Sigmoid) => &[EXP, shader!("activation/sigmoid")],
    }
}

impl Pointwise {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![Binding::read("x", self.x, x_width(self.width, self.x_repeats))];
        let mut parts = vec![shader!("tensor/view"), shader!("pointwise")];
        match self.other {
            Some(other) => bindings.push(Binding::read("other", other, self.width)),
            None => parts.push(NO_OTHER),
        }
        bindings.push(Binding::write("out", self.out, self.width));
        parts.extend(activation_parts(self.activation));
        let constants = [
            Constant::U32("WORKGROUP", WORKGROUP as u32),
            Constant::Bool("TIMES", self.join == Join::Times),
            Constant::Bool("PLUS", self.join == Join::Plus),
            Constant::Bool("IN_FOURS", self.width == Width::Four),
        ];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let [f32, f16, bf16] = super::FLOATS;
        let joins = [(Join::Alone, None), (Join::Times, Some(f32)), (Join::Plus, Some(f32))];
        let activations = [None].into_iter().chain(Activation::ALL.map(Some));
        let of_f32 = activations.flat_map(move |activation| {
            joins.into_iter().flat_map(move |(join, other)| {
                super::WIDTHS.map(|width| Pointwise {
                    activation,
                    join,
                    x: f32,
                    other,
                    out: f32,
                    width,
                    x_repeats: false,
                })
            })
        });
        let of_others = [[f16, f16, f16], [bf16, bf16, bf16], [f16, f32, f32], [f32, bf16, f16]];
        let of_others = of_others.into_iter().flat_map(|[x, other, out]| {
            super::WIDTHS.map(|width| Pointwise {
                activation: Some(Activation::Silu),
                join: Join::Times,
                x,
                other: Some(other),
                out,
                width,
                x_repeats: false,
            })
        });
        let gates = [f32, f16].into_iter().flat_map(|dtype| {
            super::WIDTHS.map(|width| Pointwise {
                activation: Some(Activation::Sigmoid),
                join: Join::Times,
                x: dtype,
                other: Some(dtype),
                out: dtype,
                width,
                x_repeats: true,
            })
        });
        of_f32.chain(of_others).chain(gates)
    }
}

/// What stands for a tensor that there is not.
pub(super) const NO_OTHER: &str =
    "fn other_at4(o: u32, stride: u32, n: u32) -> vec4<f32> { return vec4<f32>(); }\n";
