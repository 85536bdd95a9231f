//! What a caller may say about how something is computed, not what.

use crate::device::family::TwoForms;
use crate::device::{DeviceFacts, Family, Fragment};
use crate::tensor::{DType, Error};

/// Which class of kernels to use. Both stay inside the WebGPU default limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Target {
    /// By the device: `Software` where wgpu reports `DeviceType::Cpu`, `Gpu` elsewhere; the other
    /// where
    /// [`Pipelines::check`](crate::Pipelines::check) put that one aside.
    #[default]
    Auto,
    /// Tiles staged in workgroup memory, sums in registers: for GPUs.
    Gpu,
    /// Loads that all invocations share, and no more workgroup memory than that takes: for software
    /// drivers.
    Software,
}

/// Which sequence of kernels computes attention. All give the same answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// `Fused`, unless attention weights or scores are asked for, or the mask and the dropout have
    /// more tensors than the device binds beside q, k, v, out and lse; then `Staged`.
    #[default]
    Auto,
    /// Scores, softmax, weighted sum, with the score matrix in memory.
    Staged,
    /// One pass with a running softmax and no score matrix.
    Fused,
}

/// Whether kernels use the matrix units of a device: tensor cores, simdgroup matrices.
///
/// They multiply f16 and sum in f32. Scores and the output are summed in f32 as everywhere; what
/// they round and other kernels do not are the attention weights, to f16 before they meet the
/// values: an error of at most 2⁻¹¹ of `Σ weight · |value|`, where kernels without them have 2⁻²⁴,
/// and of 2⁻²⁷ of the row's largest weight for every key, since f16 ends there (2⁻¹⁶ on hardware
/// that takes its subnormal numbers for zero).
///
/// Of gradients they round the weights and the gradients of scores, likewise by at most 2⁻¹¹ of
/// what is summed: weights below 2⁻³⁸ are nothing, and gradients of scores below 2⁻³⁶ of the
/// largest that a workgroup has met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MatrixUnits {
    /// Where [`Pipelines::with_adapter`](crate::Pipelines::with_adapter) found some, the tensors
    /// are F16 (or
    /// [`KernelOptions::f16_operands`] is set) and kernels have enough rows to fill fragments.
    #[default]
    Auto,
    /// Nowhere.
    Never,
    /// Wherever there is a choice; a call that cannot use them is refused. For tests and
    /// measurements.
    Always,
}

/// How something is computed, not what: which kernels, in pieces of which size. The default suits
/// the device; all but
/// [`f16_operands`](Self::f16_operands) is for tests, measurements and systems with time limits of their own.
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
}

impl Default for KernelOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl KernelOptions {
    /// What suits the device.
    pub const fn new() -> Self {
        KernelOptions {
            target: Target::Auto,
            algorithm: Algorithm::Auto,
            matrix_units: MatrixUnits::Auto,
            f16_operands: false,
            work_limit: None,
            splits: None,
            fixed: false,
        }
    }

    /// What the rules say suits the device, whatever [`Pipelines::tune`](crate::Pipelines::tune)
    /// measured: for bits that are the same on every run and every machine with such a device,
    /// unless a check has put kernels aside there.
    pub const fn fixed() -> Self {
        KernelOptions { fixed: true, ..Self::new() }
    }

    /// Which class of kernels to use.
    pub const fn target(mut self, target: Target) -> Self {
        self.target = target;
        self
    }

