//! The host side of `indexer_scores.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, families, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The scores of a span of queries.
    IndexerScores, IndexerScoresCall
    tensors {
        // The kernel loads q and k as vec4 along their channels.
        q: One Read F32 width view,
        k: Opt Read F32 width view,
        // Four keys of 8 bits in a word, and their scales, if there is no k.
        k_words: Opt Read U32 one view,
        k_scales: Opt Read F32 one view,
        w: One Read F32 one view,
        ranges: One Read U32 one,
        scores: One Write F32 store view,
    }
    numbers {
        /// The first batch entry and the first query of the span, in `ranges`.
        span: [u32; 2],
        all_queries: u32,
        heads: u32,
        queries: u32,
        keys: u32,
        columns: u32,
        head_dim: u32,
        /// Channels with one scale.
        group: u32,
        scale: f32,
        neg_inf: f32,
    }
    variant {
        tiles: IndexerTiles,
        width: Width,
        store: Width,
    }
}

/// The tiles of the kernel. `heads` is the heads of each query in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum IndexerTiles {
    /// 64 rows by 64 keys. A row is a head of a query.
    Gpu { heads: u32 },
    /// `queries` queries by 4 · `lanes` keys.
    Cpu { heads: u32, queries: u32, lanes: u32 },
}

/// Rows and keys of a workgroup on GPUs, and channels of a step.
const TILE: u32 = 64;
const TILE_K: u32 = 16;
/// The vectors of products that an invocation of a software driver holds.
const CPU_ROWS: u32 = 32;

impl IndexerTiles {
    /// The tiles for this many heads, queries and keys.
    pub fn of(heads: usize, queries: usize, keys: usize, cpu: bool) -> Self {
        let power = |n: usize, least: u32, most: u32| {
            (n.min(most as usize).next_power_of_two() as u32).clamp(least, most)
        };
        if !cpu {
            return IndexerTiles::Gpu { heads: power(heads, 4, TILE) };
        }
        let heads = power(heads, 1, CPU_ROWS);
        let lanes = if keys < 128 { 8 } else { 32 };
        IndexerTiles::Cpu { heads, queries: power(queries, 1, CPU_ROWS / heads), lanes }
    }

    /// Queries and keys of a workgroup.
    pub fn size(self) -> [usize; 2] {
        match self {
            IndexerTiles::Gpu { heads } => [(TILE / heads) as usize, TILE as usize],
            IndexerTiles::Cpu { queries, lanes, .. } => [queries as usize, 4 * lanes as usize],
        }
    }

    /// The tiles with which tests check every kernel.
    const ALL: [Self; 11] = [
        IndexerTiles::Gpu { heads: 4 },
        IndexerTiles::Gpu { heads: 8 },
        IndexerTiles::Gpu { heads: 16 },
        IndexerTiles::Gpu { heads: 32 },
        IndexerTiles::Gpu { heads: 64 },
        IndexerTiles::Cpu { heads: 1, queries: 32, lanes: 8 },
        IndexerTiles::Cpu { heads: 2, queries: 16, lanes: 32 },
        IndexerTiles::Cpu { heads: 4, queries: 8, lanes: 32 },
        IndexerTiles::Cpu { heads: 8, queries: 4, lanes: 8 },
        IndexerTiles::Cpu { heads: 16, queries: 2, lanes: 32 },
        IndexerTiles::Cpu { heads: 32, queries: 1, lanes: 32 },
    ];
}

impl Variant for IndexerScores {
    const LABEL: &'static str = "attention.indexer_scores";

    fn describe(&self) -> Kernel {
        let declared = self.declare().bool("SCORES_IN_FOURS", self.store == Width::Four);
        let shared = [
            shader!("tensor/view"),
            shader!("selected/indexer/queries"),
            shader!("selected/indexer/indexer_scores"),
        ];
        let with = |tiles| [shared.as_slice(), &[tiles]].concat();
        match self.tiles {
            IndexerTiles::Gpu { heads } => declared
                .u32("TILE", TILE)
                .u32("TILE_K", TILE_K)
                .u32("HEADS", heads)
                .kernel(&with(shader!("selected/indexer/gpu")), 256, 2 * (TILE * TILE_K * 4 + 8 * 16)),
            IndexerTiles::Cpu { heads, queries, lanes } => declared
                .u32("LANES", lanes)
                .u32("QUERIES", queries)
                .u32("HEADS", heads)
                .kernel(&with(shader!("selected/indexer/cpu")), lanes, 0),
        }
    }

    fn families(&self) -> Families {
        let keys = self.k.unwrap_or(DType::F32);
        families(&[Some(Family::Indexers)], &[self.q, keys, self.w])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        IndexerTiles::ALL.into_iter().flat_map(move |tiles| {
            FLOATS.into_iter().flat_map(move |dtype| {
                let words = (None, Some(DType::U32), Some(dtype));
                [(Some(dtype), None, None), words].into_iter().flat_map(move |(k, k_words, k_scales)| {
                    WIDTHS.into_iter().flat_map(move |width| {
                        WIDTHS.map(|store| IndexerScores {
                            q: dtype,
                            k,
                            k_words,
                            k_scales,
                            w: dtype,
                            ranges: DType::U32,
                            scores: DType::F32,
                            tiles,
                            width,
                            store,
                        })
                    })
                })
            })
        })
    }
}
