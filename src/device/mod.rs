//! The facts of a device that plans and checks need.

pub(crate) mod bars;
pub(crate) mod family;
pub(crate) mod opengl;
pub(crate) mod registers;
pub(crate) mod report;
pub(crate) mod tuned;
#[cfg(all(
    feature = "unchecked-vulkan",
    any(windows, target_os = "linux", target_os = "android", target_os = "freebsd")
))]
pub mod unchecked_vulkan;

use bars::bars;
pub(crate) use family::Families;
pub use family::Family;
use family::TwoForms;
use registers::Registers;
pub use report::{Report, Verdict};
pub use tuned::TuningCache;
use tuned::{Class, Pick, Picks};

use std::sync::Arc;

/// The side of the square fragments that a device's matrix units multiply: f16 · f16, summed in
/// f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fragment {
    Eight,
    Sixteen,
}

impl Fragment {
    pub fn side(self) -> u32 {
        match self {
            Fragment::Eight => 8,
            Fragment::Sixteen => 16,
        }
    }

    /// Returns the larger fragment that `adapter` lists: it does more work per instruction.
    fn of(adapter: &wgpu::Adapter) -> Option<Self> {
        [Fragment::Sixteen, Fragment::Eight].into_iter().find(|fragment| fragment.is_listed(adapter))
    }

    /// True if `adapter` lists the fragment.
    pub fn is_listed(self, adapter: &wgpu::Adapter) -> bool {
        use wgpu::CooperativeScalarType::{F16, F32};
        adapter.cooperative_matrix_properties().iter().any(|p| {
            [p.m_size, p.n_size, p.k_size] == [self.side(); 3]
                && (p.ab_type, p.cr_type) == (F16, F32)
                && !p.saturating_accumulation
        })
    }
}

/// Returns the width of subgroups, even where kernels may not use subgroups. Returns 8 if the width
/// is not 4, 8 or 16.
fn lanes_of(info: &wgpu::AdapterInfo) -> u32 {
    match info.subgroup_max_size {
        lanes @ (4 | 8 | 16) => lanes,
        _ => 8,
    }
}

/// True if the driver is Mesa's for processors before version 26. It loads once per lane, even if
/// all lanes have the same index. The loads give a dozen blocks of code per lane, and LLVM 15 takes
/// more than linear time for them. (Seen with 25.0; 26.1 loads once.)
fn gathers(info: &wgpu::AdapterInfo) -> bool {
    let driver = [info.name.as_str(), &info.driver, &info.driver_info].join(" ");
    let version =
        driver.split_once("Mesa ").and_then(|(_, rest)| rest.split('.').next()?.parse::<u32>().ok());
    info.name.starts_with("llvmpipe") && version.is_some_and(|version| version < 26)
}

/// The facts of a device that plans and checks need, read once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceFacts {
    pub f16: bool,
    /// True if the device is a software driver: wide loops without barriers suit it.
    pub software: bool,
    pub max_binding_bytes: u64,
    pub offset_alignment: u64,
    pub max_storage_buffers: u32,
    pub max_workgroups: u32,
    pub max_invocations: u32,
    pub workgroup_memory: u32,
    pub registers: Registers,
    /// True if a subgroup also has registers for numbers that its invocations share.
    pub scalar_registers: bool,
    /// Invocations that a software driver computes at once, one per lane of a vector: 4, 8 or 16.
    pub lanes: u32,
    /// True if the software driver loads once per lane, even if all lanes load the same element.
    pub gathers: bool,
    /// Fewest invocations of a subgroup; 0 if kernels may not use subgroups.
    pub subgroup_min: u32,
    /// Most invocations of a subgroup.
    pub subgroup_max: u32,
    /// The fragment of the matrix units, if kernels may use them.
    pub matrix: Option<Fragment>,
    /// Families that are disabled.
    pub disabled: Families,
    /// Measured plans that are faster than the plans by the rules.
    pub tuned: Option<Arc<Picks>>,
}

impl DeviceFacts {
    /// The facts that hold for every WebGPU device.
    pub const LEAST: DeviceFacts = DeviceFacts {
        f16: false,
        software: false,
        max_binding_bytes: 128 << 20,
        offset_alignment: 256,
        max_storage_buffers: 8,
        max_workgroups: 65535,
        max_invocations: 256,
        workgroup_memory: 16384,
        registers: Registers::Middle,
        scalar_registers: false,
        lanes: 8,
        gathers: false,
        subgroup_min: 0,
        subgroup_max: 0,
        matrix: None,
        disabled: Families::NONE,
        tuned: None,
    };

