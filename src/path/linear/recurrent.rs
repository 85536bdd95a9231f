//! Token by token.

use super::recorder::Recorder;
use crate::kernel::{Dispatch, View};
use crate::kernels::KernelVariant;
use crate::kernels::linear_recurrent;
use crate::path::{grid, in_scratch};
use crate::problem::Shape;
use crate::tensor::{DType, TensorView, broadcast};

impl<'a> Recorder<'a, '_> {
    /// Token by token.
    pub fn recurrent(&mut self) {
        let problem = self.problem;
        let Shape { batch, heads, kv_heads, q_len, value_dim, .. } = problem.shape;
        let view = |t: TensorView| View::of(t, self.device);
        let [first, _] = problem.own_state();
        let features = problem.features;
        let own = self.memory.carry.map(|buffer| {
            let state = in_scratch(buffer, DType::F32, [batch, kv_heads, features, value_dim], 0);
            [state, in_scratch(buffer, DType::F32, [batch, kv_heads, features, 1], first)]
        });
        let of_caller = problem.state.map(|state| [state.state, state.norm]);
        let Some([state, norm]) = of_caller.or(own) else { return };
        // One for all features of a head.
        let decay = problem.decay.map(|mut decay| {
            decay.layout = broadcast(decay.layout);
            decay
        });
        let params = linear_recurrent::Params {
            q: view(problem.q),
            k: view(problem.k),
            v: view(problem.v),
            decay: decay.map_or(View::default(), view),
            beta: problem.beta.map_or(View::default(), view),
            state: view(state),
            norm: view(norm),
            x: view(problem.out),
            heads: heads as u32,
            group: problem.shape.group() as u32,
            features: features as u32,
            value_dim: value_dim as u32,
            q_len: q_len as u32,
            has_state: problem.state.is_some_and(|state| state.given).into(),
            eps: problem.eps,
            scale: problem.scale,
        };
        let variant = linear_recurrent::LinearRecurrent {
            phi: problem.phi,
            rule: problem.rule,
            features: problem.q.dtype(),
            v: problem.v.dtype(),
            out: problem.out.dtype(),
            decay: decay.map_or(DType::F32, |decay| decay.dtype()),
            beta: problem.beta.map_or(DType::F32, |beta| beta.dtype()),
            normalised: problem.normalised,
        };
        let tensors = [
            Some(problem.q),
            Some(problem.k),
            Some(problem.v),
            decay,
            problem.beta,
            Some(state),
            problem.normalised.then_some(norm),
            Some(problem.out),
        ];
        let tensors = tensors.into_iter().flatten().map(|t| self.window(t)).collect();
        self.all.push(Dispatch {
            variant: KernelVariant::LinearRecurrent(variant),
            params: bytemuck::bytes_of(&params).to_vec(),
            tensors,
            grid: grid([1, kv_heads, batch]),
        });
    }
}
