//! The host side of `linear_recurrent.wgsl`.

use super::linear::Phi;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::linear_attention::feature_map::UpdateRule;
use crate::tensor::DType;

kernel! {
    /// Linear attention token by token.
    LinearRecurrent, LinearRecurrentCall
    tensors {
        q: One Read F32 one view,
        k: One Read F32 one view,
        v: One Read F32 one view,
        // Present if the rule uses them. A decay with one channel is broadcast over the features of
        // a head.
        decay: Opt Read F32 one repeating,
        beta: Opt Read F32 one view,
        state: One Write F32 one view,
        // Results are divided by the norm if it is present.
        norm: Opt Write F32 one view,
        written: One Write F32 one view,
    }
    numbers {
        heads: u32,
        /// Query heads of a key/value head.
        group: u32,
        features: u32,
        value_dim: u32,
        q_len: u32,
        /// 1 if sequences continue from the contents of `state`.
        has_state: u32,
        eps: f32,
        /// Factor of results that are not divided by the norm.
        scale: f32,
    }
    variant {
        phi: Phi,
        rule: UpdateRule,
    }
}

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: usize = 64;
/// The most features of a norm in workgroup memory.
pub(crate) const MOST_FEATURES: usize = 2048;

const NO_NORM: &str = "fn begin_norm(b: u32, kv: u32, index: u32) {}
fn add_to_norm(b: u32, kv: u32, t: u32, index: u32) {}
fn result_factor(b: u32, h: u32, t: u32) -> f32 { return p.scale; }
fn end_token() {}
fn end_norm(b: u32, kv: u32, index: u32) {}
";

impl Variant for LinearRecurrent {
    const LABEL: &'static str = "attention.linear_recurrent";
    const FAMILIES: Families = Families::of(Family::LinearRecurrence);

    fn describe(&self) -> Kernel {
        let rule = self.rule;
        let kept = match rule {
            UpdateRule::Gated | UpdateRule::GatedDelta => "exp(decay_at(view_at(p.decay, b, kv, t, f)))",
            UpdateRule::Averaged => "decay_at(view_at(p.decay, b, kv, t, 0u))",
            UpdateRule::Linear | UpdateRule::Delta => "1.0",
        };
        let rate = match rule {
            UpdateRule::Delta | UpdateRule::GatedDelta => "beta_at(view_at(p.beta, b, kv, t, 0u))",
            UpdateRule::Averaged => "1.0 - decay_at(view_at(p.decay, b, kv, t, 0u))",
            UpdateRule::Linear | UpdateRule::Gated => "1.0",
        };
        let rules = format!(
            "fn kept(b: u32, kv: u32, t: u32, f: u32) -> f32 {{ return {kept}; }}\n\
             fn rate(b: u32, kv: u32, t: u32) -> f32 {{ return {rate}; }}\n"
        );
        let (norm, memory) = match self.norm {
            Some(_) => (shader!("linear_attention/norm_shared"), MOST_FEATURES * size_of::<f32>()),
            None => (NO_NORM, 0),
        };
        let phi = self.phi.text();
        let parts =
            [shader!("tensor/view"), &phi, &rules, norm, shader!("linear_attention/linear_recurrent")];
        self.declare()
            .u32("WORKGROUP", WORKGROUP as u32)
            .u32("NORM_FEATURES", MOST_FEATURES as u32)
            .bool("IS_DELTA", rule.has_beta())
            .kernel(&parts, WORKGROUP as u32, memory as u32)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |phi, rule: UpdateRule, dtype, normalised: bool| LinearRecurrent {
            q: dtype,
            k: dtype,
            v: dtype,
            decay: rule.has_decay().then_some(dtype),
            beta: rule.has_beta().then_some(dtype),
            state: DType::F32,
            norm: normalised.then_some(DType::F32),
            written: dtype,
            phi,
            rule,
        };
        let plain = |phi| of(phi, UpdateRule::Linear, DType::F32, true);
        let mut all: Vec<Self> = Phi::all().into_iter().map(plain).collect();
        for rule in UpdateRule::ALL {
            all.extend(FLOATS.map(|dtype| of(Phi::Elu, rule, dtype, !rule.has_beta())));
            all.push(of(Phi::Identity, rule, DType::F32, false));
        }
        all
    }
}
