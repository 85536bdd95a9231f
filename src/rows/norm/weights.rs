//! Weights of norms that operators own, and the outputs for their gradients.

use super::config::NormConfig;
use super::dispatch::{NormInputs, NormOp};
use crate::device::DeviceFacts;
use crate::matmul::projection::check_vector;
use crate::tensor::{Access, Error, Tensor, TensorView};

/// The weight and the bias of a norm, each `[features]` (see [`TensorView::vector`]); F32, F16 or
/// BF16.
#[derive(Clone, Copy, Debug, Default)]
pub struct NormWeights<'a> {
    /// The factor of the normalised rows; 1 if absent.
    pub weight: Option<TensorView<'a>>,
    /// The term that is added last; 0 if absent.
    pub bias: Option<TensorView<'a>>,
}

/// The outputs for the gradients of [`NormWeights`](crate::rows::NormWeights), each `[features]`.
/// By default there are none.
#[derive(Clone, Copy, Debug, Default)]
pub struct NormGradients<'a> {
    /// The output for the gradient of the weight; F32, F16 or BF16.
    pub weight: Option<TensorView<'a>>,
    /// The output for the gradient of the bias; F32, F16 or BF16.
    pub bias: Option<TensorView<'a>>,
}

#[derive(Clone, Debug)]
pub(crate) struct OwnedNorm {
    /// The names of weight and bias in error messages.
    names: [&'static str; 2],
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
}

impl OwnedNorm {
    /// Creates a norm that owns `weights`. `names` are their names in error messages.
    pub fn new(
        names: [&'static str; 2],
        weights: &NormWeights,
        features: usize,
        device: &DeviceFacts,
    ) -> Result<Self, Error> {
        for (name, t) in names.into_iter().zip([weights.weight, weights.bias]) {
            t.map_or(Ok(()), |t| check_vector(name, &t, features, Access::Read, device))?;
        }
        let owned = |t: Option<TensorView>| t.map(TensorView::to_owned);
        Ok(OwnedNorm { names, weight: owned(weights.weight), bias: owned(weights.bias) })
    }

    pub fn op<'a>(
        &'a self,
        config: NormConfig,
        x: TensorView<'a>,
        residual: Option<TensorView<'a>>,
    ) -> NormOp<'a> {
        let view = |t: &'a Option<Tensor>| t.as_ref().map(Tensor::view);
        let [weight, bias] = [view(&self.weight), view(&self.bias)];
        NormOp { config, inputs: NormInputs { residual, weight, bias, ..NormInputs::new(x) } }
    }

    /// The weight (0) or the bias (1), if present.
    pub fn tensor(&self, n: usize) -> Option<&Tensor> {
        [&self.weight, &self.bias][n].as_ref()
    }

    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, TensorView<'_>)> {
        let all = self.names.into_iter().zip([&self.weight, &self.bias]);
        all.filter_map(|(name, t)| Some((name, t.as_ref()?.view())))
    }
}
