//! The host side of `causal_conv_backward.wgsl`.

use super::causal_conv::Filter;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, Width, kernel, shader};
use crate::matmul::{Activation, activation_parts};
use crate::tensor::DType;

kernel! {
    /// The gradients of the rows of a causal convolution, or of its initial state.
    CausalConvBackward, CausalConvBackwardCall
    tensors {
        // Without an activation the gradient does not depend on x, bias and initial.
        x: Opt Read F32 width view,
        weight: One Read F32 one view,
        bias: Opt Read F32 one view,
        numbers: Opt Read U32 one view,
        initial: Opt Read F32 width view,
        d_out: One Read F32 width view,
        d_final: Opt Read F32 width view,
        d_rows: One Write F32 width view,
    }
    numbers {
        channels: u32,
        length: u32,
        sequences: u32,
        /// Rows of a unit of work, and units of a batch entry.
        tile: u32,
        tiles: u32,
        units: u32,
        /// The distance from an invocation's unit to its next one, and the same for channels.
        step: u32,
        across: u32,
    }
    variant {
        filter: Filter,
        activation: Option<Activation>,
        /// True for the gradient of the initial state.
        of_state: bool,
        accumulates: bool,
        width: Width,
    }
}

impl Variant for CausalConvBackward {
    const LABEL: &'static str = "attention.causal_conv_backward";
    const FAMILIES: Families = Families::of(Family::CausalConvGradients);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("rows/causal_conv/initial"),
            shader!("rows/causal_conv/sequence"),
            shader!("rows/causal_conv/filter"),
            shader!("rows/causal_conv/causal_conv_backward"),
        ];
        let parts = [&parts, activation_parts(self.activation)].concat();
        self.filter
            .constants(self.declare(), self.width)
            .bool("ACTIVATED", self.activation.is_some())
            .bool("OF_STATE", self.of_state)
            .bool("ACCUMULATES", self.accumulates)
            .kernel(&parts, self.filter.workgroup, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        Filter::all().flat_map(|(filter, width)| {
            let types = FLOATS.into_iter().filter(move |x| filter.columns == 4 || *x == DType::F32);
            types.flat_map(move |x| {
                let plain = CausalConvBackward {
                    x: None,
                    weight: x,
                    bias: None,
                    numbers: filter.sequences.numbers(),
                    initial: None,
                    d_out: x,
                    d_final: None,
                    d_rows: x,
                    filter,
                    activation: None,
                    of_state: false,
                    accumulates: false,
                    width,
                };
                let (some, silu) = (Some(x), Some(Activation::Silu));
                let activated = CausalConvBackward { x: some, bias: some, activation: silu, ..plain };
                if filter.columns == 1 {
                    return vec![plain, activated];
                }
                let whole =
                    CausalConvBackward { initial: some, d_final: some, accumulates: true, ..activated };
                let of_state = CausalConvBackward { of_state: true, ..whole };
                let mut all = vec![plain, activated, whole, of_state];
                if filter.columns == 4 && x == DType::F32 {
                    all.extend(
                        Activation::ALL.map(|activation| CausalConvBackward {
                            activation: Some(activation),
                            ..activated
                        }),
                    );
                }
                all
            })
        })
    }
}
