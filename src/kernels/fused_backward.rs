//! Twin of `fused_backward.wgsl`.

use super::dropout::DropoutKind;
use super::{FLOATS, WIDTHS, mask, memory_of, shader};
use crate::device::Fragment;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::mask::Id;
use crate::plan::{BackwardMatrix, BackwardTiles, GradientsOf};
use crate::tensor::DType;

/// What changes the text of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FusedBackward {
    pub tiles: BackwardTiles,
    pub of: GradientsOf,
    pub dtype: DType,
    /// Whether q, k, v and d_out load in fours along their channels.
    pub width: Width,
    /// Of d_q or d_k.
    pub scored: DType,
    /// Of d_v.
    pub valued: DType,
    /// Whether gradients store in fours.
    pub store: Width,
    /// Whether element indices of inputs reach 2^28, which the form for software drivers must know.
    pub wide: bool,
    pub drop: DropoutKind,
    /// Without sinks: lse has them.
    pub mask: mask::MaskVariant,
}

params! {
    pub(crate) struct Params {
        q: View,
        k: View,
        v: View,
        d_out: View,
        d_q: View,
        d_k: View,
        d_v: View,
        dropout: View,
        mask: mask::MaskParams,
        first: [u32; 4],
        seed: [u32; 2],
        heads: u32,
        kv_heads: u32,
        group: u32,
        head_dim: u32,
        value_dim: u32,
        accumulates: u32,
        dropout_threshold: u32,
        dropout_scale: f32,
        scale: f32,
        partial: u32,
    }
}

/// What `mask/blocks.wgsl` declares, where there is no map to ask.
const NO_BLOCKS: &str = "const HIDDEN: u32 = 0u;
fn blocks_state(b: u32, h: u32, first: u32, last: u32, from_key: u32, to_key: u32) -> u32 {
    return 1u;
}
";

impl FusedBackward {
    fn bindings(&self) -> Vec<Binding> {
        let inputs = ["q", "k", "v", "d_out"].map(|name| Binding::read(name, self.dtype, self.width));
        let mut bindings = Vec::from(inputs);
        if self.of == GradientsOf::Totals {
            bindings.truncate(2);
        }
        bindings.push(if self.normalises() {
            Binding::write("row_stats", DType::F32, Width::One)
        } else {
            Binding::read("row_stats", DType::F32, Width::One)
        });
        if self.of.scores() {
            bindings.push(Binding::write("d_scored", self.scored, self.store));
        }
        if self.of.values() {
            bindings.push(Binding::write("d_v", self.valued, self.store));
        }
        bindings.extend(self.mask.bindings());
        bindings.extend(self.drop.binding());
        bindings
    }

    fn normalises(&self) -> bool {
        self.tiles.normalise(self.of)
    }

    pub fn describe(&self) -> Kernel {
        let mut constants = vec![
            Constant::Bool("OF_KEYS", !self.of.of_queries()),
            Constant::Bool("NORMALISES", self.normalises()),
            Constant::Bool("IN_CHAINS", self.tiles.is_cpu()),
            Constant::Bool("OF_SCORES", self.of.scores()),
            Constant::Bool("OF_VALUES", self.of.values()),
            Constant::Bool("IN_FOURS", self.width == Width::Four),
            Constant::Bool("STORE_IN_FOURS", self.store == Width::Four),
            // GPUs check no indices that narrow ones would save.
            Constant::Bool("WIDE", self.wide || !self.tiles.is_cpu()),
            Constant::Bool("PER_PAIR_MASK", self.mask.is_per_pair()),
            Constant::Bool("HAS_DROPOUT", self.drop != DropoutKind::None),
            Constant::Bool("HAS_BLOCKS", self.mask.has(Id::Blocks)),
            Constant::U32("OWNS", self.tiles.owns()),
            Constant::U32("SLICE", self.tiles.slice()),
        ];
        let mut form = vec![shader!("fused_backward/tiles")];
        match self.tiles {
            BackwardTiles::Gpu(tiles) => {
                constants.extend([
                    Constant::U32("CHUNK", tiles.chunk),
                    Constant::U32("V_OTHERS", tiles.slice_rows()),
                    Constant::U32("WORKGROUP", tiles.workgroup()),
                    Constant::Bool("AHEAD", tiles.ahead()),
                ]);
                form.push(shader!("fused_backward/gpu"));
            }
            BackwardTiles::Cpu { lanes, others, head_vectors, value_vectors, .. } => {
                constants.extend([
                    Constant::U32("LANES", lanes),
                    Constant::U32("OTHERS", others),
                    Constant::U32("HEAD_VECTORS", head_vectors),
                    Constant::U32("VALUE_VECTORS", value_vectors),
                ]);
                form = vec![shader!("fused_backward/cpu")];
            }
            BackwardTiles::Matrix(tiles) => {
                constants.extend([
                    Constant::Fragments(tiles.fragment),
                    Constant::U32("SUB_ROWS", tiles.sub_rows),
                    Constant::U32("SUBGROUPS", tiles.subgroups),
                    Constant::U32("OTHERS", tiles.others),
                    Constant::U32("WORKGROUP", tiles.workgroup()),
                    Constant::U32("HEAD", tiles.head),
                    Constant::U32("VALUE", tiles.value),
                    Constant::Bool("HELD", tiles.held),
                ]);
                form.extend([shader!("fused_backward/matrix"), memory_of(tiles.fragment)]);
            }
        }
        let mut parts = vec![
            shader!("tensor/view"),
            shader!("backward/stats"),
            shader!("backward/pair"),
            shader!("backward/rows"),
            shader!("fused_backward"),
        ];
        parts.extend(form);
        parts.extend([shader!("fused_backward/hidden_others"), shader!("mask/document_range")]);
        parts.extend(self.unused_stores());
        if !self.mask.has(Id::Blocks) {
            parts.push(NO_BLOCKS);
        }
        parts.push(self.drop.wgsl());
        let mask = self.mask.wgsl_with_slope();
        parts.push(&mask);
        Kernel {
            workgroup_memory: self.tiles.workgroup_memory(self.of),
            ..Kernel::new::<Params>(&constants, self.bindings(), &parts, self.tiles.invocations())
        }
    }

