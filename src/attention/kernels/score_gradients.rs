//! Twin of `score_gradients.wgsl`.

use super::key_lists;
use crate::attention::plan::{Added, ScoreGradientsPlan};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Untyped, Variant, WIDTHS, Width, families, kernel, shader};
use crate::mask::Id;
use crate::mask::kernels::dropout::{DropoutKind, Dropped};
use crate::mask::kernels::{MaskVariant, Masked};
use crate::tensor::DType;

const WORKGROUP: u32 = ScoreGradientsPlan::WORKGROUP;

kernel! {
    /// The kernel of the gradient of a tensor that a mask rule adds to scores.
    ScoreGradients, ScoreGradientsCall
    tensors {
        // Sinks need no pairs.
        q: Opt Read F32 width view,
        k: Opt Read F32 width view,
        v: Opt Read F32 width view,
        d_out: Opt Read F32 width view,
        row_stats: Raw Read F32 one,
        gradient: Placed Write F32 one view,
    }
    // For pairs: all rules except sinks, because lse includes sinks. For sinks: only sinks.
    groups {
        mask: Masked MaskVariant,
        drop: Dropped DropoutKind,
    }
    numbers {
        /// The shape of the gradient.
        shape: [u32; 4],
        /// Workgroups before those of this dispatch. The host cuts long work into several
        /// dispatches.
        first: [u32; 4],
        batch: u32,
        heads: u32,
        group: u32,
        head_dim: u32,
        value_dim: u32,
        /// 1 if the gradient is added to the tensor's previous values.
        accumulates: u32,
        scale: f32,
        /// The lanes that share the keys of a query.
        key_lanes: u32,
        /// Parts of an element.
        parts: u32,
        /// Queries of a part.
        part_rows: u32,
    }
    variant {
        of: Added,
        /// True if a workgroup computes an element or a part of one. False if an invocation does.
        shared: bool,
        width: Width,
        /// True if scores are summed in the order of the CPU variant of `fused_backward.wgsl`.
        chains: bool,
    }
}

/// The replacement of `score_gradients/lanes.wgsl` if one invocation computes a whole sum.
const ALONE: &str = "fn sum_of_lanes(x: f32, lane: u32) -> f32 {\n    return x;\n}\n";

impl Variant for ScoreGradients {
    const LABEL: &'static str = "attention.score_gradients";

    fn describe(&self) -> Kernel {
        let mut declared = self.declare().u32("WORKGROUP", WORKGROUP).bool("SHARED", self.shared);
        let mask = if self.of == Added::Sinks { self.mask.wgsl() } else { self.mask.wgsl_with_slope() };
        let factor = self.factor();
        let mut parts = vec![
            shader!("tensor/view"),
            shader!("attention/backward/stats"),
            shader!("attention/score_gradients"),
        ];
        let (lanes, workgroup_memory) = if self.shared {
            (shader!("attention/score_gradients/lanes"), 4 * WORKGROUP)
        } else {
            (ALONE, 0)
        };
        parts.push(lanes);
        if self.of == Added::Sinks {
            declared = declared.bool("NATURAL_SCORES", true);
            parts.extend([shader!("attention/softmax/online"), shader!("attention/score_gradients/sinks")]);
        } else {
            declared = declared
                .bool("OF_PLACES", self.of == Added::Relative)
                .bool("IN_FOURS", self.width == Width::Four)
                .bool("WIDE", true)
                .bool("IN_CHAINS", self.chains)
                .bool("PER_PAIR_MASK", self.mask.is_per_pair());
            parts.extend([
                shader!("attention/backward/pair"),
                shader!("attention/backward/rows"),
                key_lists::text(false),
                shader!("attention/score_gradients/pairs"),
            ]);
            parts.push(&factor);
        }
        parts.push(&mask);
        declared.kernel(&parts, WORKGROUP, workgroup_memory)
    }

    fn families(&self) -> Families {
        families(&[Some(Family::ScoreGradients)], &[self.q.unwrap_or(DType::F32), self.gradient])
    }

    /// Each value of each axis, not all combinations.
    fn all() -> impl IntoIterator<Item = Self> {
        let mut all = Vec::new();
        for of in Added::ALL {
            let inputs = (of != Added::Sinks).then_some(DType::F32);
            let plain = ScoreGradients {
                q: inputs,
                k: inputs,
                v: inputs,
                d_out: inputs,
                row_stats: Untyped,
                gradient: DType::F32,
                mask: MaskVariant::with_rules([of.id()]),
                drop: DropoutKind::None,
                of,
                shared: true,
                width: Width::Four,
                chains: false,
            };
            all.extend(FLOATS.map(|gradient| ScoreGradients { gradient, ..plain }));
            if of == Added::Sinks {
                let masks = FLOATS.map(|dtype| MaskVariant::with_sink_logits(Some(dtype)));
                all.extend(masks.map(|mask| ScoreGradients { mask, ..plain }));
                continue;
            }
            for dtype in FLOATS {
                let inputs = Some(dtype);
                let typed = ScoreGradients { q: inputs, k: inputs, v: inputs, d_out: inputs, ..plain };
                all.extend(WIDTHS.map(|width| ScoreGradients { width, ..typed }));
            }
            all.extend(DropoutKind::ALL.map(|drop| ScoreGradients { drop, ..plain }));
            all.push(ScoreGradients { chains: true, ..plain });
            // Gradients of slopes use the distance function of the ALiBi rule.
            let masks = MaskVariant::all().into_iter().map(MaskVariant::scores_only);
            let masks = masks.filter(|mask| of != Added::Slopes || mask.has(of.id()));
            all.extend(masks.map(|mask| ScoreGradients { mask, ..plain }));
            let softcapped = plain.mask.softcapped();
            all.push(ScoreGradients { mask: softcapped, ..plain });
            if of == Added::Bias {
                let mask = MaskVariant::with_rules([Id::Blocks, Id::Bias]);
                all.push(ScoreGradients { mask, ..plain });
                all.extend(FLOATS.map(|gradient| ScoreGradients { shared: false, gradient, ..plain }));
            }
        }
        // Drops kernels with more tensors than every device can bind.
        all.retain(|kernel| kernel.declare().bindings.len() <= 8);
        all
    }
}

impl ScoreGradients {
    /// Returns the WGSL of the factor of the tensor's element in the score of a pair.
    fn factor(&self) -> String {
        let factor = match self.of {
            Added::Slopes => "alibi_distance(q, j)",
            Added::Bias if self.mask.has(Id::Blocks) => "select(1.0, 0.0, block_at(q, j) == FULL)",
            _ => "1.0",
        };
        format!("fn factor_of(q: Query, j: u32) -> f32 {{\n    return {factor};\n}}\n")
    }
}
