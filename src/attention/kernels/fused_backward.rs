//! Twin of `fused_backward.wgsl`.

use super::key_lists;
use crate::attention::plan::{BackwardMatrix, BackwardTiles, GradientsOf};
use crate::device::family::GRADIENTS;
use crate::device::{Families, Family, Fragment};
use crate::kernel::{
    Constant, FLOATS, Kernel, Untyped, Variant, View, WIDTHS, Width, families, kernel, memory_of, shader,
};
use crate::mask::Id;
use crate::mask::kernels::dropout::{DropoutKind, Dropped};
use crate::mask::kernels::{MaskVariant, Masked};
use crate::tensor::{Access, DType};

kernel! {
    /// The kernel of the gradients of queries, keys or values, or of only the sums of weights.
    FusedBackward, FusedBackwardCall
    tensors {
        q: One Read F32 width view,
        k: One Read F32 width view,
        // Absent if the kernel computes only the sums of weights.
        v: Opt Read F32 width view,
        d_out: Opt Read F32 width view,
        row_stats: Raw Read F32 one,
        // The tensor of d_q or of d_k.
        d_scored: Opt Write F32 store,
        d_v: Opt Write F32 store view,
    }
    // Without sinks, because lse includes them.
    groups {
        mask: Masked MaskVariant,
        drop: Dropped DropoutKind,
    }
    numbers {
        /// The view of `d_scored` if it is d_q.
        d_q: View,
        /// The view of `d_scored` if it is d_k.
        d_k: View,
        /// Workgroups before those of this dispatch. The host cuts long work into several
        /// dispatches.
        first: [u32; 4],
        /// The places of lists of keys (`keys/lists.wgsl`).
        key_lists: [u32; 4],
        key_batches: [u32; 4],
        heads: u32,
        kv_heads: u32,
        group: u32,
        head_dim: u32,
        value_dim: u32,
        /// 1 if gradients are added to the tensors' previous values.
        accumulates: u32,
        scale: f32,
        /// 1 if out and lse cover more keys than this call.
        partial: u32,
    }
    variant {
        tiles: BackwardTiles,
        of: GradientsOf,
        width: Width,
        store: Width,
        /// True if element indices of inputs reach 2^28. Only the CPU variant uses it.
        wide: bool,
        /// True if each query has a list of keys.
        listed: bool,
    }
}

/// The replacement of `mask/blocks.wgsl` if the mask has no block map.
const NO_BLOCKS: &str = "const HIDDEN: u32 = 0u;
fn blocks_state(b: u32, h: u32, first: u32, last: u32, from_key: u32, to_key: u32) -> u32 {
    return 1u;
}
";

impl Variant for FusedBackward {
    const LABEL: &'static str = "attention.fused_backward";

    fn describe(&self) -> Kernel {
        let declared = self
            .declare()
            .access("row_stats", if self.normalises() { Access::Write } else { Access::Read })
            .bool("OF_KEYS", !self.of.of_queries())
            .bool("NORMALISES", self.normalises())
            .bool("IN_CHAINS", self.tiles.is_cpu())
            .bool("OF_SCORES", self.of.scores())
            .bool("OF_VALUES", self.of.values())
            .bool("IN_FOURS", self.width == Width::Four)
            .bool("STORE_IN_FOURS", self.store == Width::Four)
            // GPUs have no bounds checks that narrow indices would avoid.
            .bool("WIDE", self.wide || !self.tiles.is_cpu())
            .bool("PER_PAIR_MASK", self.mask.is_per_pair())
            .bool("HAS_BLOCKS", self.mask.has(Id::Blocks))
            .u32("OWNS", self.tiles.owns())
            .u32("SLICE", self.tiles.slice());
        let mut constants = Vec::new();
        let mut form = vec![shader!("attention/fused_backward/tiles")];
        match self.tiles {
            BackwardTiles::Gpu(tiles) => {
                constants.extend([
                    Constant::U32("CHUNK", tiles.chunk),
                    Constant::U32("V_OTHERS", tiles.slice_rows()),
                    Constant::U32("WORKGROUP", tiles.workgroup()),
                    Constant::Bool("AHEAD", tiles.ahead()),
                ]);
                form.push(shader!("attention/fused_backward/gpu"));
            }
            BackwardTiles::Cpu { lanes, others, head_vectors, value_vectors, .. } => {
                constants.extend([
                    Constant::U32("LANES", lanes),
                    Constant::U32("OTHERS", others),
                    Constant::U32("HEAD_VECTORS", head_vectors),
                    Constant::U32("VALUE_VECTORS", value_vectors),
                ]);
                form = vec![shader!("attention/fused_backward/cpu")];
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
                form.extend([shader!("attention/fused_backward/matrix"), memory_of(tiles.fragment)]);
            }
        }
        let mut parts = vec![
            shader!("tensor/view"),
            shader!("attention/backward/stats"),
            shader!("attention/backward/pair"),
            shader!("attention/backward/rows"),
            shader!("attention/fused_backward"),
        ];
        parts.extend(form);
        parts.extend([shader!("attention/fused_backward/hidden_others"), shader!("mask/document_range")]);
        parts.push(key_lists::text(self.listed));
        if !self.normalises() {
            parts.push("fn row_stats_store(o: u32, x: f32) {}\n");
        }
        if !self.mask.has(Id::Blocks) {
            parts.push(NO_BLOCKS);
        }
        let mask = self.mask.wgsl_with_slope();
        parts.push(&mask);
        let workgroup_memory = self.tiles.workgroup_memory(self.of);
        declared.with(constants).kernel(&parts, self.tiles.invocations(), workgroup_memory)
    }

