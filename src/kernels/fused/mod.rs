//! Twin of `fused.wgsl`.

mod all;
mod form;

use super::cache::{CacheParams, CacheVariant};
use super::dropout::DropoutKind;
use super::{mask, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::mask::Id;
use crate::plan::FusedTiles;
use crate::storage::StorageKind;
use crate::tensor::DType;
use form::Form;

/// What changes the text of the fused kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fused {
    pub tiles: FusedTiles,
    /// Where keys and values are, if not in tensors.
    pub cache: Option<CacheVariant>,
    /// Whether tensors of F16 or BF16 are loaded as vectors of words.
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
    /// Whether k and v are contiguous along their channels, which the form for software drivers must know where they do
    /// not load in fours.
    pub contiguous: bool,
    pub lse: bool,
    pub drop: DropoutKind,
    pub mask: mask::MaskVariant,
    /// Of additive scores.
    pub score_vector: Option<DType>,
}

params! {
    pub(crate) struct Params {
        q: View,
        k: View,
        v: View,
        out: View,
        lse: View,
        dropout: View,
        score_vector: View,
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
fn map_row(i: u32) -> u32 {
    return 0u;
}
fn block_of_row(q: Query, row: u32, col: u32) -> u32 {
    return 1u;
}
fn tile_column_state(b: u32, kv_head: u32, rows: vec2<u32>, col: u32, to_key: u32) -> u32 {
    return 1u;
}
";

/// What `keys/by_channel.wgsl` declares, where keys and values load in vectors.
const IN_VECTORS: &str = "fn k_whole(s: Source, row: u32, d: u32) -> vec4<f32> {
    return k_four(s, row, d);
}
fn v_whole(s: Source, row: u32, d: u32) -> vec4<f32> {
    return v_four(s, row, d);
}
fn k_last(s: Source, row: u32, d: u32, n: u32, exist: vec4<bool>) -> vec4<f32> {
    return k_four(s, row, d);
}
fn v_last(s: Source, row: u32, d: u32, n: u32, exist: vec4<bool>) -> vec4<f32> {
    return v_four(s, row, d);
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
        bindings.extend(self.score_vector.map(|dtype| Binding::read("score_vector", dtype, Width::One)));
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
        self.cache.map(|cache| cache.storage).or(self.halves.then_some(StorageKind::of(self.dtype)))
    }

    /// Whether the form for software drivers loads keys and values one channel at a time.
    pub fn loads_by_channel(&self) -> bool {
        let in_tensors = self.cache.is_none() && !self.halves;
        matches!(self.tiles, FusedTiles::Cpu { .. }) && in_tensors && self.width == Width::One
    }

    pub fn describe(&self) -> Kernel {
        let form = Form::of(&self.tiles);
        let mut constants = self.constants();
        constants.extend(form.constants);
        // GPUs check no indices that narrow ones would save.
        constants.push(Constant::Bool("WIDE", self.wide || !self.tiles.is_cpu()));
        constants.extend(self.keys_constants());
        let mut parts =
            vec![shader!("tensor/view"), shader!("softmax/online"), shader!("fused"), shader!("tensor/out")];
        parts.extend(form.text);
        parts.extend(match self.score_vector {
            Some(_) => [shader!("additive/score"), shader!("additive/tanh")].as_slice(),
            None => &[shader!("fused/dot")],
        });
        parts.push(shader!("cache/params"));
        parts.extend(self.keys_text());
        if self.loads_by_channel() {
            constants.push(Constant::Bool("CONTIGUOUS", self.contiguous));
            parts.push(shader!("keys/by_channel"));
        } else if matches!(self.tiles, FusedTiles::Cpu { .. }) {
            parts.push(IN_VECTORS);
        }
        parts.extend(self.unused_stores());
        parts.push(if self.mask.has(Id::Blocks) { shader!("fused/tile_state") } else { NO_BLOCKS });
        parts.push(self.drop.wgsl());
        let knows_blocks = self.tiles.is_cpu() && !self.tiles.is_additive();
        let mask = if knows_blocks { self.mask.knowing_blocks() } else { self.mask };
        let mask = mask.wgsl();
        parts.push(&mask);
        Kernel {
            workgroup_memory: self.tiles.workgroup_memory(),
            ..Kernel::new::<Params>(&constants, self.bindings(), &parts, form.invocations)
        }
    }

    /// The constants that every form takes.
    fn constants(&self) -> Vec<Constant> {
        vec![
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
        ]
    }

    /// The constants of where keys and values are.
    fn keys_constants(&self) -> Vec<Constant> {
        match self.cache {
            Some(cache) => cache.constants().into(),
            None if self.halves => vec![Constant::U32("STORAGE_KIND", StorageKind::of(self.dtype) as u32)],
            None => Vec::new(),
        }
    }

    /// How keys and values load from where they are.
    fn keys_text(&self) -> Vec<&'static str> {
        match self.cache {
            Some(_) => vec![
                shader!("cache/sequence_table"),
                shader!("keys/cache"),
                shader!("keys/packed_words"),
                shader!("keys/storage"),
            ],
            None if self.halves => {
                vec![shader!("keys/tensor_words"), shader!("keys/packed_words"), shader!("keys/storage")]
            }
            None => vec![shader!("keys/tensors")],
        }
    }

    /// Stores that the text names and this variant has no binding for.
    fn unused_stores(&self) -> Vec<&'static str> {
        let mut stores = Vec::new();
        if !self.lse {
            stores.push("fn lse_store(o: u32, x: f32) {}\n");
        }
        stores.push(if self.splits {
            "fn out_store(o: u32, x: f32) {}\nfn out_store4(o: u32, x: vec4<f32>) {}\n"
        } else {
            "fn partial_store4(o: u32, x: vec4<f32>) {}\n"
        });
        stores
    }

    /// The same for far elements, where those change the text.
    fn widened(&self) -> Option<Self> {
        self.tiles.is_cpu().then_some(Fused { wide: true, ..*self })
    }
}
