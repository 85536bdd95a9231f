//! Twin of `fused.wgsl`.

use super::cache::{CacheParams, Cached, Format, Placement};
use super::dropout::Drop;
use super::{mask, shader};
use crate::device::Fragment;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::{self, FusedMatrix, FusedTiles};
use crate::tensor::DType;

/// What changes the text of the fused kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fused {
    pub tiles: FusedTiles,
    /// Where keys and values are, if not in tensors.
    pub cache: Option<Cached>,
    /// Whether tensors of halves are loaded as vectors of words.
    pub halves: bool,
    /// Whether keys are split among workgroups.
    pub splits: bool,
    pub dtype: DType,
    /// Whether q, k and v load in fours along their channels.
    pub width: Width,
    /// Whether out stores in fours.
    pub put: Width,
    /// Whether element indices of k or v reach 2^28, or a side of the cache 2^30 bytes, which the forms for software
    /// drivers must know.
    pub wide: bool,
    pub lse: bool,
    pub drop: Drop,
    pub mask: mask::Parts,
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

/// What `shared/fused_blocks.wgsl` declares, where there is no map to ask.
const NO_BLOCKS: &str = "const HIDDEN: u32 = 0u;
const FULL: u32 = 2u;
fn tile_state(b: u32, kv_head: u32, first: u32, last: u32, from_key: u32, to_key: u32) -> u32 {
    return 1u;
}
";

impl Fused {
    fn bindings(&self) -> Vec<Binding> {
        let mut bindings = vec![Binding::read("q", self.dtype, self.width)];
        match self.cache {
            Some(_) => bindings.extend(Cached::bindings()),
            None if self.halves => {
                bindings.extend(["k", "v"].map(|name| Binding::read(name, DType::U32, Width::Four)));
            }
            None => bindings.extend(["k", "v"].map(|name| Binding::read(name, self.dtype, self.width))),
        }
        if self.splits {
            bindings.push(Binding::write("partial", DType::F32, Width::Four));
        } else {
            bindings.push(Binding::write("out", self.dtype, self.put));
        }
        if self.lse {
            bindings.push(Binding::write("lse", DType::F32, Width::One));
        }
        bindings.extend(self.mask.bindings());
        bindings.extend(self.drop.binding());
        bindings
    }

    /// How words hold channels, where they hold several.
    fn format(&self) -> Option<Format> {
        self.cache.map(|cache| cache.format).or(self.halves.then_some(Format::F16))
    }

