//! Twin of `fused.wgsl`.

use super::cache::{CacheParams, CacheVariant};
use super::dropout::DropoutKind;
use super::{mask, shader};
use crate::device::Fragment;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::mask::Id;
use crate::plan::{FusedMatrix, FusedTiles};
use crate::storage::{LayoutKind, StorageKind};
use crate::tensor::DType;

/// What changes the text of the fused kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fused {
    pub tiles: FusedTiles,
    /// Where keys and values are, if not in tensors.
    pub cache: Option<CacheVariant>,
    /// Whether tensors of halves are loaded as vectors of words.
    pub halves: bool,
    /// Whether keys are split among workgroups.
    pub splits: bool,
    pub dtype: DType,
    /// Whether q, k and v load in fours along their channels.
    pub width: Width,
    /// Whether out stores in fours.
    pub store: Width,
    /// Whether element indices of k or v reach 2^28, or a side of the cache 2^30 bytes, which the forms for software
    /// drivers must know.
    pub wide: bool,
    pub lse: bool,
    pub drop: DropoutKind,
    pub mask: mask::MaskVariant,
}

params! {
    pub(crate) struct Params {
        q: View,
        k: View,
        v: View,
        out: View,
        lse: View,
        dropout: View,
        mask: mask::MaskParams,
        first: [u32; 4],
        seed: [u32; 2],
        heads: u32,
        kv_heads: u32,
        group: u32,
        head_dim: u32,
        value_dim: u32,
        dropout_threshold: u32,
        dropout_scale: f32,
        scale: f32,
        splits: u32,
        stats: u32,
        cache: CacheParams,
    }
}

/// What `fused/tile_state.wgsl` declares, where there is no map to ask.
pub(super) const NO_BLOCKS: &str = "const HIDDEN: u32 = 0u;
const FULL: u32 = 2u;
fn tile_state(b: u32, kv_head: u32, first: u32, last: u32, from_key: u32, to_key: u32) -> u32 {
    return 1u;
}
";

impl Fused {
    fn bindings(&self) -> Vec<Binding> {
        let mut bindings = vec![Binding::read("q", self.dtype, self.width)];
        match self.cache {
            Some(_) => bindings.extend(CacheVariant::bindings()),
            None if self.halves => {
                bindings.extend(["k", "v"].map(|name| Binding::read(name, DType::U32, Width::Four)));
            }
            None => bindings.extend(["k", "v"].map(|name| Binding::read(name, self.dtype, self.width))),
        }
        if self.splits {
            bindings.push(Binding::write("partial", DType::F32, Width::Four));
        } else {
            bindings.push(Binding::write("out", self.dtype, self.store));
        }
        if self.lse {
            bindings.push(Binding::write("lse", DType::F32, Width::One));
        }
        bindings.extend(self.mask.bindings());
        bindings.extend(self.drop.binding());
        bindings
    }

    /// How words hold channels, where they hold several.
    fn storage_kind(&self) -> Option<StorageKind> {
        self.cache.map(|cache| cache.storage).or(self.halves.then_some(StorageKind::F16))
    }

