//! Options that select kernels. They do not change the operation.

use crate::device::family::TwoForms;
use crate::device::{DeviceFacts, Family, Fragment};
use crate::tensor::{DType, Error};

/// The class of kernels to use. Both classes need only the default limits of WebGPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Target {
    /// Chosen by the device: `Software` if wgpu reports `DeviceType::Cpu`, otherwise `Gpu`. If
    /// [`Pipelines::check`](crate::Pipelines::check) disabled that class, the other class is used.
    #[default]
    Auto,
    /// For GPUs: tiles in workgroup memory, sums in registers.
    Gpu,
    /// For software drivers: all invocations of a workgroup load the same elements, with little
    /// workgroup memory.
    Software,
}

/// The sequence of kernels that computes attention. All sequences compute the same function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// `Fused`, or `Staged` in two cases. Either the call returns attention weights or scores, or
    /// it has too many tensors. Mask and dropout may need more tensors than the device can bind
    /// together with q, k, v, out and lse.
    #[default]
    Auto,
    /// Scores, softmax and weighted sum in separate kernels, with the score matrix in memory.
    Staged,
    /// One pass with an online softmax, without a score matrix.
    Fused,
}

/// Use of a device's matrix units: tensor cores, simdgroup matrices.
///
/// Matrix units multiply f16 and accumulate in f32. Scores and the output are accumulated in f32,
/// as in other kernels. The attention weights are rounded to f16 before they are multiplied by the
/// values.
///
/// The error of the output is at most 2⁻¹¹ of `Σ weight · |value|`; without matrix units it is
/// 2⁻²⁴. In addition, every key has an error of 2⁻²⁷ of the row's largest weight, because f16 has
/// no smaller numbers. On hardware that flushes f16 subnormals to zero, this error is 2⁻¹⁶.
///
/// Backward passes round the weights and the gradients of scores to f16. The error is again at most
/// 2⁻¹¹ of the sum. Weights below 2⁻³⁸ become zero. Gradients of scores become zero below 2⁻³⁶ of
/// the largest one that the workgroup has computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MatrixUnits {
    /// Use matrix units if all of these hold.
    /// [`Pipelines::with_adapter`](crate::Pipelines::with_adapter) found them. The tensors are F16,
    /// or [`KernelOptions::f16_operands`] is set. The call has enough rows to fill fragments.
    #[default]
    Auto,
    /// Never use matrix units.
    Never,
    /// Use matrix units in every kernel that supports them. Calls that cannot use them are refused.
    /// For tests and measurements.
    Always,
}

/// The kernels to use, and the size of their dispatches. The default options suit the device.
/// [`f16_operands`](Self::f16_operands) trades precision for speed, and
/// [`batch_invariant`](Self::batch_invariant) speed for bits that do not depend on a batch. All
/// other options are for tests, measurements and systems that limit the time of a dispatch.
///
/// ```
/// use wgpu_attention::{Config, KernelOptions};
/// use wgpu_attention::tuning::Algorithm;
/// let config = Config::new(8, 64).kernel_options(KernelOptions::new().algorithm(Algorithm::Staged));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct KernelOptions {
    pub(crate) target: Target,
    pub(crate) algorithm: Algorithm,
    pub(crate) matrix_units: MatrixUnits,
    pub(crate) f16_operands: bool,
    pub(crate) work_limit: Option<u64>,
    pub(crate) splits: Option<usize>,
    pub(crate) fixed: bool,
    pub(crate) batch_invariant: bool,
}

impl Default for KernelOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl KernelOptions {
    /// The default options: plans choose the kernels for the device.
    pub const fn new() -> Self {
        KernelOptions {
            target: Target::Auto,
            algorithm: Algorithm::Auto,
            matrix_units: MatrixUnits::Auto,
            f16_operands: false,
            work_limit: None,
            splits: None,
            fixed: false,
            batch_invariant: false,
        }
    }

    /// Options for reproducible results: plans ignore the measurements of
    /// [`Pipelines::tune`](crate::Pipelines::tune), and follow the built-in rules. Results then
    /// have the same bits on every run and on every machine with such a device. Kernels that a
    /// check disabled are the exception.
    pub const fn fixed() -> Self {
        KernelOptions { fixed: true, ..Self::new() }
    }

    /// Sets the class of kernels.
    pub const fn target(mut self, target: Target) -> Self {
        self.target = target;
        self
    }

