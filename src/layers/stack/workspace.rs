//! The tensors between the parts of layers, their norms and sums, and their scratch.

use super::config::TransformerLayerConfig;
use crate::attention::check_dtype;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, KernelOptions, Scratch, ScratchSize, Slot, in_scratch};
use crate::layers::multi_head::config::MultiHeadConfig;
use crate::matmul::projection::dispatch_backward::Gradient;
use crate::rows::elementwise::dispatch::ElementwiseOp;
use crate::rows::norm::dispatch::NormGradients as NormTargets;
use crate::rows::norm::{NormGradients, OwnedNorm};
use crate::tensor::{Access, DType, Error, TensorView, check_float, count, same_view};

/// The rows of a stack: `[batch, 1, length, features]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub batch: usize,
    pub length: usize,
}

impl Rows {
    pub fn shape(&self, features: usize) -> [usize; 4] {
        [self.batch, 1, self.length, features]
    }
}

/// The tensors between the parts of layers, each in a part of the scratch, and the options of all
/// layers.
#[derive(Clone, Copy)]
pub(crate) struct Workspace<'a> {
    pub config: &'a TransformerLayerConfig,
    pub rows: Rows,
    pub scratch: &'a Scratch,
    pub kernel_options: &'a KernelOptions,
    pub device: &'a DeviceFacts,
    /// True if gradients that leave the stack are added to the values of their tensors.
    pub accumulates: bool,
}

impl<'a> Workspace<'a> {
    pub fn tensor(&self, slot: Slot, features: usize) -> Result<TensorView<'a>, Error> {
        let dtype = self.config.attention.dtype;
        Ok(in_scratch(self.scratch.buffer(slot)?, dtype, self.rows.shape(features), 0))
    }

    pub fn features(&self, slot: Slot) -> Result<TensorView<'a>, Error> {
        self.tensor(slot, self.config.features())
    }

    /// A gradient, which is F32 whatever the stack's type: many are below f16's smallest number.
    pub fn gradient(&self, slot: Slot, features: usize) -> Result<TensorView<'a>, Error> {
        Ok(in_scratch(self.scratch.buffer(slot)?, DType::F32, self.rows.shape(features), 0))
    }

    pub fn norm(
        &self,
        norm: &'a OwnedNorm,
        x: TensorView<'a>,
        residual: Option<TensorView<'a>>,
        out: TensorView<'a>,
        sum: Option<TensorView<'a>>,
    ) -> Dispatch<'a> {
        norm.op(self.config.norm, x, residual).forward(out, sum, self.kernel_options, self.device)
    }

    /// `out = a + b`
    pub fn sum(&self, a: TensorView<'a>, b: TensorView<'a>, out: TensorView<'a>) -> Dispatch<'a> {
        let op = ElementwiseOp { activation: None, x: a, multiply: None, residual: Some(b) };
        op.forward(out, self.device)
    }

    /// The place of a gradient of weights.
    pub fn gradient_of(&self, view: Option<TensorView<'a>>) -> Option<Gradient<'a>> {
        view.map(|view| Gradient { view, accumulates: self.accumulates })
    }

    /// Computes, from the gradient `d_out` of `norm(x + residual)`, the gradient of the sum in
    /// `d_x`. It adds `d_sum`, which may be the same tensor as `d_x`.
    pub fn norm_backward(
        &self,
        (norm, to): (&'a OwnedNorm, NormGradients<'a>),
        (x, residual): (TensorView<'a>, Option<TensorView<'a>>),
        [d_out, d_x]: [TensorView<'a>; 2],
        d_sum: Option<TensorView<'a>>,
    ) -> Result<Dispatches<'a>, Error> {
        let in_place = d_sum.is_some_and(|d_sum| same_view(&d_sum, &d_x));
        let targets = NormTargets {
            d_out,
            d_sum: d_sum.filter(|_| !in_place),
            d_x: Some(Gradient { view: d_x, accumulates: in_place }),
            d_gate: None,
            d_weight: self.gradient_of(to.weight),
            d_bias: self.gradient_of(to.bias),
        };
        norm.op(self.config.norm, x, residual).backward(
            &targets,
            self.scratch,
            self.kernel_options,
            self.device,
        )
    }

    /// Copies a gradient `d` out of the scratch, or adds it.
    pub fn hand_over(&self, d: TensorView<'a>, to: TensorView<'a>) -> Dispatch<'a> {
        let copy = ElementwiseOp { activation: None, x: d, multiply: None, residual: None };
        copy.backward(d, Some(to), None, self.accumulates, self.device)
    }
}

/// The element at which the product of the gate begins, after the product of `up`. Every device can
/// bind there.
pub(super) fn gate_offset(config: &TransformerLayerConfig, rows: &Rows) -> usize {
    let align = 256 / config.attention.dtype.bytes();
    count(rows.shape(config.hidden_features)).next_multiple_of(align)
}

/// The byte at which the gradient of the gate's product begins, after the gradient of `up`'s
/// product.
pub(super) fn gate_gradient_offset(bytes: u64) -> u64 {
    bytes.next_multiple_of(256)
}

/// The bytes of a tensor of `rows` with `features`, rounded up to 4.
pub(crate) fn bytes(config: &TransformerLayerConfig, rows: &Rows, features: usize) -> u64 {
    (count(rows.shape(features)) as u64)
        .saturating_mul(config.attention.dtype.bytes() as u64)
        .next_multiple_of(4)
}

/// The scratch of the forward pass of layers, without the scratch of attention.
pub(crate) fn forward_size(
    config: &TransformerLayerConfig,
    rows: &Rows,
    keeps: bool,
    streams: impl IntoIterator<Item = Slot>,
) -> ScratchSize {
    let wide = bytes(config, rows, config.features());
    let hidden = bytes(config, rows, config.hidden_features);
    let mut size = ScratchSize::default().with(Slot::Hidden, hidden);
    for slot in streams {
        size = size.with(slot, wide);
    }
    if config.gated || keeps {
        let offset = gate_offset(config, rows) as u64 * config.attention.dtype.bytes() as u64;
        size = size.with(Slot::Products, if config.gated { offset + hidden } else { hidden });
    }
    size
}

/// Checks an input or output of a stack: `[batch, 1, length, features]` of the layer's dtype.
pub(crate) fn check_rows_of(
    name: &'static str,
    view: &TensorView,
    config: &MultiHeadConfig,
    access: Access,
    device: &DeviceFacts,
) -> Result<(), Error> {
    check_float(name, view)?;
    check_dtype(config.dtype, device)?;
    view.check_as(name, config.dtype, access, device)
}

/// The scratch of the gradients between the parts of layers, and of the norms' gradients.
pub(crate) fn backward_size(
    config: &TransformerLayerConfig,
    rows: &Rows,
    norm: &OwnedNorm,
    x: TensorView,
) -> ScratchSize {
    let wide = 4 * count(rows.shape(config.features())) as u64;
    let hidden = 4 * count(rows.shape(config.hidden_features)) as u64;
    let products = gate_gradient_offset(hidden) * u64::from(config.gated) + hidden;
    let size = ScratchSize::default()
        .with(Slot::StreamGradient, wide)
        .with(Slot::MiddleGradient, wide)
        .with(Slot::BranchGradient, wide)
        .with(Slot::HiddenGradient, hidden)
        .with(Slot::ProductsGradient, products);
    // Any norm serves: the size does not depend on the norm.
    size.max(norm.op(config.norm, x, None).sums_size())
}