    pub fn describe(&self) -> Kernel {
        let bindings = self.bindings();
        let mut constants = vec![
            Constant::Bool("IN_FOURS", self.width == Width::Four),
            Constant::Bool("OUT_IN_FOURS", self.store == Width::Four),
            Constant::Bool("HAS_LSE", self.lse),
            Constant::Bool("SPLITS", self.splits),
            Constant::U32("SPLIT_LEAST", self.tiles.split_least()),
            Constant::U32("SPLIT_STEP", self.tiles.split_step()),
            Constant::U32("VECTORS", self.storage_kind().map_or(1, |storage| storage.per_word() as u32)),
            Constant::Bool("PER_PAIR_MASK", self.mask.is_per_pair()),
            Constant::Bool("NATURAL_SCORES", self.mask.is_per_pair()),
            Constant::Bool("HAS_DROPOUT", self.drop != DropoutKind::None),
            Constant::Bool("HAS_BLOCKS", self.mask.has(Id::Blocks)),
            // Appended keys lie past the interval that a full block keeps.
            Constant::Bool("FULL_IS_PLAIN", !self.mask.mods_full_blocks() && !self.mask.appended),
        ];
        let mut memory = "";
        let (core, invocations) = match self.tiles {
            FusedTiles::Gpu { rows, workgroup, slice, v_keys } => {
                constants.extend([
                    Constant::U32("ROWS", rows),
                    Constant::U32("KEYS", FusedTiles::KEYS),
                    Constant::U32("CHUNK", FusedTiles::CHUNK),
                    Constant::U32("WORKGROUP", workgroup),
                    Constant::U32("SLICE", slice),
                    Constant::U32("V_KEYS", v_keys),
                    Constant::U32("P_KEYS", FusedTiles::P_KEYS),
                ]);
                ([shader!("fused/gpu"), shader!("fused/tiles")], workgroup)
            }
            FusedTiles::Cpu { rows, keys, head_vectors, value_vectors } => {
                constants.extend([
                    Constant::U32("ROWS", rows),
                    Constant::U32("LANES", FusedTiles::LANES),
                    Constant::U32("KEYS", keys),
                    Constant::U32("HEAD_VECTORS", head_vectors),
                    Constant::U32("VALUE_VECTORS", value_vectors),
                ]);
                ([shader!("fused/cpu"), ""], FusedTiles::LANES)
            }
            FusedTiles::DecodeGpu(decode) => {
                constants.extend([
                    Constant::U32("ROWS", decode.rows),
                    Constant::U32("LANE_ROWS", decode.lane_rows),
                    Constant::U32("WORKGROUP", decode.workgroup),
                    Constant::U32("KEY_LANES", decode.key_lanes),
                    Constant::U32("KEY_FOURS", decode.key_fours),
                    Constant::U32("V_SPLIT", decode.v_split),
                    Constant::U32("ROUND", decode.round),
                    Constant::Bool("SHARED", decode.shared),
                    Constant::U32("K_BLOCKS", decode.loads.k),
                    Constant::U32("V_BLOCKS", decode.loads.v),
                ]);
                let reduce = if decode.subgroups {
                    shader!("decode/reduce_subgroup")
                } else {
                    shader!("decode/reduce_workgroup")
                };
                ([shader!("decode/gpu"), reduce], decode.workgroup)
            }
            FusedTiles::DecodeCpu(decode) => {
                constants.extend([
                    Constant::U32("ROWS", decode.rows),
                    Constant::U32("LANES", FusedTiles::LANES),
                    Constant::U32("KEYS", decode.keys),
                    Constant::U32("STEP", decode.step),
                    Constant::U32("CHUNK", decode.chunk),
                    Constant::U32("K_BLOCKS", decode.loads.k),
                    Constant::U32("V_BLOCKS", decode.loads.v),
                ]);
                ([shader!("decode/cpu"), ""], FusedTiles::LANES)
            }
            FusedTiles::Matrix(tiles) => {
                constants.extend([
                    Constant::Fragments(tiles.fragment),
                    Constant::U32("SUB_ROWS", tiles.sub_rows),
                    Constant::U32("SUBGROUPS", tiles.subgroups),
                    Constant::U32("KEYS", tiles.keys),
                    Constant::U32("WORKGROUP", tiles.workgroup()),
                    Constant::U32("HEAD", tiles.head),
                    Constant::U32("VALUE", tiles.value),
                    Constant::Bool("EXACT", tiles.exact),
                ]);
                memory = super::memory_of(tiles.fragment);
                ([shader!("fused/matrix"), shader!("fused/tiles")], tiles.workgroup())
            }
        };
        let mut stubs = String::new();
        if !self.lse {
            stubs.push_str("fn lse_store(o: u32, x: f32) {}\n");
        }
        stubs.push_str(if self.splits {
            "fn out_store(o: u32, x: f32) {}\nfn out_store4(o: u32, x: vec4<f32>) {}\n"
        } else {
            "fn partial_store4(o: u32, x: vec4<f32>) {}\n"
        });
        // GPUs check no indices that narrow ones would save.
        constants.push(Constant::Bool("WIDE", self.wide || !self.tiles.is_cpu()));
        let keys = match self.cache {
            Some(cache) => {
                constants.extend(cache.constants());
                [
                    shader!("cache/sequence_table"),
                    shader!("keys/cache"),
                    shader!("keys/packed_words"),
                    shader!("keys/storage"),
                ]
            }
            None if self.halves => {
                constants.push(Constant::U32("STORAGE_KIND", StorageKind::F16 as u32));
                ["", shader!("keys/f16_words"), shader!("keys/packed_words"), shader!("keys/storage")]
            }
            None => ["", shader!("keys/tensors"), "", ""],
        };
        let blocks = if self.mask.has(Id::Blocks) { shader!("fused/tile_state") } else { NO_BLOCKS };
        let parts = [
            shader!("tensor/view"),
            shader!("softmax/online"),
            shader!("fused"),
            shader!("tensor/out"),
            core[0],
            core[1],
            memory,
            shader!("cache/params"),
            keys[0],
            keys[1],
            keys[2],
            keys[3],
            &stubs,
            blocks,
            self.drop.wgsl(),
            &self.mask.wgsl(),
        ];
        Kernel {
            workgroup_memory: self.tiles.workgroup_memory(),
            ..Kernel::new::<Params>(&constants, bindings, &parts, invocations)
        }
    }

