//! Twin of `linear_recurrent.wgsl`.

use super::linear::Phi;
use super::shader;
use crate::feature_map::UpdateRule;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of linear attention token by token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearRecurrent {
    pub phi: Phi,
    pub rule: UpdateRule,
    /// Of q and k, then v, then out.
    pub features: DType,
    pub v: DType,
    pub out: DType,
    /// Of what the rule has.
    pub decay: DType,
    pub beta: DType,
    /// Whether results are divided by the norm.
    pub normalised: bool,
}

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: usize = 64;
/// Features that a norm in workgroup memory has room for.
pub(crate) const MOST_FEATURES: usize = 2048;

params! {
    pub(crate) struct Params {
        q: View,
        k: View,
        v: View,
        decay: View,
        beta: View,
        state: View,
        norm: View,
        x: View,
        heads: u32,
        group: u32,
        features: u32,
        value_dim: u32,
        q_len: u32,
        has_state: u32,
        eps: f32,
        scale: f32,
    }
}

const NO_NORM: &str = "fn begin_norm(b: u32, kv: u32, index: u32) {}
fn add_to_norm(b: u32, kv: u32, t: u32, index: u32) {}
fn result_factor(b: u32, h: u32, t: u32) -> f32 { return p.scale; }
fn end_token() {}
fn end_norm(b: u32, kv: u32, index: u32) {}
";

impl LinearRecurrent {
    pub fn describe(&self) -> Kernel {
        let LinearRecurrent { phi, rule, features, v, out, decay, beta, normalised } = *self;
        let read = |name, dtype| Binding::read(name, dtype, Width::One);
        let write = |name, dtype| Binding::write(name, dtype, Width::One);
        let bindings = [
            Some(read("q", features)),
            Some(read("k", features)),
            Some(read("v", v)),
            rule.has_decay().then(|| read("decay", decay)),
            rule.has_beta().then(|| read("beta", beta)),
            Some(write("state", DType::F32)),
            normalised.then(|| write("norm", DType::F32)),
            Some(write("written", out)),
        ];
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
        let constants = [
            Constant::U32("WORKGROUP", WORKGROUP as u32),
            Constant::U32("NORM_FEATURES", MOST_FEATURES as u32),
            Constant::Bool("IS_DELTA", rule.has_beta()),
        ];
        let norm = if normalised { shader!("linear/norm_shared") } else { NO_NORM };
        let phi = phi.text();
        let parts = [shader!("tensor/view"), &phi, &rules, norm, shader!("linear_recurrent")];
        let bindings = bindings.into_iter().flatten().collect();
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32);
        let memory = if normalised { MOST_FEATURES * size_of::<f32>() } else { 0 };
        Kernel { workgroup_memory: memory as u32, ..kernel }
    }

    pub fn all() -> Vec<Self> {
        let plain = LinearRecurrent {
            phi: Phi::Elu,
            rule: UpdateRule::Linear,
            features: DType::F32,
            v: DType::F32,
            out: DType::F32,
            decay: DType::F32,
            beta: DType::F32,
            normalised: true,
        };
        let mut all: Vec<Self> = Phi::all().into_iter().map(|phi| LinearRecurrent { phi, ..plain }).collect();
        for rule in UpdateRule::ALL {
            for dtype in super::FLOATS {
                all.push(LinearRecurrent {
                    rule,
                    features: dtype,
                    v: dtype,
                    out: dtype,
                    decay: if rule.has_decay() { dtype } else { DType::F32 },
                    beta: if rule.has_beta() { dtype } else { DType::F32 },
                    normalised: !rule.has_beta(),
                    ..plain
                });
            }
            all.push(LinearRecurrent { rule, phi: Phi::Identity, normalised: false, ..plain });
        }
        all
    }
}