    pub fn of(device: &wgpu::Device) -> Self {
        let limits = device.limits();
        let info = device.adapter_info();
        let subgroups = device.features().contains(wgpu::Features::SUBGROUP);
        DeviceFacts {
            f16: device.features().contains(wgpu::Features::SHADER_F16),
            software: info.device_type == wgpu::DeviceType::Cpu,
            max_binding_bytes: limits.max_storage_buffer_binding_size,
            offset_alignment: u64::from(limits.min_storage_buffer_offset_alignment),
            max_storage_buffers: limits.max_storage_buffers_per_shader_stage,
            max_workgroups: limits.max_compute_workgroups_per_dimension,
            max_invocations: limits
                .max_compute_invocations_per_workgroup
                .min(limits.max_compute_workgroup_size_x),
            workgroup_memory: limits.max_compute_workgroup_storage_size,
            registers: Registers::of(&info),
            scalar_registers: registers::has_scalar(&info),
            lanes: lanes_of(&info),
            gathers: gathers(&info),
            subgroup_min: if subgroups { info.subgroup_min_size } else { 0 },
            subgroup_max: if subgroups { info.subgroup_max_size } else { 0 },
            matrix: None,
            disabled: bars(&info).flat_map(|bar| bar.families.iter().copied()).collect(),
            tuned: None,
        }
    }

    /// True if the family is disabled.
    pub fn lacks(&self, family: Family) -> bool {
        self.disabled.contains(family)
    }

    /// Returns the measured plan for calls of `class`, if it is faster than the plan by the rules.
    pub fn pick(&self, class: Class) -> Option<Pick> {
        self.tuned.as_ref()?.get(&class).copied()
    }

    /// Returns the facts as `pick` overrides them.
    pub fn overridden(&self, pick: &Pick) -> Self {
        let forbidden = [
            (pick.no_matrix, [Family::MatrixAttention, Family::MatrixProducts].as_slice()),
            (pick.no_decode, &[Family::DecodeGpu, Family::DecodeCpu]),
            (pick.no_subgroups, &[Family::SubgroupReductions]),
        ];
        let families = forbidden.into_iter().filter(|(forbidden, _)| *forbidden).flat_map(|(_, f)| f);
        DeviceFacts {
            disabled: families.fold(self.disabled, |disabled, family| disabled.with(*family)),
            registers: pick.registers.unwrap_or(self.registers),
            ..self.clone()
        }
    }

    /// Returns the facts without measured plans, then also without split keys, which takes the
    /// least memory. Calls use them if their scratch is too small for the measured plan. The plan
    /// of a longer call may need less.
    pub fn without_tuning(&self) -> [Self; 2] {
        let ruled = DeviceFacts { tuned: None, ..self.clone() };
        let whole = DeviceFacts { disabled: ruled.disabled.with(Family::SplitKeys), ..ruled.clone() };
        [ruled, whole]
    }

    /// True if both variants are disabled.
    pub fn lacks_both(&self, forms: TwoForms) -> bool {
        self.lacks(forms.gpu) && self.lacks(forms.cpu)
    }

    /// Returns the fewest and most invocations of a subgroup for reductions by shuffles; 0 if
    /// shuffles are not permitted.
    pub fn reducing_subgroups(&self) -> [u32; 2] {
        if self.lacks(Family::SubgroupReductions) { [0, 0] } else { [self.subgroup_min, self.subgroup_max] }
    }

    /// Returns the number of invocations that a matrix-unit kernel plans as one subgroup. No
    /// subgroup may be wider. If subgroups are narrower, several do the same work. (Metal reports 4
    /// to 64, but uses 32.)
    pub fn planned_subgroup(&self) -> u32 {
        let most = if self.matrix == Some(Fragment::Eight) { 32 } else { 128 };
        self.subgroup_max.clamp(4, most)
    }

    /// Returns the facts with the matrix units that `adapter`, the device's adapter, lists.
    pub fn with_adapter(self, device: &wgpu::Device, adapter: &wgpu::Adapter) -> Self {
        self.with_fragment(device, Fragment::of(adapter))
    }

    /// Returns the facts with matrix units for `fragment`, if the device has the features.
    pub fn with_fragment(self, device: &wgpu::Device, fragment: Option<Fragment>) -> Self {
        let needed = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX
            | wgpu::Features::SHADER_F16
            | wgpu::Features::SUBGROUP;
        let has = device.features().contains(needed) && self.subgroup_min > 0;
        DeviceFacts { matrix: fragment.filter(|_| has), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_that_load_for_each_lane() {
        for (name, driver, driver_info, expected) in [
            ("llvmpipe (LLVM 15.0.6, 256 bits)", "llvmpipe", "Mesa 25.0.7-2~bpo12+1 (LLVM 15.0.6)", true),
            ("llvmpipe (LLVM 19.1.7, 256 bits)", "llvmpipe", "Mesa 26.1.6-1~bpo13+1 (LLVM 19.1.7)", false),
            ("llvmpipe (LLVM 19.1.7, 256 bits)", "4.6 (Core Profile) Mesa 25.0.7", "", true),
            ("llvmpipe: Mesa 26.1.6 (LLVM 19.1.7)", "", "", false),
            ("llvmpipe", "", "", false),
            ("AMD Radeon RX 6800 (RADV NAVI21)", "radv", "Mesa 24.2.8", false),
        ] {
            let mut info = wgpu::AdapterInfo::new(wgpu::DeviceType::Cpu, wgpu::Backend::Vulkan);
            (info.name, info.driver) = (name.into(), driver.into());
            info.driver_info = driver_info.into();
            assert_eq!(gathers(&info), expected, "{name}, {driver}, {driver_info}");
        }
    }
}
