//! The host side of `recurrent_scores.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::linear_attention::plan::LinearTiles;
use crate::tensor::DType;

kernel! {
    /// The products of the rows of a chunk.
    RecurrentScores, RecurrentScoresCall
    tensors {
        memory: One Write F32 four,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        tiles: LinearTiles,
        /// True if products decay from the row of the key to the row of the query.
        decayed: bool,
        /// True if each channel has its own decay.
        by_channel: bool,
        /// True if products have the factor β of their key.
        rates: bool,
        /// True if the scores are multiplied by the products.
        multiplies: bool,
    }
}

impl Variant for RecurrentScores {
    const LABEL: &'static str = "attention.recurrent_scores";
    const FAMILIES: Families = Families::of(Family::Recurrence);

    fn describe(&self) -> Kernel {
        Pieces::tiled(self.declare(), self.tiles)
            .bool("IS_DECAYED", self.decayed)
            .bool("IS_BY_CHANNEL", self.by_channel)
            .bool("HAS_RATES", self.rates)
            .bool("MULTIPLIES_SCORES", self.multiplies)
            .rows()
            .products()
            .text(shader!("recurrent/decays"))
            .text(shader!("recurrent/recurrent_scores"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        LinearTiles::ALL.into_iter().flat_map(|tiles| {
            [
                (true, false, true, false),
                (true, false, false, false),
                (true, false, false, true),
                (false, true, true, false),
                (false, false, false, false),
            ]
            .map(|(decayed, by_channel, rates, multiplies)| RecurrentScores {
                memory: DType::F32,
                tiles,
                decayed,
                by_channel,
                rates,
                multiplies,
            })
        })
    }
}