    /// Which sequence of kernels attention uses.
    pub const fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = algorithm;
        self
    }

    /// Whether to use the device's matrix units, for attention, its gradients of q, k and v, and
    /// projections.
    pub const fn matrix_units(mut self, units: MatrixUnits) -> Self {
        self.matrix_units = units;
        self
    }

    /// Lets matrix units round F32 operands (queries, keys, values; inputs and weights of
    /// projections) to f16, which kernels without them do not: an error of 2⁻¹¹ of each, and
    /// infinity above 65504. Not set: F32 tensors are computed in f32. BF16 ones are so in any
    /// case.
    pub const fn f16_operands(mut self, allowed: bool) -> Self {
        self.f16_operands = allowed;
        self
    }

    /// Most floating-point operations, masked ones counted, of one dispatch of the fused path:
    /// longer calls are cut into several, so that none runs into the time limit some systems set
    /// (Windows: two seconds). The default is 2³⁷. For forward passes on a GPU whose matrix units
    /// [`Pipelines::with_adapter`](crate::Pipelines::with_adapter) found, it is 2³⁹, and 2⁴⁰ if the
    /// kernel uses them. The pieces give the same bits as one dispatch; a single workgroup is never
    /// cut, nor are projections.
    pub const fn work_limit(mut self, flops: u64) -> Self {
        self.work_limit = Some(flops);
        self
    }

    /// The most operations of one dispatch. 2³⁷ take a quarter of a second at half a TFLOP/s;
    /// watchdogs wait for two or more.
    pub(crate) fn most_work(&self) -> u64 {
        self.work_limit.unwrap_or(1 << 37)
    }

    /// The most operations of one dispatch of a forward pass. Each dispatch waits for its longest
    /// workgroup, so large GPUs need large dispatches. GPUs with matrix units compute 2³⁹
    /// operations in half a second without them, and 2⁴⁰ with them.
    pub(crate) fn most_forward_work(&self, on_matrix_units: bool, device: &DeviceFacts) -> u64 {
        let is_large = device.matrix.is_some() && !device.software;
        let usual = match (is_large, on_matrix_units) {
            (false, _) => return self.most_work(),
            (true, false) => 1 << 39,
            (true, true) => 1 << 40,
        };
        self.work_limit.unwrap_or(usual)
    }

    /// Among how many workgroups the fused path splits the keys of a tile of queries, 1 to 128.
    /// Unless set, as many as it takes to keep the device busy, which for many queries is one.
    pub const fn splits(mut self, splits: usize) -> Self {
        self.splits = Some(splits);
        self
    }

    /// Whether plans are free to follow what was measured: what a caller says comes first.
    pub(crate) fn is_open(&self) -> bool {
        let KernelOptions { target, algorithm, matrix_units, splits, fixed, .. } = *self;
        let auto = (target, algorithm, matrix_units) == (Target::Auto, Algorithm::Auto, MatrixUnits::Auto);
        auto && splits.is_none() && !fixed
    }

    /// The fragments that the kernels of `family` use for operands of `dtype`, or why none.
    pub(crate) fn fragment(
        &self,
        dtype: DType,
        family: Family,
        device: &DeviceFacts,
    ) -> Result<Fragment, &'static str> {
        let fragment = device.matrix.ok_or(
            "the device's features or its adapter's list lack them, or Pipelines::with_adapter was not used",
        )?;
        match self.matrix_units {
            _ if device.lacks(family) => Err("put aside on this device; Pipelines::report says why"),
            MatrixUnits::Never => Err("the configuration forbids them"),
            _ if dtype == DType::BF16 => Err("they do not multiply BF16, and it is not rounded to f16"),
            _ if dtype != DType::F16 && !self.f16_operands => {
                Err("F32 operands are not rounded unless f16_operands is set")
            }
            MatrixUnits::Auto if self.target.is_cpu(device) => Err("software drivers have none"),
            _ => Ok(fragment),
        }
    }

    /// What was found for matrix units, or the refusal of a configuration that insists.
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

    /// Which of two forms to use: the one that suits the device unless it is put aside and the
    /// other is not.
    pub(crate) fn choose(self, forms: TwoForms, device: &DeviceFacts) -> bool {
        let cpu = self.is_cpu(device);
        let replaced = device.lacks(forms.of(cpu)) && !device.lacks(forms.of(!cpu));
        cpu != (self == Target::Auto && replaced)
    }
}
