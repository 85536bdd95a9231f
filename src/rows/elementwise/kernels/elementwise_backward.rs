//! The host side of `elementwise_backward.wgsl`.

use super::elementwise::x_width;
use crate::device::{Families, Family};
use crate::kernel::vec4_grid::WORKGROUP;
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::matmul::{Activation, activation_parts};
use crate::tensor::DType;

kernel! {
    /// The gradients of `f(x)` and of `f(x) · other`.
    ElementwiseBackward, ElementwiseBackwardCall
    tensors {
        x: One Read F32 x_width view,
        // The gradient of x depends on it.
        other: Opt Read F32 width view,
        d_out: One Read F32 width view,
        d_x: Opt Write F32 x_width view,
        d_other: Opt Write F32 width view,
    }
    numbers {
        dim: u32,
        /// Groups of four channels in a row; 1 if `x` repeats.
        fours: u32,
        /// Groups of four channels in all rows of a head; rows if `x` repeats.
        work: u32,
        /// Invocations that share this work.
        step: u32,
    }
    variant {
        activation: Option<Activation>,
        accumulates: bool,
        width: Width,
        /// `One` if `x` repeats.
        x_width: Width,
        /// True if `x` has one channel, which is repeated over all channels of a row. Then each
        /// invocation processes a row.
        x_repeats: bool,
    }
}

impl Variant for ElementwiseBackward {
    const LABEL: &'static str = "attention.elementwise_backward";
    const FAMILIES: Families = Families::of(Family::ElementwiseGradients);

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("rows/elementwise/elementwise_backward")];
        let parts = [&parts, activation_parts(self.activation)].concat();
        self.declare()
            .u32("WORKGROUP", WORKGROUP as u32)
            .bool("ACCUMULATES", self.accumulates)
            .bool("IN_FOURS", self.width == Width::Four)
            .bool("X_REPEATS", self.x_repeats)
            .kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let f32 = DType::F32;
        let activations = [None].into_iter().chain(Activation::ALL.map(Some));
        let of_f32 = activations.flat_map(move |activation| {
            [(None, Some(f32), None), (Some(f32), Some(f32), Some(f32)), (None, None, Some(f32))]
                .into_iter()
                .flat_map(move |(other, d_x, d_other)| {
                    WIDTHS.map(|width| ElementwiseBackward {
                        x: f32,
                        other,
                        d_out: f32,
                        d_x,
                        d_other,
                        activation,
                        accumulates: width == Width::One,
                        width,
                        x_width: width,
                        x_repeats: false,
                    })
                })
        });
        let of_others = FLOATS.into_iter().flat_map(move |dtype| {
            FLOATS.into_iter().flat_map(move |gradient| {
                WIDTHS.into_iter().flat_map(move |width| {
                    [false, true].map(|accumulates| ElementwiseBackward {
                        x: dtype,
                        other: Some(dtype),
                        d_out: gradient,
                        d_x: Some(gradient),
                        d_other: Some(gradient),
                        activation: Some(Activation::Silu),
                        accumulates,
                        width,
                        x_width: width,
                        x_repeats: false,
                    })
                })
            })
        });
        // Gates: the gradient of the gate, of the gated tensor, and of both.
        let gates = FLOATS.into_iter().flat_map(move |dtype| {
            [(Some(f32), None), (None, Some(dtype)), (Some(f32), Some(dtype))].into_iter().flat_map(
                move |(d_x, d_other)| {
                    [(Width::One, true), (Width::Four, true), (Width::Four, false)].map(
                        |(width, x_repeats)| ElementwiseBackward {
                            x: dtype,
                            other: d_x.map(|_| dtype),
                            d_out: f32,
                            d_x,
                            d_other,
                            activation: Some(Activation::Sigmoid),
                            accumulates: false,
                            width,
                            x_width: x_width(width, x_repeats),
                            x_repeats,
                        },
                    )
                },
            )
        });
        of_f32.chain(of_others).chain(gates)
    }
}
