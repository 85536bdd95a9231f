//! Twin of `score_gradients.wgsl`.

use super::dropout::DropoutKind;
use super::{FLOATS, WIDTHS, mask, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::mask::Id;
use crate::plan::{Added, ScoreGradientsPlan};
use crate::tensor::DType;

const WORKGROUP: u32 = ScoreGradientsPlan::WORKGROUP;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ScoreGradients {
    pub of: Added,
    /// Whether a workgroup has an element or a part of one, and not an invocation.
    pub shared: bool,
    pub gradient: DType,
    pub dtype: DType,
    /// Whether q, k, v and d_out load in fours along their channels.
    pub width: Width,
    /// Whether scores are summed as the software form of `fused_backward.wgsl` sums them.
    pub chains: bool,
    pub drop: DropoutKind,
    /// Without sinks, which lse has; of sinks, they alone.
    pub mask: mask::MaskVariant,
}

params! {
    pub(crate) struct Params {
        q: View,
        k: View,
        v: View,
        d_out: View,
        gradient: View,
        dropout: View,
        mask: mask::MaskParams,
        shape: [u32; 4],
        first: [u32; 4],
        seed: [u32; 2],
        batch: u32,
        heads: u32,
        group: u32,
        head_dim: u32,
        value_dim: u32,
        accumulates: u32,
        dropout_threshold: u32,
        dropout_scale: f32,
        scale: f32,
        key_lanes: u32,
        parts: u32,
        part_rows: u32,
        pad: [u32; 2],
    }
}

/// `score_gradients/lanes.wgsl` where an invocation has all of a sum.
const ALONE: &str = "fn sum_of_lanes(x: f32, lane: u32) -> f32 {\n    return x;\n}\n";

impl ScoreGradients {
    /// By what the tensor's element is multiplied in the score of a pair.
    fn factor(&self) -> String {
        let factor = match self.of {
            Added::Slopes => "alibi_distance(q, j)",
            Added::Bias if self.mask.has(Id::Blocks) => "select(1.0, 0.0, block_at(q, j) == FULL)",
            _ => "1.0",
        };
        format!("fn factor_of(q: Query, j: u32) -> f32 {{\n    return {factor};\n}}\n")
    }

    fn bindings(&self) -> Vec<Binding> {
        let mut bindings = Vec::new();
        if self.of != Added::Sinks {
            let inputs = ["q", "k", "v", "d_out"];
            bindings.extend(inputs.map(|name| Binding::read(name, self.dtype, self.width)));
        }
        bindings.push(Binding::read("row_stats", DType::F32, Width::One));
        bindings.push(Binding::write("gradient", self.gradient, Width::One));
        bindings.extend(self.mask.bindings());
        bindings.extend(self.drop.binding());
        bindings
    }

    pub fn describe(&self) -> Kernel {
        let mut constants =
            vec![Constant::U32("WORKGROUP", WORKGROUP), Constant::Bool("SHARED", self.shared)];
        let mask = if self.of == Added::Sinks { self.mask.wgsl() } else { self.mask.wgsl_with_slope() };
        let factor = self.factor();
        let mut parts = vec![shader!("tensor/view"), shader!("backward/stats"), shader!("score_gradients")];
        let (lanes, workgroup_memory) =
            if self.shared { (shader!("score_gradients/lanes"), 4 * WORKGROUP) } else { (ALONE, 0) };
        parts.push(lanes);
        if self.of == Added::Sinks {
            constants.push(Constant::Bool("NATURAL_SCORES", true));
            parts.extend([shader!("softmax/online"), shader!("score_gradients/sinks")]);
        } else {
            constants.extend([
                Constant::Bool("OF_PLACES", self.of == Added::Relative),
                Constant::Bool("IN_FOURS", self.width == Width::Four),
                Constant::Bool("WIDE", true),
                Constant::Bool("IN_CHAINS", self.chains),
                Constant::Bool("PER_PAIR_MASK", self.mask.is_per_pair()),
                Constant::Bool("HAS_DROPOUT", self.drop != DropoutKind::None),
            ]);
            parts.extend([
                shader!("backward/pair"),
                shader!("backward/rows"),
                shader!("score_gradients/pairs"),
                self.drop.wgsl(),
            ]);
            parts.push(&factor);
        }
        parts.push(&mask);
        Kernel { workgroup_memory, ..Kernel::new::<Params>(&constants, self.bindings(), &parts, WORKGROUP) }
    }

    /// Each value of each axis, not their whole product.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for of in Added::ALL {
            let plain = ScoreGradients {
                of,
                shared: true,
                gradient: DType::F32,
                dtype: DType::F32,
                width: Width::Four,
                chains: false,
                drop: DropoutKind::None,
                mask: mask::MaskVariant::with_rules([of.id()]),
            };
            all.extend(FLOATS.map(|gradient| ScoreGradients { gradient, ..plain }));
            if of == Added::Sinks {
                let masks = FLOATS.map(|dtype| mask::MaskVariant::with_sink_logits(Some(dtype)));
                all.extend(masks.map(|mask| ScoreGradients { mask, ..plain }));
                continue;
            }
            for dtype in FLOATS {
                all.extend(WIDTHS.map(|width| ScoreGradients { dtype, width, ..plain }));
            }
            all.extend(DropoutKind::ALL.map(|drop| ScoreGradients { drop, ..plain }));
            all.push(ScoreGradients { chains: true, ..plain });
            // Of slopes, the distance is their rule's.
            let masks = mask::MaskVariant::all().into_iter().map(mask::MaskVariant::scores_only);
            let masks = masks.filter(|mask| of != Added::Slopes || mask.has(of.id()));
            all.extend(masks.map(|mask| ScoreGradients { mask, ..plain }));
            let softcapped = plain.mask.softcapped();
            all.push(ScoreGradients { mask: softcapped, ..plain });
            if of == Added::Bias {
                let mask = mask::MaskVariant::with_rules([Id::Blocks, Id::Bias]);
                all.push(ScoreGradients { mask, ..plain });
                all.extend(FLOATS.map(|gradient| ScoreGradients { shared: false, gradient, ..plain }));
            }
        }
        // With more tensors than every device binds.
        all.retain(|kernel| kernel.bindings().len() <= 8);
        all
    }
}
