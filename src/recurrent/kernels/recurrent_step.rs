//! The host side of `recurrent_step.wgsl`.

use super::numbers::{Pieces, RecurrentForm, RecurrentNumbers};
use super::recurrent_chunks::CHUNK_WORDS;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, Width, kernel, shader};
use crate::linear_attention::plan::LinearTiles;
use crate::tensor::DType;

kernel! {
    /// A few tokens, one after the other.
    RecurrentStep, RecurrentStepCall
    tensors {
        q: One Read F32 one view,
        k: One Read F32 one view,
        v: One Read F32 width view,
        decay: Opt Read F32 one repeating,
        beta: Opt Read F32 one repeating,
        chunks: Opt Read U32 one,
        state: One Write F32 state_width view,
        written: One Write F32 width view,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        form: RecurrentForm,
        tiles: LinearTiles,
        /// True if the state before the call is in `state`.
        initial: bool,
        /// True if the table names the states of sequences.
        indices: bool,
        width: Width,
        state_width: Width,
    }
}

/// The tiles: a workgroup computes all rows of its columns.
pub(crate) const STEP_TILES: [LinearTiles; 3] = [
    LinearTiles { workgroup: 64, lanes: 4, rows: 1 },
    LinearTiles { workgroup: 8, lanes: 8, rows: 1 },
    LinearTiles { workgroup: 16, lanes: 16, rows: 1 },
];

impl Variant for RecurrentStep {
    const LABEL: &'static str = "attention.recurrent_step";
    const FAMILIES: Families = Families::of(Family::Recurrence);

    fn describe(&self) -> Kernel {
        let parts = if self.tiles.workgroup == self.tiles.lanes { 1 } else { self.tiles.workgroup };
        let in_fours = self.width == Width::Four;
        Pieces::new(self.declare(), self.tiles.workgroup)
            .u32("COLUMN_LANES", self.tiles.lanes)
            .u32("ROWS", self.tiles.rows)
            .form(self.form)
            .bool("HAS_INITIAL", self.initial)
            .bool("HAS_INDICES", self.indices)
            .u32("PARTS", parts)
            .u32("CHUNK_WORDS", CHUNK_WORDS as u32)
            .state("v", false, in_fours)
            .state("state", true, self.state_width == Width::Four)
            .state("written", true, in_fours)
            .text(shader!("recurrent/rates"))
            .text(shader!("recurrent/decays"))
            .text(shader!("recurrent/lanes"))
            .text(shader!("recurrent/recurrent_step"))
            .workgroup_memory(16 * parts as usize)
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |form: RecurrentForm, tiles, dtype, wide: [bool; 2], has: [bool; 3]| RecurrentStep {
            q: dtype,
            k: dtype,
            v: dtype,
            decay: (has[2] || form.by_channel).then_some(dtype),
            beta: form.delta.then_some(dtype),
            chunks: has[1].then_some(DType::U32),
            state: DType::F32,
            written: dtype,
            form,
            tiles,
            initial: has[0],
            indices: has[1],
            width: Width::of(wide[0]),
            state_width: Width::of(wide[1]),
        };
        let forms = STEP_TILES.into_iter().flat_map(move |tiles| {
            RecurrentForm::all().into_iter().flat_map(move |form| {
                [[false; 3], [true, false, true], [true; 3]]
                    .map(|has| of(form, tiles, DType::F32, [true, has[0]], has))
            })
        });
        let typed = FLOATS.into_iter().flat_map(move |dtype| {
            [[false, false], [true, false], [false, true]]
                .map(|wide| of(RecurrentForm::all()[0], STEP_TILES[0], dtype, wide, [true; 3]))
        });
        forms.chain(typed)
    }
}
