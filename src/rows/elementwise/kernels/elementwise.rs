//! The host side of `elementwise.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::vec4_grid::WORKGROUP;
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::matmul::{Activation, activation_parts};

/// The use of the second tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Join {
    /// There is no second tensor.
    Alone,
    Times,
    Plus,
}

kernel! {
    /// `f(x)`, `f(x) · other` or `f(x) + other`.
    Elementwise, ElementwiseCall
    tensors {
        x: One Read F32 x_width view,
        other: Opt Read F32 width view,
        out: One Write F32 width view,
    }
    numbers {
        dim: u32,
        /// Groups of four channels in a row.
        fours: u32,
        /// Groups of four channels in all rows of a head.
        work: u32,
        /// Invocations that share these groups.
        step: u32,
    }
    variant {
        activation: Option<Activation>,
        join: Join,
        width: Width,
        /// `One` if `x` has one channel, which is repeated over all channels of a row.
        x_width: Width,
    }
}

/// The width of loads of `x`. A repeated channel is not loaded as a vector.
pub(crate) fn x_width(width: Width, x_repeats: bool) -> Width {
    if x_repeats { Width::One } else { width }
}

impl Variant for Elementwise {
    const LABEL: &'static str = "attention.elementwise";
    const FAMILIES: Families = Families::of(Family::Elementwise);

    fn describe(&self) -> Kernel {
        let parts =
            [shader!("tensor/view"), shader!("tensor/store_four"), shader!("rows/elementwise/elementwise")];
        let parts = [&parts, activation_parts(self.activation)].concat();
        self.declare()
            .u32("WORKGROUP", WORKGROUP as u32)
            .bool("TIMES", self.join == Join::Times)
            .bool("PLUS", self.join == Join::Plus)
            .bool("IN_FOURS", self.width == Width::Four)
            .kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let [f32, f16, bf16] = FLOATS;
        let joins = [(Join::Alone, None), (Join::Times, Some(f32)), (Join::Plus, Some(f32))];
        let activations = [None].into_iter().chain(Activation::ALL.map(Some));
        let of_f32 = activations.flat_map(move |activation| {
            joins.into_iter().flat_map(move |(join, other)| {
                WIDTHS.map(|width| Elementwise {
                    x: f32,
                    other,
                    out: f32,
                    activation,
                    join,
                    width,
                    x_width: width,
                })
            })
        });
        let of_others = [[f16, f16, f16], [bf16, bf16, bf16], [f16, f32, f32], [f32, bf16, f16]];
        let of_others = of_others.into_iter().flat_map(|[x, other, out]| {
            WIDTHS.map(|width| Elementwise {
                x,
                other: Some(other),
                out,
                activation: Some(Activation::Silu),
                join: Join::Times,
                width,
                x_width: width,
            })
        });
        let gates = [f32, f16].into_iter().flat_map(|dtype| {
            WIDTHS.map(|width| Elementwise {
                x: dtype,
                other: Some(dtype),
                out: dtype,
                activation: Some(Activation::Sigmoid),
                join: Join::Times,
                width,
                x_width: Width::One,
            })
        });
        of_f32.chain(of_others).chain(gates)
    }
}
