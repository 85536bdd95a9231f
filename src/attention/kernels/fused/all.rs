//! Every variant of the fused kernel that is compiled ahead: each value of each axis, not all
//! combinations.

use super::Fused;
use crate::attention::plan::{FusedMatrix, FusedTiles};
use crate::cache::kernels::cache::CacheVariant;
use crate::cache::storage::{LayoutKind, StorageKind};
use crate::device::Fragment;
use crate::kernel::{FLOATS, WIDTHS, Width};
use crate::mask::Id;
use crate::mask::kernels::MaskVariant;
use crate::mask::kernels::dropout::DropoutKind;
use crate::tensor::DType;

pub(super) fn all() -> Vec<Fused> {
    let mut all: Vec<_> = FusedTiles::MASKED.into_iter().flat_map(masked).collect();
    all.extend(FusedTiles::all().into_iter().flat_map(typed));
    for fragment in [Fragment::Eight, Fragment::Sixteen] {
        let tiles = || FusedMatrix::all(fragment).into_iter().map(FusedTiles::Matrix);
        all.extend(tiles().flat_map(matrix_typed));
        // Tiles for subgroups of 32 and of 64. Masks and caches use registers that the fragments
        // need.
        all.extend(tiles().take(4).flat_map(matrix_masked));
        let planned = FusedMatrix::planned(fragment).into_iter().map(FusedTiles::Matrix);
        all.extend(planned.map(|tiles| plain(tiles).with_tensors(DType::F16)));
    }
    all.extend(additive());
    all.extend(FLOATS.into_iter().flat_map(far));
    all.extend(FusedTiles::all().into_iter().flat_map(|tiles| listed(plain(tiles))));
    all.extend(FusedTiles::MASKED.into_iter().flat_map(cached));
    let mixed = [[StorageKind::Q8, StorageKind::Q4], [StorageKind::F16, StorageKind::Gaussian4]];
    let storages = StorageKind::ALL.into_iter().map(|storage| [storage; 2]).chain(mixed);
    for storages in std::iter::once(None).chain(storages.map(Some)) {
        all.extend(FusedTiles::decode(storages).into_iter().flat_map(|tiles| decode(tiles, storages)));
    }
    // Some tiles are in several lists.
    let mut seen = std::collections::HashSet::new();
    all.retain(|fused| seen.insert(*fused));
    all
}

/// Returns the kernel for f32 tensors loaded as vec4, without options.
fn plain(tiles: FusedTiles) -> Fused {
    Fused {
        q: DType::F32,
        k: Some(DType::F32),
        v: Some(DType::F32),
        cache_k: None,
        cache_v: None,
        sequence_table: None,
        score_vector: tiles.is_additive().then_some(DType::F32),
        partial: None,
        out: Some(DType::F32),
        lse: None,
        mask: MaskVariant::default(),
        drop: DropoutKind::None,
        tiles,
        cached: None,
        words: false,
        width: Width::Four,
        store: Width::Four,
        wide: false,
        contiguous: false,
        listed: false,
    }
}

/// Every tile of additive scores with all types and widths. Masks and splits use one tile per
/// variant.
fn additive() -> Vec<Fused> {
    let [few, many, cpu, shared, ..] = FusedTiles::ADDITIVE;
    let vectors = FLOATS.map(|dtype| Fused { score_vector: Some(dtype), ..plain(many).with_tensors(dtype) });
    let splits = [few, shared].map(|tiles| plain(tiles).split());
    let mut all: Vec<_> = FusedTiles::ADDITIVE.into_iter().flat_map(typed).collect();
    // The score vector uses one of the buffers for masks.
    all.extend([many, cpu].into_iter().flat_map(masked).filter(|fused| fused.mask.bindings().len() <= 3));
    all.extend(vectors.into_iter().chain(splits));
    all
}

/// `base` with every mask, with a score function, and with every kind of dropout and an lse.
fn with_masks(base: Fused) -> impl Iterator<Item = Fused> {
    let masks = MaskVariant::all().into_iter().chain(MaskVariant::listed_score_mod());
    let masked = masks.map(move |mask| Fused { mask, ..base });
    masked.chain(DropoutKind::ALL.into_iter().map(move |drop| Fused { drop, lse: Some(DType::F32), ..base }))
}

