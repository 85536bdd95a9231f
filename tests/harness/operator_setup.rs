//! The setups of operators that know one type of tensors and one of gradients.

use wgpu_attention::DType;
use wgpu_attention::tuning::Target;

use super::device::{Profile, defaults, full};
use super::rest::rest;
use super::run::{FORMS, Layout};

/// The device, target, types and layout of a run.
#[derive(Clone, Copy, Debug)]
pub struct OperatorSetup {
    pub profile: &'static Profile,
    pub form: Target,
    pub dtype: DType,
    /// The type of gradients, and of what an operator reads in their type: the tensors' or F32.
    pub gradient: DType,
    pub layout: Layout,
    pub accumulates: bool,
}

impl std::fmt::Display for OperatorSetup {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let OperatorSetup { profile, form, dtype, gradient, layout, accumulates } = self;
        write!(
            f,
            "{}, {form:?}, {dtype:?}, gradients {gradient:?}, {layout:?}, accumulates {accumulates}",
            profile.name
        )
    }
}

impl OperatorSetup {
    /// Dense f32 tensors.
    pub fn plain(profile: &'static Profile, form: Target) -> Self {
        let [dtype, gradient] = [DType::F32; 2];
        OperatorSetup { profile, form, dtype, gradient, layout: Layout::Dense, accumulates: false }
    }
}

/// Returns types and layouts on one target, with gradients in the tensors' type or in f32, written
/// or added. The first two have these layouts.
pub fn every_setup(form: Target, layouts: [Layout; 2]) -> [OperatorSetup; 5] {
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    let of = |profile, dtype, gradient, layout, accumulates| OperatorSetup {
        profile,
        form,
        dtype,
        gradient,
        layout,
        accumulates,
    };
    [
        of(defaults(), f32, f32, layouts[0], false),
        of(full(), f16, f16, layouts[1], true),
        of(full(), bf16, f32, Layout::Blhd, false),
        of(defaults(), bf16, bf16, Layout::Window(3), false),
        of(full(), f32, f32, Layout::Window(9), true),
    ]
}

/// Returns the setups of a case on both targets. The number of the case selects the one that always
/// runs.
pub fn setups(name: &str, number: usize) -> Vec<OperatorSetup> {
    let every = FORMS.into_iter().flat_map(|form| every_setup(form, [Layout::Window(7), Layout::Window(4)]));
    let runs =
        |(n, setup): &(usize, OperatorSetup)| *n == number * 3 % 10 || rest(&format!("{name}, {setup}"));
    every.enumerate().filter(runs).map(|(_, setup)| setup).collect()
}
