//! The host side of `causal_conv.wgsl`, and the parts that it shares with the other kernels of
//! causal convolutions.

use crate::device::{Families, Family};
use crate::kernel::{Declared, FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::matmul::{Activation, activation_parts};
use crate::tensor::DType;

/// The rows of sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Sequences {
    /// All rows of each batch entry.
    All,
    /// The first rows of each batch entry.
    Lengths,
    /// Parts of one batch entry.
    Packed,
}

impl Sequences {
    pub(super) const ALL: [Sequences; 3] = [Sequences::All, Sequences::Lengths, Sequences::Packed];

    /// The type of `numbers`.
    pub(super) fn numbers(self) -> Option<DType> {
        (self != Sequences::All).then_some(DType::U32)
    }
}

/// The constants that all kernels of causal convolutions have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Filter {
    /// Columns of the weight: the rows of a sum.
    pub columns: u32,
    pub sequences: Sequences,
    /// Invocations of a workgroup, and the number of them that share a unit of work.
    pub workgroup: u32,
    pub lanes: u32,
}

/// The largest number of columns of a weight.
pub(crate) const MOST_COLUMNS: usize = 8;

impl Filter {
    /// Adds the constants. `width` is that of all tensors with rows of channels.
    pub(super) fn constants(self, declared: Declared, width: Width) -> Declared {
        declared
            .u32("WIDTH", self.columns)
            .u32("WORKGROUP", self.workgroup)
            .u32("LANES", self.lanes)
            .bool("LENGTHS", self.sequences == Sequences::Lengths)
            .bool("PACKED", self.sequences == Sequences::Packed)
            .bool("IN_FOURS", width == Width::Four)
    }

    /// Filters and widths that cover each value of each field, for tests.
    pub(super) fn all() -> impl Iterator<Item = (Self, Width)> {
        (1..=MOST_COLUMNS as u32).flat_map(|columns| {
            Sequences::ALL.into_iter().flat_map(move |sequences| {
                let lanes = [[8, 8], [64, 8], [64, 64]][columns as usize % 3];
                let filter = Filter { columns, sequences, workgroup: lanes[0], lanes: lanes[1] };
                WIDTHS.map(|width| (filter, width))
            })
        })
    }
}

kernel! {
    /// A causal convolution of each channel.
    CausalConv, CausalConvCall
    tensors {
        x: One Read F32 width view,
        weight: One Read F32 one view,
        bias: Opt Read F32 one view,
        numbers: Opt Read U32 one view,
        slots: Opt Read U32 one view,
        initial: Opt Read F32 width view,
        out: One Write F32 width view,
        state: Opt Write F32 width view,
    }
    numbers {
        channels: u32,
        length: u32,
        sequences: u32,
        /// States in `initial` or `state`.
        states: u32,
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
        /// True if a unit of work is a sequence, whose state the kernel also writes.
        by_sequence: bool,
        in_place: bool,
        width: Width,
    }
}

impl Variant for CausalConv {
    const LABEL: &'static str = "attention.causal_conv";
    const FAMILIES: Families = Families::of(Family::CausalConvs);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("rows/causal_conv/slots"),
            shader!("rows/causal_conv/sequence"),
            shader!("rows/causal_conv/filter"),
            shader!("rows/causal_conv/causal_conv"),
        ];
        let parts = [&parts, activation_parts(self.activation)].concat();
        self.filter
            .constants(self.declare(), self.width)
            .bool("BY_SEQUENCE", self.by_sequence)
            .bool("IN_PLACE", self.in_place)
            .kernel(&parts, self.filter.workgroup, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        Filter::all().flat_map(|(filter, width)| {
            let [f32, f16, bf16] = FLOATS;
            let dtypes = match filter.columns {
                4 => vec![[f32, f32], [f16, f16], [bf16, bf16], [bf16, f32], [f32, bf16]],
                _ => vec![[f32, f32]],
            };
            dtypes.into_iter().flat_map(move |[x, other]| {
                let plain = CausalConv {
                    x,
                    weight: other,
                    bias: None,
                    numbers: filter.sequences.numbers(),
                    slots: None,
                    initial: None,
                    out: other,
                    state: None,
                    filter,
                    activation: None,
                    by_sequence: false,
                    in_place: false,
                    width,
                };
                let (some, silu) = (Some(other), Some(Activation::Silu));
                let whole = CausalConv { bias: some, initial: some, activation: silu, ..plain };
                if filter.columns == 1 {
                    return vec![plain, CausalConv { initial: None, ..whole }];
                }
                let steps = CausalConv { state: some, by_sequence: true, ..whole };
                let in_place = CausalConv { initial: None, in_place: true, ..steps };
                let slots = CausalConv { slots: Some(DType::U32), ..in_place };
                let mut all = vec![plain, whole, steps, in_place, slots];
                if filter.columns == 4 && x == DType::F32 {
                    all.extend(
                        Activation::ALL
                            .map(|activation| CausalConv { activation: Some(activation), ..plain }),
                    );
                }
                all
            })
        })
    }
}