    /// Sets the sequence of kernels for attention.
    pub const fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = algorithm;
        self
    }

    /// Sets the use of matrix units in attention, its gradients of q, k and v, and projections.
    pub const fn matrix_units(mut self, units: MatrixUnits) -> Self {
        self.matrix_units = units;
        self
    }

    /// Allows matrix units to round F32 operands to f16. Operands are queries, keys, values, and
    /// the inputs and weights of projections. Each operand then has an error of 2⁻¹¹, and operands
    /// above 65504 become infinity. By default F32 tensors are computed in f32. BF16 tensors are
    /// always computed in f32.
    pub const fn f16_operands(mut self, allowed: bool) -> Self {
        self.f16_operands = allowed;
        self
    }

    /// Sets the largest number of floating-point operations of one dispatch of the fused path, with
    /// masked operations included. Longer calls are split into several dispatches, because some
    /// systems limit the time of a dispatch (Windows: two seconds).
    ///
    /// The default is 2³⁷. It is larger for forward passes on a GPU whose matrix units
    /// [`Pipelines::with_adapter`](crate::Pipelines::with_adapter) found. There it is 2³⁹, or 2⁴⁰
    /// if the kernel uses the matrix units.
    ///
    /// A split call gives the same bits as one dispatch. Single workgroups and projections are
    /// never split.
    pub const fn work_limit(mut self, flops: u64) -> Self {
        self.work_limit = Some(flops);
        self
    }

    /// The largest number of operations of one dispatch. 2³⁷ operations take a quarter of a second
    /// at half a TFLOP/s. Watchdogs wait for two seconds or more.
    pub(crate) fn most_work(&self) -> u64 {
        self.work_limit.unwrap_or(1 << 37)
    }

    /// The largest number of operations of one dispatch of a forward pass. Each dispatch waits for
    /// its longest workgroup, so large GPUs need large dispatches. GPUs with matrix units compute
    /// 2³⁹ operations in half a second without them, and 2⁴⁰ operations with them.
    pub(crate) fn most_forward_work(&self, on_matrix_units: bool, device: &DeviceFacts) -> u64 {
        let is_large = device.matrix.is_some() && !device.software;
        let usual = match (is_large, on_matrix_units) {
            (false, _) => return self.most_work(),
            (true, false) => 1 << 39,
            (true, true) => 1 << 40,
        };
        self.work_limit.unwrap_or(usual)
    }

    /// Sets the number of workgroups that share the keys of a tile of queries, 1 to 128. It applies
    /// to the fused path. By default the plan chooses enough workgroups to fill the device. With
    /// many queries that is one.
    pub const fn splits(mut self, splits: usize) -> Self {
        self.splits = Some(splits);
        self
    }

    /// Makes the bits of a row independent of all other rows of the call. A sequence then has the
    /// same bits alone and in any batch. In steps with a cache, it has the bits of one call for all
    /// tokens. The idea is from "Defeating Nondeterminism in LLM Inference" (He et al. 2025).
    ///
    /// It applies to forward passes of attention, products, norms, and the layers and stacks that
    /// consist of them. Operators that cannot do it refuse it.
    ///
    /// - Attention uses one kernel for every number of rows, without matrix units. It splits keys
    ///   at each multiple of 1024. A call has at most 131072 keys, and a cache as much capacity.
    /// - With more than 1024 keys or capacity, it needs temporary memory. Each row, head, value
    ///   channel and split takes 4 bytes. Prompts can come in several steps.
    ///
    /// The results are those of the same device, driver, types, storage, mask rules and outputs.
    /// Keys count from the first key of a sequence's batch entry. Padding on the left, packed
    /// sequences and rings change the index of a key, and with it the bits. Dropout depends on the
    /// index in the batch. The bits may also differ if values are infinite or NaN.
    pub const fn batch_invariant(mut self, on: bool) -> Self {
        self.batch_invariant = on;
        self
    }

    /// Refuses [`batch_invariant`](Self::batch_invariant), for an operator that cannot do it.
    pub(crate) fn refuse_batch_invariant(&self, what: &'static str) -> Result<(), Error> {
        if !self.batch_invariant {
            return Ok(());
        }
        let why = "its sums depend on the lengths of the call; leave `KernelOptions::batch_invariant` unset";
        Err(Error::Unsupported { what, why })
    }

    /// True if plans may follow measurements: no option selects kernels.
    pub(crate) fn is_open(&self) -> bool {
        let KernelOptions { target, algorithm, matrix_units, splits, fixed, batch_invariant, .. } = *self;
        let auto = (target, algorithm, matrix_units) == (Target::Auto, Algorithm::Auto, MatrixUnits::Auto);
        auto && splits.is_none() && !fixed && !batch_invariant
    }

    /// The fragments that the kernels of `family` use for operands of `dtype`, or the reason why
    /// they use none.
    pub(crate) fn fragment(
        &self,
        dtype: DType,
        family: Family,
        device: &DeviceFacts,
    ) -> Result<Fragment, &'static str> {
        let fragment = device.matrix.ok_or(
            "the device's features or its adapter lack them, or the pipelines were made without `Pipelines::with_adapter`",
        )?;
        match self.matrix_units {
            _ if device.lacks(family) => {
                Err("they are disabled on this device; `Pipelines::report` gives the reason")
            }
            MatrixUnits::Never => Err("`MatrixUnits::Never` is set"),
            _ if dtype == DType::BF16 => {
                Err("they do not multiply BF16, and BF16 is not rounded to f16; use F16 tensors")
            }
            _ if dtype != DType::F16 && !self.f16_operands => {
                Err("F32 operands must be rounded to f16; set `KernelOptions::f16_operands`")
            }
            MatrixUnits::Auto if self.target.is_cpu(device) => Err("software drivers have none"),
            _ => Ok(fragment),
        }
    }

    /// Returns the choice for matrix units. Returns an error if there is none and the options
    /// demand matrix units.
    pub(crate) fn settle<T>(&self, found: Result<T, &'static str>) -> Result<Option<T>, Error> {
        match found {
            Ok(found) => Ok(Some(found)),
            Err(why) if self.matrix_units == MatrixUnits::Always => {
                Err(Error::Unsupported { what: "matrix units for this call", why })
            }
            Err(_) => Ok(None),
        }
    }
}

impl Target {
    pub(crate) fn is_cpu(self, device: &DeviceFacts) -> bool {
        match self {
            Target::Auto => device.software,
            Target::Gpu => false,
            Target::Software => true,
        }
    }

    /// Chooses one of two kernel variants: the default of the device, unless only that one is
    /// disabled.
    pub(crate) fn choose(self, forms: TwoForms, device: &DeviceFacts) -> bool {
        let cpu = self.is_cpu(device);
        let replaced = device.lacks(forms.of(cpu)) && !device.lacks(forms.of(!cpu));
        cpu != (self == Target::Auto && replaced)
    }
}
