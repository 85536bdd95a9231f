//! Weights of norms that operators own, and where their gradients go.

use super::config::NormConfig;
use super::dispatch::{NormInputs, NormOp};
use crate::device::DeviceFacts;
use crate::matmul::projection::check_vector;
use crate::tensor::{Access, Error, Tensor, TensorView};

/// The weight and the bias of a norm, `[features]` each, see [`TensorView::vector`]; F32, F16 or
/// BF16.
#[derive(Clone, Copy, Debug, Default)]
pub struct NormWeights<'a> {
    /// What is normalised is multiplied by it; 1 without.
    pub weight: Option<TensorView<'a>>,
    /// What is added in the end; 0 without.
    pub bias: Option<TensorView<'a>>,
}

/// Where the gradients of [`NormWeights`](crate::rows::NormWeights) go, `[features]` each: nowhere
/// by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct NormGradients<'a> {
    /// Of the weight; F32, F16 or BF16.
    pub weight: Option<TensorView<'a>>,
    /// Of the bias; F32, F16 or BF16.
    pub bias: Option<TensorView<'a>>,
}

#[derive(Clone, Debug)]
pub(crate) struct OwnedNorm {
    /// How errors name the weight and the bias.
    names: [&'static str; 2],
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
}

impl OwnedNorm {
    /// Of weights that errors call `names`.
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

    /// The weight, or the bias, if it is there.
    pub fn tensor(&self, n: usize) -> Option<&Tensor> {
        [&self.weight, &self.bias][n].as_ref()
    }

    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, TensorView<'_>)> {
        let all = self.names.into_iter().zip([&self.weight, &self.bias]);
        all.filter_map(|(name, t)| Some((name, t.as_ref()?.view())))
    }
}
