//! Steps in Burn's graph of gradients.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind};
use burn::tensor::Tensor;
use burn_cubecl::Cube;
use burn_cubecl::tensor::CubeTensor;
use wgpu_attention::TensorView;

use crate::error::{Error, Result};
use crate::primitive;
use crate::tensor::{Bound, Float, empty_like, untracked};

/// The backward pass of a call, with the tensors that it reads.
pub(crate) trait Gradient: Debug + Send + Sync {
    /// Returns the gradients of the call's float tensors, in their order, where `wanted`.
    fn backward(&self, d_out: CubeTensor, wanted: &[bool]) -> Result<Vec<Option<CubeTensor>>>;
}

/// The tensors for the gradients of a call's float tensors, where they are wanted.
pub(crate) struct GradientTensors {
    tensors: Vec<Option<CubeTensor>>,
    bound: Vec<Option<Bound>>,
}

impl GradientTensors {
    /// Allocates a tensor like each of `floats` that is wanted.
    pub fn new<'a>(floats: impl IntoIterator<Item = &'a CubeTensor>, wanted: &[bool]) -> Result<Self> {
        let tensors: Vec<_> =
            floats.into_iter().zip(wanted).map(|(t, wanted)| wanted.then(|| empty_like(t))).collect();
        let bind = |t: &Option<CubeTensor>| t.as_ref().map(|t| Bound::new("gradient", t)).transpose();
        let bound = tensors.iter().map(bind).collect::<Result<_>>()?;
        Ok(GradientTensors { tensors, bound })
    }

    pub fn bound(&self, n: usize) -> Option<&Bound> {
        self.bound[n].as_ref()
    }

    pub fn view(&self, n: usize) -> Option<TensorView<'_>> {
        self.bound(n).map(Bound::view)
    }

    /// The allocated tensors.
    pub fn iter(&self) -> impl Iterator<Item = &CubeTensor> {
        self.tensors.iter().flatten()
    }

    pub fn into_tensors(self) -> Vec<Option<CubeTensor>> {
        self.tensors
    }
}

/// The float tensors of a call, in their order, and their places in the graph.
pub(crate) struct Parents {
    pub tensors: Vec<CubeTensor>,
    guards: Vec<NodeGuard>,
    context: DispatchAutodiffContext,
    tracked: Vec<bool>,
}

impl Parents {
    /// Executes what Burn has queued for the tensors, and takes their handles.
    pub fn new(floats: Vec<(&'static str, Float)>) -> Result<Self> {
        let mut context = DispatchAutodiffContext::Disabled;
        let (mut tensors, mut guards, mut tracked) = (Vec::new(), Vec::new(), Vec::new());
        for (name, float) in floats {
            context = match (context, float.context) {
                (DispatchAutodiffContext::Disabled, other) | (other, DispatchAutodiffContext::Disabled) => {
                    other
                }
                (a, b) if a == b => a,
                _ => return Err(Error::Checkpointing { tensor: name }),
            };
            tracked.push(float.tensor.is_tracked());
            let (tensor, guard) = float.tensor.into_parts();
            tensors.push(primitive::float(tensor));
            guards.push(guard);
        }
        Ok(Parents { tensors, guards, context, tracked })
    }

    /// True for each tensor whose gradient a backward pass computes.
    pub fn tracked(&self) -> &[bool] {
        &self.tracked
    }

    /// True if a backward pass may follow.
    pub fn any_tracked(&self) -> bool {
        self.tracked.contains(&true)
    }

    /// Makes `out` a result that no gradient reaches.
    pub fn untracked<const D: usize>(self, out: CubeTensor) -> Tensor<D> {
        self.finish(out, || unreachable!("nothing is tracked"))
    }

    /// Makes `out` the result of the call in the graph.
    pub fn finish<const D: usize>(
        self,
        out: CubeTensor,
        gradient: impl FnOnce() -> Arc<dyn Gradient>,
    ) -> Tensor<D> {
        if self.context == DispatchAutodiffContext::Disabled {
            return untracked(out);
        }
        let out = primitive::publish(out);
        macro_rules! register {
            ($($n:literal)*) => {
                match self.guards.len() {
                    $($n => {
                        let Ok(guards) = <[NodeGuard; $n]>::try_from(self.guards) else { unreachable!("the length was matched") };
                        match Step.prepare::<NoCheckpointing>(guards).compute_bound().stateful() {
                            OpsKind::Tracked(step) => step.finish(gradient(), out),
                            OpsKind::UnTracked(step) => step.finish(out),
                        }
                    })*
                    n => unreachable!("no call has {n} float tensors"),
                }
            };
        }
        let tensor = register!(3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19);
        Tensor::from_dispatch(DispatchTensor {
            kind: DispatchTensorKind::Autodiff(Box::new(DispatchTensorKind::Cube(BackendTensor::Autodiff(
                tensor,
            )))),
            autodiff: self.context,
        })
    }
}

/// The step of every call. Its state computes the gradients.
#[derive(Debug)]
struct Step;

impl<const N: usize> Backward<Cube, N> for Step {
    type State = Arc<dyn Gradient>;

    /// # Panics
    /// If the runtime fails, for example because the device was lost. Burn's backward pass has no
    /// results to return errors in. The forward call has checked everything else.
    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = primitive::float(grads.consume::<Cube>(&ops.node));
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let computed = match ops.state.backward(d_out, &wanted) {
            Ok(computed) => computed,
            Err(error) => panic!("the backward pass of attention: {error}"),
        };
        for (parent, gradient) in ops.parents.into_iter().zip(computed) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<Cube>(parent.id, primitive::publish(gradient));
            }
        }
    }
}
