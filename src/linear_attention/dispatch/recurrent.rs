//! Attention one token at a time.

use super::builder::Builder;
use crate::kernel::in_scratch;
use crate::linear_attention::kernels::linear_recurrent::LinearRecurrentCall;
use crate::tensor::{DType, Shape};

impl<'a> Builder<'a, '_> {
    /// Records attention one token at a time.
    pub fn recurrent(&mut self) {
        let problem = self.problem;
        let Shape { batch, heads, kv_heads, q_len, value_dim, .. } = problem.shape;
        let [first, _] = problem.own_state();
        let features = problem.features;
        let own = self.memory.carry.map(|buffer| {
            let state = in_scratch(buffer, DType::F32, [batch, kv_heads, features, value_dim], 0);
            [state, in_scratch(buffer, DType::F32, [batch, kv_heads, features, 1], first)]
        });
        let of_caller = problem.state.map(|state| [state.state, state.norm]);
        let Some([state, norm]) = of_caller.or(own) else { return };
        let call = LinearRecurrentCall {
            q: problem.q,
            k: problem.k,
            v: problem.v,
            decay: problem.decay,
            beta: problem.beta,
            state,
            norm: problem.normalised.then_some(norm),
            written: problem.out,
            heads: heads as u32,
            group: problem.shape.group() as u32,
            features: features as u32,
            value_dim: value_dim as u32,
            q_len: q_len as u32,
            has_state: problem.state.is_some_and(|state| state.given).into(),
            eps: problem.eps,
            scale: problem.scale,
            phi: problem.phi,
            rule: problem.rule,
        };
        self.all.push(call.dispatch([1, kv_heads, batch], self.device));
    }
}