    /// The same for far elements, where those change the text.
    fn widened(&self) -> Option<Self> {
        self.tiles.is_cpu().then_some(Fused { wide: true, ..*self })
    }

    pub fn all() -> Vec<Self> {
        let plain = |tiles| Fused {
            tiles,
            cache: None,
            halves: false,
            splits: false,
            dtype: DType::F32,
            width: Width::Four,
            store: Width::Four,
            wide: false,
            lse: false,
            drop: DropoutKind::None,
            mask: mask::MaskVariant::default(),
        };
        let mut all = Vec::new();
        for tiles in FusedTiles::MASKED {
            all.extend(mask::MaskVariant::all().into_iter().map(|mask| Fused { mask, ..plain(tiles) }));
            all.extend(DropoutKind::ALL.map(|drop| Fused { drop, lse: true, ..plain(tiles) }));
        }
        for tiles in FusedTiles::all() {
            for dtype in super::FLOATS {
                for width in super::WIDTHS {
                    all.extend(super::WIDTHS.map(|store| Fused { dtype, width, store, ..plain(tiles) }));
                }
            }
        }
        for fragment in [Fragment::Eight, Fragment::Sixteen] {
            for tiles in FusedMatrix::all(fragment).into_iter().map(FusedTiles::Matrix) {
                for dtype in super::FLOATS {
                    all.extend(super::WIDTHS.map(|width| Fused {
                        dtype,
                        width,
                        store: width,
                        ..plain(tiles)
                    }));
                }
            }
            // Of subgroups of 32 and of 64: masks and caches take registers from what the fragments are to fit in.
            for tiles in FusedMatrix::all(fragment).into_iter().take(4).map(FusedTiles::Matrix) {
                let halves = Fused { dtype: DType::F16, ..plain(tiles) };
                all.extend(mask::MaskVariant::all().into_iter().map(|mask| Fused { mask, ..halves }));
                all.extend(DropoutKind::ALL.map(|drop| Fused { drop, lse: true, ..halves }));
                all.push(Fused { splits: true, ..halves });
                for cache in CacheVariant::all() {
                    let mask = mask::MaskVariant::with_rules([Id::Causal]);
                    all.push(Fused { cache: Some(cache), mask: mask.in_cache(&cache), ..halves });
                }
            }
        }
        for dtype in super::FLOATS {
            let of = |tiles| super::WIDTHS.map(|width| Fused { dtype, width, ..plain(tiles) });
            all.extend(FusedTiles::MASKED.into_iter().flat_map(of).filter_map(|narrow| narrow.widened()));
        }
        for tiles in FusedTiles::MASKED {
            all.push(Fused { splits: true, ..plain(tiles) });
            for cache in CacheVariant::all() {
                let mask = mask::MaskVariant::with_rules([Id::Causal]);
                let narrow = Fused { cache: Some(cache), mask: mask.in_cache(&cache), ..plain(tiles) };
                all.push(narrow);
                all.extend(narrow.widened());
            }
            let cache =
                CacheVariant { storage: StorageKind::Q8, layout_kind: LayoutKind::Ring, groups: [32, 32] };
            for mask in mask::MaskVariant::all().into_iter().filter(mask::MaskVariant::fits_caches) {
                all.push(Fused {
                    cache: Some(cache),
                    splits: true,
                    mask: mask.in_cache(&cache),
                    ..plain(tiles)
                });
            }
        }
        for storage in std::iter::once(None).chain(StorageKind::ALL.map(Some)) {
            let of = |storage: StorageKind| CacheVariant {
                storage,
                layout_kind: LayoutKind::Paged,
                groups: if storage.is_scaled() { [32, 64] } else { [1; 2] },
            };
            let cache = storage.map(of);
            for tiles in FusedTiles::decode(storage) {
                let masked = |mask: mask::MaskVariant| Fused {
                    cache,
                    splits: true,
                    mask: cache.map_or(mask, |cache| mask.in_cache(&cache)),
                    ..plain(tiles)
                };
                let mut narrow = vec![
                    Fused { splits: false, lse: true, ..masked(mask::MaskVariant::default()) },
                    masked(mask::MaskVariant::with_rules([Id::Causal, Id::Tree]).softcapped()),
                ];
                if storage == Some(StorageKind::F16) {
                    let halves = Fused { cache: None, halves: true, dtype: DType::F16, ..plain(tiles) };
                    narrow.extend([halves, Fused { splits: true, ..halves }]);
                }
                all.extend(narrow.iter().filter_map(Fused::widened));
                all.extend(narrow);
            }
        }
        all
    }
}
