//! The host side of `causal_conv_sums.wgsl`.

use super::causal_conv::Filter;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, Width, kernel, shader};
use crate::matmul::{Activation, activation_parts};
use crate::tensor::DType;

kernel! {
    /// The partial sums for the gradients of the weight and the bias of a causal convolution.
    CausalConvSums, CausalConvSumsCall
    tensors {
        x: One Read F32 width view,
        // Without an activation the gradients do not depend on weight and bias.
        weight: Opt Read F32 one view,
        bias: Opt Read F32 one view,
        numbers: Opt Read U32 one view,
        initial: Opt Read F32 width view,
        d_out: One Read F32 width view,
        parts: One Write F32 one,
    }
    numbers {
        channels: u32,
        length: u32,
        sequences: u32,
        /// Rows of all batch entries, and of a partial sum.
        rows: u32,
        tile: u32,
        units: u32,
        /// The distance from an invocation's unit to its next one, and the same for channels.
        step: u32,
        across: u32,
    }
    variant {
        filter: Filter,
        activation: Option<Activation>,
        width: Width,
    }
}

impl Variant for CausalConvSums {
    const LABEL: &'static str = "attention.causal_conv_sums";
    const FAMILIES: Families = Families::of(Family::CausalConvGradients);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("rows/causal_conv/initial"),
            shader!("rows/causal_conv/sequence"),
            shader!("rows/causal_conv/filter"),
            shader!("rows/causal_conv/causal_conv_sums"),
        ];
        let parts = [&parts, activation_parts(self.activation)].concat();
        self.filter.constants(self.declare(), self.width).bool("ACTIVATED", self.activation.is_some()).kernel(
            &parts,
            self.filter.workgroup,
            0,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        Filter::all().flat_map(|(filter, width)| {
            let types = FLOATS.into_iter().filter(move |x| filter.columns == 4 || *x == DType::F32);
            types.flat_map(move |x| {
                let plain = CausalConvSums {
                    x,
                    weight: None,
                    bias: None,
                    numbers: filter.sequences.numbers(),
                    initial: None,
                    d_out: x,
                    parts: DType::F32,
                    filter,
                    activation: None,
                    width,
                };
                let some = Some(x);
                let initial = some.filter(|_| filter.columns > 1);
                let activations = Activation::ALL.into_iter().filter(move |activation| {
                    *activation == Activation::Silu || filter.columns == 4 && x == DType::F32
                });
                let activated = activations.map(move |activation| CausalConvSums {
                    weight: some,
                    bias: some,
                    initial,
                    activation: Some(activation),
                    ..plain
                });
                [plain].into_iter().chain(activated)
            })
        })
    }
}
