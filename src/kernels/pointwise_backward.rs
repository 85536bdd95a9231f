//! Twin of `pointwise_backward.wgsl`.

use super::pointwise::{NO_OTHER, WORKGROUP, activation_parts, x_width};
use super::shader;
use crate::block_config::Activation;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PointwiseBackward {
    pub activation: Option<Activation>,
    pub x: DType,
    /// What f(x) was multiplied by, which the gradient of x needs.
    pub other: Option<DType>,
    pub d_out: DType,
    pub d_x: Option<DType>,
    pub d_other: Option<DType>,
    pub accumulates: bool,
    /// Width of loads and stores of all tensors; `x` and `d_x` have width one if `x` repeats.
    pub width: Width,
    /// True if `x` has one channel, which is that of all channels of a row: an invocation has a row.
    pub x_repeats: bool,
}

params! {
    pub(crate) struct Params {
        x: View,
        other: View,
        d_out: View,
        d_x: View,
        d_other: View,
        dim: u32,
        fours: u32,
        work: u32,
        step: u32,
    }
}

const NO_D_X: &str = "fn d_x_at4(o: u32, stride: u32, n: u32) -> vec4<f32> { return vec4<f32>(); }
fn d_x_store(o: u32, x: f32) {}
fn d_x_store4(o: u32, x: vec4<f32>) {}
";
const NO_D_OTHER: &str = "fn d_other_at4(o: u32, stride: u32, n: u32) -> vec4<f32> { return vec4<f32>(); }
fn d_other_store(o: u32, x: f32) {}
fn d_other_store4(o: u32, x: vec4<f32>) {}
";

impl PointwiseBackward {
    pub fn describe(&self) -> Kernel {
        let of_x = x_width(self.width, self.x_repeats);
        let mut bindings = vec![Binding::read("x", self.x, of_x)];
        let mut parts = vec![shader!("tensor/view"), shader!("pointwise_backward")];
        match self.other {
            Some(other) => bindings.push(Binding::read("other", other, self.width)),
            None => parts.push(NO_OTHER),
        }
        bindings.push(Binding::read("d_out", self.d_out, self.width));
        match self.d_x {
            Some(dtype) => bindings.push(Binding::write("d_x", dtype, of_x)),
            None => parts.push(NO_D_X),
        }
        match self.d_other {
            Some(dtype) => bindings.push(Binding::write("d_other", dtype, self.width)),
            None => parts.push(NO_D_OTHER),
        }
        parts.extend(activation_parts(self.activation));
        let constants = [
            Constant::U32("WORKGROUP", WORKGROUP as u32),
            Constant::Bool("TIMES", self.other.is_some()),
            Constant::Bool("D_X", self.d_x.is_some()),
            Constant::Bool("D_OTHER", self.d_other.is_some()),
            Constant::Bool("ACCUMULATES", self.accumulates),
            Constant::Bool("IN_FOURS", self.width == Width::Four),
            Constant::Bool("X_REPEATS", self.x_repeats),
        ];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let f32 = DType::F32;
        let plain = PointwiseBackward {
            activation: None,
            x: f32,
            other: None,
            d_out: f32,
            d_x: Some(f32),
            d_other: None,
            accumulates: false,
            width: Width::Four,
            x_repeats: false,
        };
        let activations = [None].into_iter().chain(Activation::ALL.map(Some));
        let of_f32 = activations.flat_map(move |activation| {
            [(None, Some(f32), None), (Some(f32), Some(f32), Some(f32)), (None, None, Some(f32))]
                .into_iter()
                .flat_map(move |(other, d_x, d_other)| {
                    super::WIDTHS.map(|width| PointwiseBackward {
                        activation,
                        other,
                        d_x,
                        d_other,
                        accumulates: width == Width::One,
                        width,
                        ..plain
                    })
                })
        });
        let of_others = super::FLOATS.into_iter().flat_map(move |dtype| {
            super::FLOATS.into_iter().flat_map(move |gradient| {
                super::WIDTHS.into_iter().flat_map(move |width| {
                    [false, true].map(|accumulates| PointwiseBackward {
                        activation: Some(Activation::Silu),
                        x: dtype,
                        other: Some(dtype),
                        d_out: gradient,
                        d_x: Some(gradient),
                        d_other: Some(gradient),
                        accumulates,
                        width,
                        x_repeats: false,
                    })
                })
            })
        });
        // Gates: the gradient of the gate, of the gated tensor, of both.
        let gates = super::FLOATS.into_iter().flat_map(move |dtype| {
            [(Some(f32), None), (None, Some(dtype)), (Some(f32), Some(dtype))].into_iter().flat_map(
                move |(d_x, d_other)| {
                    [(Width::One, true), (Width::Four, true), (Width::Four, false)].map(
                        |(width, x_repeats)| PointwiseBackward {
                            activation: Some(Activation::Sigmoid),
                            x: dtype,
                            other: d_x.map(|_| dtype),
                            d_out: f32,
                            d_x,
                            d_other,
                            accumulates: false,
                            width,
                            x_repeats,
                        },
                    )
                },
            )
        });
        of_f32.chain(of_others).chain(gates)
    }
}
