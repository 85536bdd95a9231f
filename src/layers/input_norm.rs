//! The norm of the rows that the first products of a part of a layer read.

use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, KernelOptions};
use crate::matmul::projection::dispatch::{self, LinearOp, NormKind, RowNorm};
use crate::rows::norm::dispatch::{NormInputs, NormOp};
use crate::tensor::{Error, TensorView};

/// A norm. The products that read it have the place of the normalised rows as their x. If their
/// kernel computes the norm, neither that place nor `sum` is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InputNorm<'a> {
    pub op: NormOp<'a>,
    /// The place of the sum of x and the residual, if the norm has a residual.
    pub sum: Option<TensorView<'a>>,
}

impl<'a> InputNorm<'a> {
    /// The norm in a separate dispatch, which writes the rows to `x`.
    pub fn alone(
        self,
        x: TensorView<'a>,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        self.op.forward(x, self.sum, kernel_options, device)
    }

    /// Puts the norm into the kernel of a product, unless it has a residual or a gate.
    fn inside(self, product: LinearOp<'a>) -> Option<LinearOp<'a>> {
        let NormOp { config, inputs: NormInputs { x, residual, weight, bias, gate } } = self.op;
        let kind = if config.centred { NormKind::Layer } else { NormKind::Rms };
        let norm = Some(RowNorm { weight, bias, kind, eps: config.eps as f32 });
        (residual.is_none() && gate.is_none()).then_some(LinearOp { x, norm, ..product })
    }
}

/// The dispatches of `products` and of the norm before them. The products have the same x.
///
/// # Errors
/// `kernel_options` demands kernels that these products do not support.
pub(crate) fn products<'a>(
    norm: Option<InputNorm<'a>>,
    products: &[LinearOp<'a>],
    kernel_options: &KernelOptions,
    device: &DeviceFacts,
) -> Result<Dispatches<'a>, Error> {
    let mut dispatches = Dispatches::new();
    if let Some((norm, first)) = norm.zip(products.first()) {
        let inside: Option<Vec<_>> = products.iter().map(|product| norm.inside(*product)).collect();
        if let Some(inside) = inside.filter(|all| dispatch::computes_norm(all, kernel_options, device)) {
            return dispatch::dispatches(&inside, kernel_options, device);
        }
        dispatches.push(norm.alone(first.x, kernel_options, device));
    }
    dispatches.extend(dispatch::dispatches(products, kernel_options, device)?);
    Ok(dispatches)
}

/// The dispatches of `f(gate) · up` and of the norm before them, if one kernel computes the
/// products: see [`dispatch::gated`].
pub(crate) fn gated<'a>(
    norm: Option<InputNorm<'a>>,
    [up, gate]: [LinearOp<'a>; 2],
    kernel_options: &KernelOptions,
    device: &DeviceFacts,
) -> Option<Result<Dispatches<'a>, Error>> {
    let whole = |products| dispatch::gated(products, kernel_options, device);
    let inside = norm.and_then(|norm| whole([norm.inside(up)?, norm.inside(gate)?]));
    if let Some(gated) = inside {
        return Some(gated.map(|gated| vec![gated]));
    }
    let before = norm.map(|norm| norm.alone(up.x, kernel_options, device));
    Some(whole([up, gate])?.map(|gated| before.into_iter().chain([gated]).collect()))
}