    fn families(&self) -> Families {
        let joint = self.of == GradientsOf::KeysAndValues;
        let family = match self.tiles {
            BackwardTiles::Matrix(_) => Family::MatrixGradients,
            tiles => GRADIENTS.of(tiles.is_cpu()),
        };
        let found = [Some(family), joint.then_some(Family::JointGradients)];
        let tensors = [Some(self.q), self.d_scored, self.d_v].map(|t| t.unwrap_or(DType::F32));
        families(&found, &tensors)
    }

    /// Each value of each axis, not all combinations.
    fn all() -> impl IntoIterator<Item = Self> {
        let mut all = Vec::new();
        for of in GradientsOf::ALL {
            for tiles in BackwardTiles::listed(of) {
                let plain = Self::plain(of, tiles);
                for dtype in FLOATS {
                    let other = |gradient: Option<DType>| gradient.map(|_| dtype);
                    let (d_scored, d_v) = (other(plain.d_scored), other(plain.d_v));
                    let typed = FusedBackward { d_scored, d_v, ..plain.with_inputs(dtype) };
                    all.extend(WIDTHS.map(|width| FusedBackward { width, store: width, ..typed }));
                }
                all.push(plain.with_inputs(DType::F16));
                let mask = MaskVariant::with_rules([Id::Lengths]);
                all.push(FusedBackward { mask, listed: true, ..plain });
                all.extend(tiles.is_cpu().then_some(FusedBackward { wide: true, ..plain }));
            }
            for fragment in [Fragment::Eight, Fragment::Sixteen] {
                let tiles = BackwardMatrix::listed(of, fragment);
                all.extend(tiles.iter().map(|tiles| Self::halves(of, *tiles)));
                let first = Self::halves(of, tiles[0]);
                all.push(FusedBackward { width: Width::One, store: Width::One, ..first });
                let mask = MaskVariant::with_rules([Id::Lengths]);
                all.push(FusedBackward { mask, listed: true, ..first });
                // Inputs that are rounded to f16, if the configuration permits it.
                all.push(first.with_inputs(DType::F32));
                let masks = MaskVariant::all().into_iter().map(MaskVariant::scores_only);
                all.extend(masks.map(|mask| FusedBackward { mask, ..first }));
                all.extend(DropoutKind::ALL.map(|drop| FusedBackward { drop, ..first }));
            }
        }
        for tiles in BackwardTiles::listed(GradientsOf::Totals) {
            let plain = Self::plain(GradientsOf::Totals, tiles);
            for dtype in FLOATS {
                all.extend(WIDTHS.map(|width| FusedBackward { width, ..plain.with_inputs(dtype) }));
            }
            let mask = MaskVariant::with_rules([Id::Lengths]);
            all.push(FusedBackward { mask, listed: true, ..plain });
            all.extend(tiles.is_cpu().then_some(FusedBackward { wide: true, ..plain }));
        }
        for of in [GradientsOf::Queries, GradientsOf::Keys, GradientsOf::KeysAndValues, GradientsOf::Totals] {
            for tiles in BackwardTiles::masked(of) {
                let plain = Self::plain(of, tiles);
                let masks = MaskVariant::all().into_iter().map(MaskVariant::scores_only);
                all.extend(masks.map(|mask| FusedBackward { mask, ..plain }));
                all.extend(MaskVariant::listed_score_mod().map(|mask| FusedBackward { mask, ..plain }));
                if of != GradientsOf::Totals {
                    all.extend(DropoutKind::ALL.map(|drop| FusedBackward { drop, ..plain }));
                }
            }
        }
        // Drops kernels with more tensors than every device can bind.
        all.retain(|kernel| kernel.declare().bindings.len() <= 8);
        all
    }
}

impl FusedBackward {
    fn normalises(&self) -> bool {
        self.tiles.normalise(self.of)
    }

    fn halves(of: GradientsOf, tiles: BackwardMatrix) -> Self {
        Self::plain(of, BackwardTiles::Matrix(tiles)).with_inputs(DType::F16)
    }

    /// Returns the same kernel with inputs of another type.
    fn with_inputs(self, dtype: DType) -> Self {
        let other = |input: Option<DType>| input.map(|_| dtype);
        FusedBackward { q: dtype, k: dtype, v: other(self.v), d_out: other(self.d_out), ..self }
    }

    /// Returns the kernel for f32 tensors loaded as vec4, without options.
    fn plain(of: GradientsOf, tiles: BackwardTiles) -> Self {
        let only = |used: bool| used.then_some(DType::F32);
        FusedBackward {
            q: DType::F32,
            k: DType::F32,
            v: only(of != GradientsOf::Totals),
            d_out: only(of != GradientsOf::Totals),
            row_stats: Untyped,
            d_scored: only(of.scores()),
            d_v: only(of.values()),
            mask: MaskVariant::default(),
            drop: DropoutKind::None,
            tiles,
            of,
            width: Width::Four,
            store: Width::Four,
            wide: false,
            listed: false,
        }
    }
}
