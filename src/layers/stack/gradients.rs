//! The checks of gradients that are written.

use crate::device::DeviceFacts;
use crate::matmul::projection::check_vector;
use crate::rows::norm::{NormGradients, OwnedNorm};
use crate::tensor::{Access, Error, TensorView, check_float, expect_shape};

/// Gradients that are written, each with its name.
pub(crate) type WrittenGradients<'a> = Vec<(&'static str, TensorView<'a>)>;

/// The error for the gradient of a tensor that the stack does not have.
pub(super) fn without(what: &'static str) -> Error {
    Error::Unsupported { what, why: "the stack was made without it; omit this gradient" }
}

impl OwnedNorm {
    pub fn check_gradients<'a>(
        &self,
        gradients: &NormGradients<'a>,
        features: usize,
        written: &mut WrittenGradients<'a>,
        device: &DeviceFacts,
    ) -> Result<(), Error> {
        let all =
            [("d_norm.weight", gradients.weight, &self.weight), ("d_norm.bias", gradients.bias, &self.bias)];
        for (name, gradient, own) in all {
            let Some(gradient) = gradient else { continue };
            if own.is_none() {
                return Err(without(name));
            }
            check_vector(name, &gradient, features, Access::Write, device)?;
            written.push((name, gradient));
        }
        Ok(())
    }
}

/// Checks the gradients of the norm after the last layer. Without that norm it refuses gradients.
pub(crate) fn check_final_gradients<'a>(
    norm: Option<&OwnedNorm>,
    gradients: &NormGradients<'a>,
    features: usize,
    written: &mut WrittenGradients<'a>,
    device: &DeviceFacts,
) -> Result<(), Error> {
    match norm {
        Some(norm) => norm.check_gradients(gradients, features, written, device),
        None if gradients.weight.is_some() || gradients.bias.is_some() => Err(without("d_final_norm")),
        None => Ok(()),
    }
}

/// Checks the gradient of an input, which has the input's shape.
pub(crate) fn check_input_gradient<'a>(
    name: &'static str,
    gradient: Option<TensorView<'a>>,
    input: &TensorView,
    written: &mut WrittenGradients<'a>,
    device: &DeviceFacts,
) -> Result<(), Error> {
    let Some(gradient) = gradient else { return Ok(()) };
    check_float(name, &gradient)?;
    gradient.check(name, Access::Write, device)?;
    expect_shape(name, gradient.shape(), input.shape())?;
    written.push((name, gradient));
    Ok(())
}
