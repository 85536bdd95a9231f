//! The host side of `recurrent_chain.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::linear_attention::plan::LinearTiles;
use crate::tensor::DType;

kernel! {
    /// The states of chunks, one after the other.
    RecurrentChain, RecurrentChainCall
    tensors {
        chunks: One Read U32 one,
        checkpoints: Opt Write F32 four,
        carry: One Write F32 four,
        memory: One Write F32 four,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        tiles: LinearTiles,
        /// True if rows first change by their products with the state.
        products: bool,
        delta: bool,
        /// True for the gradients, from the last chunk to the first.
        reverse: bool,
        /// True if the first state is read from a checkpoint, false if it is stored there.
        resumes: bool,
    }
}

/// The tiles: a workgroup computes all rows of its columns.
pub(crate) const ALL_TILES: [LinearTiles; 3] =
    [LinearTiles { workgroup: 64, lanes: 4, rows: 4 }, LinearTiles::ALL[1], LinearTiles::ALL[2]];

impl Variant for RecurrentChain {
    const LABEL: &'static str = "attention.recurrent_chain";
    const FAMILIES: Families = Families::of(Family::Recurrence);

    fn describe(&self) -> Kernel {
        let synchronise = if self.tiles.workgroup == self.tiles.lanes { "" } else { "storageBarrier();" };
        let has_checkpoints = self.checkpoints.is_some();
        Pieces::tiled(self.declare(), self.tiles)
            .bool("HAS_PRODUCTS", self.products)
            .bool("IS_DELTA", self.delta)
            .bool("IS_REVERSE", self.reverse)
            .bool("READS_CHECKPOINTS", has_checkpoints && self.resumes)
            .bool("WRITES_CHECKPOINTS", has_checkpoints && !self.resumes)
            .chunks()
            .products()
            .text(shader!("recurrent/lanes"))
            .text(format!("fn synchronise() {{ {synchronise} }}\n"))
            .text(format!("const SIGN: f32 = {}1.0;\n", if self.reverse { "" } else { "-" }))
            .text(shader!("recurrent/recurrent_chain"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        ALL_TILES.into_iter().flat_map(|tiles| {
            let of = move |products, delta, reverse, checkpoints: Option<bool>| RecurrentChain {
                chunks: DType::U32,
                checkpoints: checkpoints.map(|_| DType::F32),
                carry: DType::F32,
                memory: DType::F32,
                tiles,
                products,
                delta,
                reverse,
                resumes: checkpoints.unwrap_or(false),
            };
            [
                of(true, true, false, None),
                of(false, false, false, None),
                of(true, true, false, Some(false)),
                of(true, true, false, Some(true)),
                of(true, true, true, None),
                of(true, false, true, None),
            ]
        })
    }
}
