//! The host side of `causal_conv_state.wgsl`.

use super::causal_conv::Filter;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The states after causal convolutions.
    CausalConvState, CausalConvStateCall
    tensors {
        x: One Read F32 width view,
        numbers: Opt Read U32 one view,
        slots: Opt Read U32 one view,
        initial: Opt Read F32 width view,
        state: One Write F32 width view,
    }
    numbers {
        channels: u32,
        length: u32,
        sequences: u32,
        states: u32,
        /// The distance from an invocation's sequence to its next one, and the same for channels.
        step: u32,
        across: u32,
    }
    variant {
        filter: Filter,
        in_place: bool,
        width: Width,
    }
}

impl Variant for CausalConvState {
    const LABEL: &'static str = "attention.causal_conv_state";
    const FAMILIES: Families = Families::of(Family::CausalConvs);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("rows/causal_conv/slots"),
            shader!("rows/causal_conv/sequence"),
            shader!("rows/causal_conv/causal_conv_state"),
        ];
        self.filter.constants(self.declare(), self.width).bool("IN_PLACE", self.in_place).kernel(
            &parts,
            self.filter.workgroup,
            0,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        Filter::all().filter(|(filter, _)| filter.columns > 1).flat_map(|(filter, width)| {
            let types = FLOATS.into_iter().filter(move |x| filter.columns == 4 || *x == DType::F32);
            types.flat_map(move |x| {
                let plain = CausalConvState {
                    x,
                    numbers: filter.sequences.numbers(),
                    slots: None,
                    initial: None,
                    state: DType::F32,
                    filter,
                    in_place: false,
                    width,
                };
                let with_initial = CausalConvState { initial: Some(x), state: x, ..plain };
                let slots = CausalConvState { slots: Some(DType::U32), in_place: true, ..plain };
                [plain, with_initial, slots]
            })
        })
    }
}