    /// Accessors that the text names and this variant has no binding for.
    fn unused_stores(&self) -> Vec<&'static str> {
        let mut stores = Vec::new();
        if self.of == GradientsOf::Totals {
            stores.push(
                "fn v_at4(o: u32, stride: u32, n: u32) -> vec4<f32> { return vec4<f32>(); }\n\
                 fn d_out_at4(o: u32, stride: u32, n: u32) -> vec4<f32> { return vec4<f32>(); }\n",
            );
        }
        if !self.normalises() {
            stores.push("fn row_stats_store(o: u32, x: f32) {}\n");
        }
        if !self.of.scores() {
            stores.push(
                "fn d_scored_at(o: u32) -> f32 { return 0.0; }\n\
                 fn d_scored_at4(o: u32, stride: u32, n: u32) -> vec4<f32> { return vec4<f32>(); }\n\
                 fn d_scored_store(o: u32, x: f32) {}\nfn d_scored_store4(o: u32, x: vec4<f32>) {}\n",
            );
        }
        if !self.of.values() {
            stores.push(
                "fn d_v_at(o: u32) -> f32 { return 0.0; }\n\
                 fn d_v_at4(o: u32, stride: u32, n: u32) -> vec4<f32> { return vec4<f32>(); }\n\
                 fn d_v_store(o: u32, x: f32) {}\nfn d_v_store4(o: u32, x: vec4<f32>) {}\n",
            );
        }
        stores
    }

    /// Each value of each axis, not their whole product.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for of in GradientsOf::ALL {
            for tiles in BackwardTiles::listed(of) {
                let plain = Self::plain(of, tiles);
                for dtype in FLOATS {
                    let typed = FusedBackward { dtype, scored: dtype, valued: dtype, ..plain };
                    all.extend(WIDTHS.map(|width| FusedBackward { width, store: width, ..typed }));
                }
                all.push(FusedBackward { dtype: DType::F16, ..plain });
                all.extend(tiles.is_cpu().then_some(FusedBackward { wide: true, ..plain }));
            }
            for fragment in [Fragment::Eight, Fragment::Sixteen] {
                let tiles = BackwardMatrix::listed(of, fragment);
                all.extend(tiles.iter().map(|tiles| Self::halves(of, *tiles)));
                let first = Self::halves(of, tiles[0]);
                all.push(FusedBackward { width: Width::One, store: Width::One, ..first });
                // Rounded, as a configuration may permit.
                all.push(FusedBackward { dtype: DType::F32, ..first });
                let masks = mask::MaskVariant::all().into_iter().map(mask::MaskVariant::scores_only);
                all.extend(masks.map(|mask| FusedBackward { mask, ..first }));
                all.extend(DropoutKind::ALL.map(|drop| FusedBackward { drop, ..first }));
            }
        }
        for tiles in BackwardTiles::listed(GradientsOf::Totals) {
            let plain = Self::plain(GradientsOf::Totals, tiles);
            for dtype in FLOATS {
                all.extend(WIDTHS.map(|width| FusedBackward { dtype, width, ..plain }));
            }
            all.extend(tiles.is_cpu().then_some(FusedBackward { wide: true, ..plain }));
        }
        for of in [GradientsOf::Queries, GradientsOf::Keys, GradientsOf::KeysAndValues, GradientsOf::Totals] {
            for tiles in BackwardTiles::masked(of) {
                let plain = Self::plain(of, tiles);
                let masks = mask::MaskVariant::all().into_iter().map(mask::MaskVariant::scores_only);
                all.extend(masks.map(|mask| FusedBackward { mask, ..plain }));
                all.extend(mask::MaskVariant::listed_score_mod().map(|mask| FusedBackward { mask, ..plain }));
                if of != GradientsOf::Totals {
                    all.extend(DropoutKind::ALL.map(|drop| FusedBackward { drop, ..plain }));
                }
            }
        }
        // With more tensors than every device binds.
        all.retain(|kernel| kernel.bindings().len() <= 8);
        all
    }

    fn halves(of: GradientsOf, tiles: BackwardMatrix) -> Self {
        FusedBackward { dtype: DType::F16, ..Self::plain(of, BackwardTiles::Matrix(tiles)) }
    }

    /// Tensors of f32 in fours, and nothing else.
    fn plain(of: GradientsOf, tiles: BackwardTiles) -> Self {
        FusedBackward {
            tiles,
            of,
            dtype: DType::F32,
            width: Width::Four,
            scored: DType::F32,
            valued: DType::F32,
            store: Width::Four,
            wide: false,
            drop: DropoutKind::None,
            mask: mask::MaskVariant::default(),
        }
    }
}