    pub fn describe(&self) -> Kernel {
        let bindings = self.bindings();
        let mut constants = vec![
            Constant::Bool("IN_FOURS", self.width == Width::Four),
            Constant::Bool("OUT_IN_FOURS", self.put == Width::Four),
            Constant::Bool("HAS_LSE", self.lse),
            Constant::Bool("SPLITS", self.splits),
            Constant::U32("SPLIT_LEAST", self.tiles.split_least()),
            Constant::U32("SPLIT_STEP", self.tiles.split_step()),
            Constant::U32("VECTORS", self.format().map_or(1, |format| format.per_word() as u32)),
            Constant::Bool("ASKS_PAIRS", self.mask.asks_pairs()),
            Constant::Bool("DROPS", self.drop != Drop::None),
            Constant::Bool("HAS_BLOCKS", self.mask.blocks),
            // Appended keys lie past the interval that a full block keeps.
            Constant::Bool("FULL_IS_PLAIN", !self.mask.changes_full() && !self.mask.appended),
        ];
        let mut memory = "";
        let (core, invocations) = match self.tiles {
            FusedTiles::Workgroup { rows, workgroup, slice, v_keys } => {
                constants.extend([
                    Constant::U32("ROWS", rows),
                    Constant::U32("KEYS", FusedTiles::KEYS),
                    Constant::U32("CHUNK", FusedTiles::CHUNK),
                    Constant::U32("WORKGROUP", workgroup),
                    Constant::U32("SLICE", slice),
                    Constant::U32("V_KEYS", v_keys),
                    Constant::U32("P_KEYS", FusedTiles::P_KEYS),
                ]);
                ([shader!("shared/fused_workgroup"), shader!("shared/fused_tiles")], workgroup)
            }
            FusedTiles::Uniform { rows, keys, head_vectors, value_vectors } => {
                constants.extend([
                    Constant::U32("ROWS", rows),
                    Constant::U32("LANES", FusedTiles::LANES),
                    Constant::U32("KEYS", keys),
                    Constant::U32("HEAD_VECTORS", head_vectors),
                    Constant::U32("VALUE_VECTORS", value_vectors),
                ]);
                ([shader!("shared/fused_uniform"), ""], FusedTiles::LANES)
            }
            FusedTiles::FewWorkgroup(few) => {
                constants.extend([
                    Constant::U32("ROWS", few.rows),
                    Constant::U32("LANE_ROWS", few.lane_rows),
                    Constant::U32("WORKGROUP", few.workgroup),
                    Constant::U32("KEY_LANES", few.key_lanes),
                    Constant::U32("KEY_FOURS", few.key_fours),
                    Constant::U32("V_SPLIT", few.v_split),
                    Constant::U32("ROUND", few.round),
                    Constant::Bool("SHARED", few.shared),
                    Constant::U32("K_BLOCKS", few.loads.k),
                    Constant::U32("V_BLOCKS", few.loads.v),
                ]);
                let reduce = if few.subgroups {
                    shader!("shared/reduce_subgroup")
                } else {
                    shader!("shared/reduce_workgroup")
                };
                ([shader!("shared/decode_workgroup"), reduce], few.workgroup)
            }
            FusedTiles::FewUniform(few) => {
                constants.extend([
                    Constant::U32("ROWS", few.rows),
                    Constant::U32("LANES", FusedTiles::LANES),
                    Constant::U32("KEYS", few.keys),
                    Constant::U32("STEP", few.step),
                    Constant::U32("CHUNK", few.chunk),
                    Constant::U32("K_BLOCKS", few.loads.k),
                    Constant::U32("V_BLOCKS", few.loads.v),
                ]);
                ([shader!("shared/decode_uniform"), ""], FusedTiles::LANES)
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
                ([shader!("shared/fused_matrix"), shader!("shared/fused_tiles")], tiles.workgroup())
            }
        };
        let mut stubs = String::new();
        if !self.lse {
            stubs.push_str("fn lse_put(o: u32, x: f32) {}\n");
        }
        stubs.push_str(if self.splits {
            "fn out_put(o: u32, x: f32) {}\nfn out_put4(o: u32, x: vec4<f32>) {}\n"
        } else {
            "fn partial_put4(o: u32, x: vec4<f32>) {}\n"
        });
        // GPUs check no indices that narrow ones would save.
        constants.push(Constant::Bool("WIDE", self.wide || !self.tiles.is_uniform()));
        let keys = match self.cache {
            Some(cache) => {
                constants.extend(cache.constants());
                [
                    shader!("shared/cache"),
                    shader!("shared/keys_cache"),
                    shader!("shared/words"),
                    shader!("shared/formats"),
                ]
            }
            None if self.halves => {
                constants.push(Constant::U32("FORMAT", Format::F16 as u32));
                ["", shader!("shared/keys_halves"), shader!("shared/words"), shader!("shared/formats")]
            }
            None => ["", shader!("shared/keys_tensors"), "", ""],
        };
        let blocks = if self.mask.blocks { shader!("shared/fused_blocks") } else { NO_BLOCKS };
        let parts = [
            shader!("shared/view"),
            shader!("shared/online"),
            shader!("fused"),
            shader!("shared/out"),
            core[0],
            core[1],
            memory,
            shader!("shared/cache_params"),
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
        self.tiles.is_uniform().then_some(Fused { wide: true, ..*self })
    }

    pub fn all() -> Vec<Self> {
        let plain = |tiles| Fused {
            tiles,
            cache: None,
            halves: false,
            splits: false,
            dtype: DType::F32,
            width: Width::Four,
            put: Width::Four,
            wide: false,
            lse: false,
            drop: Drop::None,
            mask: mask::Parts::default(),
        };
        let mut all = Vec::new();
        for tiles in FusedTiles::MASKED {
            all.extend(mask::Parts::all().into_iter().map(|mask| Fused { mask, ..plain(tiles) }));
            all.extend(Drop::ALL.map(|drop| Fused { drop, lse: true, ..plain(tiles) }));
        }
        for tiles in FusedTiles::all() {
            for dtype in super::FLOATS {
                for width in super::WIDTHS {
                    all.extend(super::WIDTHS.map(|put| Fused { dtype, width, put, ..plain(tiles) }));
                }
            }
        }
        for fragment in [Fragment::Eight, Fragment::Sixteen] {
            for tiles in FusedMatrix::all(fragment).into_iter().map(FusedTiles::Matrix) {
                for dtype in super::FLOATS {
                    all.extend(super::WIDTHS.map(|width| Fused { dtype, width, put: width, ..plain(tiles) }));
                }
            }
            // Of subgroups of 32 and of 64: masks and caches take registers from what the fragments are to fit in.
            for tiles in FusedMatrix::all(fragment).into_iter().take(4).map(FusedTiles::Matrix) {
                let halves = Fused { dtype: DType::F16, ..plain(tiles) };
                all.extend(mask::Parts::all().into_iter().map(|mask| Fused { mask, ..halves }));
                all.extend(Drop::ALL.map(|drop| Fused { drop, lse: true, ..halves }));
                all.push(Fused { splits: true, ..halves });
                for cache in Cached::all() {
                    let mask = mask::Parts { causal: true, ..mask::Parts::default() };
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
            for cache in Cached::all() {
                let mask = mask::Parts { causal: true, ..mask::Parts::default() };
                let narrow = Fused { cache: Some(cache), mask: mask.in_cache(&cache), ..plain(tiles) };
                all.push(narrow);
                all.extend(narrow.widened());
            }
            let cache = Cached { format: Format::Q8, placement: Placement::Ring, groups: [32, 32] };
            for mask in mask::Parts::all().into_iter().filter(|m| !m.blocks && !m.packed && !m.appended) {
                all.push(Fused {
                    cache: Some(cache),
                    splits: true,
                    mask: mask.in_cache(&cache),
                    ..plain(tiles)
                });
            }
        }
        for format in [None, Some(Format::F32), Some(Format::F16), Some(Format::Q8), Some(Format::Q4)] {
            let of = |format: Format| Cached {
                format,
                placement: Placement::Paged,
                groups: if format.is_scaled() { [32, 64] } else { [1; 2] },
            };
            let cache = format.map(of);
            for tiles in plan::few_tiles(format) {
                let masked = |mask: mask::Parts| Fused {
                    cache,
                    splits: true,
                    mask: cache.map_or(mask, |cache| mask.in_cache(&cache)),
                    ..plain(tiles)
                };
                let mut narrow = vec![
                    Fused { splits: false, lse: true, ..masked(mask::Parts::default()) },
                    masked(mask::Parts { causal: true, softcap: true, tree: true, ..Default::default() }),
                ];
                if format == Some(Format::F16) {
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