fn masked(tiles: FusedTiles) -> impl Iterator<Item = Fused> {
    with_masks(plain(tiles))
}

/// Every dtype and every width of loads and stores.
fn typed(tiles: FusedTiles) -> Vec<Fused> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for width in WIDTHS {
            all.extend(WIDTHS.map(|store| Fused { width, store, ..plain(tiles).with_tensors(dtype) }));
        }
        let one = Fused { width: Width::One, contiguous: true, ..plain(tiles).with_tensors(dtype) };
        all.extend(one.loads_by_channel().then_some(one));
    }
    all
}

fn matrix_typed(tiles: FusedTiles) -> impl Iterator<Item = Fused> {
    let of =
        move |dtype| WIDTHS.map(|width| Fused { width, store: width, ..plain(tiles).with_tensors(dtype) });
    // Matrix units do not multiply BF16.
    [DType::F32, DType::F16].into_iter().flat_map(of)
}

fn matrix_masked(tiles: FusedTiles) -> Vec<Fused> {
    let halves = plain(tiles).with_tensors(DType::F16);
    let mut all: Vec<_> = with_masks(halves).collect();
    all.push(halves.split());
    all.extend(listed(halves));
    all.extend(CacheVariant::all().map(|cache| causal_in(cache, halves)));
    all
}

/// The kernels whose text changes for far elements.
fn far(dtype: DType) -> impl Iterator<Item = Fused> {
    let of = move |tiles| WIDTHS.map(|width| Fused { width, ..plain(tiles).with_tensors(dtype) });
    FusedTiles::MASKED.into_iter().flat_map(of).filter_map(|narrow| narrow.widened())
}

fn causal_in(cache: CacheVariant, base: Fused) -> Fused {
    Fused { mask: MaskVariant::with_rules([Id::Causal]), ..base }.in_cache(cache)
}

/// Split keys, every cache, and every mask in one cache.
fn cached(tiles: FusedTiles) -> Vec<Fused> {
    let splits = plain(tiles).split();
    let mut all = vec![splits];
    for cache in CacheVariant::all() {
        let narrow = causal_in(cache, plain(tiles));
        all.push(narrow);
        all.extend(narrow.widened());
    }
    let cache = CacheVariant { groups: [32; 2], ..CacheVariant::of([StorageKind::Q8; 2], LayoutKind::Ring) };
    let masks = MaskVariant::all().into_iter().filter(MaskVariant::fits_caches);
    all.extend(masks.map(|mask| Fused { mask, ..splits }.in_cache(cache)));
    all
}

/// Lists of keys, with sinks too, and split.
fn listed(base: Fused) -> [Fused; 3] {
    let of = |rules: &[Id]| {
        let mask = MaskVariant::with_rules(rules.iter().copied());
        Fused { mask, listed: true, lse: Some(DType::F32), ..base }
    };
    let plain = of(&[Id::Lengths]);
    [plain, of(&[Id::Lengths, Id::SinkLogits]), plain.split()]
}

/// Decoding from tensors, or from pages of `storages`.
fn decode(tiles: FusedTiles, storages: Option<[StorageKind; 2]>) -> Vec<Fused> {
    let cache = storages.map(|storages| CacheVariant::of(storages, LayoutKind::Paged));
    let plain = Fused { words: storages.is_none() && tiles.takes_words(), ..plain(tiles) };
    let masked = |mask: MaskVariant| {
        let masked = Fused { mask, ..plain };
        cache.map_or(masked, |cache| masked.in_cache(cache))
    };
    let mut narrow = vec![
        Fused { lse: Some(DType::F32), ..masked(MaskVariant::default()) },
        masked(MaskVariant::with_rules([Id::Causal, Id::Tree]).softcapped()).split(),
    ];
    for dtype in
        [DType::F16, DType::BF16].into_iter().filter(|dtype| storages == Some([StorageKind::of(*dtype); 2]))
    {
        let halves = Fused { words: true, ..plain.with_tensors(dtype) };
        narrow.extend([halves, halves.split()]);
    }
    // Rows that do not lie in vectors.
    narrow.extend(plain.words.then_some(Fused { words: false, width: Width::One, ..plain }));
    narrow.extend(listed(masked(MaskVariant::default())));
    let mut all: Vec<_> = narrow.iter().filter_map(Fused::widened).collect();
    all.extend(narrow);
    all
}
