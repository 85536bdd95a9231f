//! Twin of `project.wgsl`.

use std::fmt::Write as _;

use super::pointwise::activation_parts;
use super::{matmul, shader};
use crate::block_config::Activation;
use crate::kernel::{Binding, Constant, Kernel, Slots, Width, params, shared};
use crate::plan::Tiles;
use crate::tensor::DType;

/// Projections that one dispatch can hold: queries, keys, values.
pub(crate) const PARTS: usize = 3;

/// What changes the text of the projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Project {
    pub tiles: Tiles,
    pub x: Slots,
    pub w: Slots,
    pub bias: Option<Slots>,
    pub y: DType,
    /// Whether x loads in fours along its features and W along features (or columns, if `w_along_columns`).
    pub width: Width,
    /// Whether W is contiguous along its output columns: `[in, out]` in memory.
    pub w_along_columns: bool,
    pub store: Width,
    /// What becomes of the product and its bias.
    pub activation: Option<Activation>,
}

params! {
    /// The WGSL `ProjectPart`.
    pub(crate) struct ProjectPart {
        x: [u32; 4],
        w: [u32; 4],
        y: [u32; 4],
        x_offset: u32,
        y_offset: u32,
        bias_offset: u32,
        bias_stride: u32,
        features: u32,
        dim: u32,
        heads: u32,
        has_bias: u32,
        x_slot: u32,
        w_slot: u32,
        bias_slot: u32,
        rows: u32,
        length: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

params! {
    pub(crate) struct Params {
        parts: [ProjectPart; PARTS],
        batches: u32,
        narrow: u32,
        z_heads: u32,
        pad: u32,
    }
}
shared! { [ProjectPart; PARTS] = "array<ProjectPart, 3>" }

impl Project {
    pub fn describe(&self) -> Kernel {
        let mut bindings = Vec::new();
        let mut slots = String::new();
        // Matrix units take f16 as it is.
        let native = matches!(self.tiles, Tiles::Matrix { .. });
        for (slots_of, name, alias) in [(self.x, "x", "A_ELEMENT"), (self.w, "w", "B_ELEMENT")] {
            slots_of.declare_as(name, self.width, native, &mut bindings, &mut slots);
            let element = if native { slots_of.dtype.operand() } else { "f32" };
            let _ = writeln!(slots, "alias {alias} = {element};");
        }
        match self.bias {
            Some(bias) => bias.declare_as("bias", Width::One, false, &mut bindings, &mut slots),
            None => slots.push_str("fn bias_at(slot: u32, o: u32) -> f32 { return 0.0; }\n"),
        }
        bindings.push(Binding::write("y", self.y, self.store));
        matmul::describe::<Params>(matmul::MatmulStage {
            tiles: self.tiles,
            a_along_m: false,
            b_along_n: self.w_along_columns,
            repairs: false,
            constants: vec![
                Constant::Bool("IN_FOURS", self.width == Width::Four),
                Constant::Bool("HAS_BIAS", self.bias.is_some()),
                Constant::Bool("Y_IN_FOURS", self.store == Width::Four),
            ],
            bindings,
            parts: &[&[shader!("project"), &slots], activation_parts(self.activation)].concat(),
        })
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let slots = |count, dtype| Slots { count, dtype };
        let buffers = [(1, 1, None), (1, 3, Some(3)), (3, 1, Some(1))];
        let of = move |tiles, [x, w, bias, y]: [DType; 4]| {
            buffers.into_iter().flat_map(move |(xs, ws, biases)| {
                super::WIDTHS.into_iter().flat_map(move |width| {
                    [false, true].into_iter().map(move |w_along_columns| Project {
                        tiles,
                        x: slots(xs, x),
                        w: slots(ws, w),
                        bias: biases.map(|n| slots(n, bias)),
                        y,
                        width,
                        w_along_columns,
                        store: width,
                        activation: None,
                    })
                })
            })
        };
        let [f32, f16, bf16] = super::FLOATS;
        let plain = matmul::ALL
            .into_iter()
            .flat_map(move |tiles| super::FLOATS.into_iter().flat_map(move |d| of(tiles, [d, d, f32, d])));
        let matrix = matmul::MATRIX.into_iter().flat_map(move |tiles| of(tiles, [f16; 4]));
        let rounded =
            [[f32; 4], [f16, f32, f16, f32]].into_iter().flat_map(move |d| of(matmul::MATRIX[2], d));
        let bf16 = of(matmul::ALL[0], [bf16; 4]);
        let one = slots(1, f32);
        let activated = matmul::ALL.into_iter().chain([matmul::MATRIX[1]]).flat_map(move |tiles| {
            Activation::ALL.into_iter().flat_map(move |activation| {
                super::WIDTHS.map(|width| Project {
                    tiles,
                    x: one,
                    w: one,
                    bias: Some(one),
                    y: f32,
                    width: if matches!(tiles, Tiles::Matrix(_)) { Width::Four } else { width },
                    w_along_columns: false,
                    store: width,
                    activation: Some(activation),
                })
            })
        });
        plain.chain(matrix).chain(rounded).chain(bf16).chain(activated)
    }
}
