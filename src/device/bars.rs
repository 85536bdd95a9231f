//! Kernels that are disabled on drivers where running them can crash the process or lose the
//! device. A check cannot find such faults in time.

use super::Family;

/// Families of kernels that some drivers must not run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bar {
    pub families: &'static [Family],
    /// True for the drivers concerned.
    pub applies: fn(&wgpu::AdapterInfo) -> bool,
    /// The fault that happens.
    pub what: &'static str,
    /// The source of the report.
    pub source: &'static str,
}

const MATRIX: &[Family] = &[Family::MatrixAttention, Family::MatrixProducts, Family::MatrixGradients];
const SUBGROUPS: &[Family] = &[Family::SubgroupReductions];

/// PCI vendors, and Vulkan's driver names as `AdapterInfo::driver` gives them.
///
/// NVIDIA 595.58 crashes on a module with both cooperative matrices and subgroup operations (blade
/// 333). The list omits this fault because no kernel has both.
const BARS: &[Bar] = &[
    Bar {
        families: MATRIX,
        applies: |info| {
            info.name.starts_with("llvmpipe")
                && info.backend == wgpu::Backend::Vulkan
                && info.subgroup_max_size != 8
        },
        what: "lavapipe's compiler crashes on cooperative matrices unless subgroups have 8 invocations",
        source: "seen with Mesa 25 and 26",
    },
    Bar {
        families: MATRIX,
        applies: |info| {
            info.vendor == 0x8086 && info.backend == wgpu::Backend::Vulkan && !info.driver.contains("Mesa")
        },
        what: "the device is lost on Arc B60 and B70 with Windows",
        source: "llama.cpp 22034",
    },
    Bar {
        families: MATRIX,
        applies: |info| info.driver == "AMD proprietary driver",
        what: "the driver lists matrix units for GPUs without them",
        source: "llama.cpp 18763, AMDVLK 422",
    },
    Bar {
        families: &[
            Family::MatrixAttention,
            Family::MatrixProducts,
            Family::MatrixGradients,
            Family::SubgroupReductions,
        ],
        applies: |info| {
            info.vendor == 0x5143 && info.backend == wgpu::Backend::Vulkan && !info.driver.contains("Mesa")
        },
        what: "in Qualcomm's driver shuffles return wrong values, and subgroup built-ins break cooperative shaders",
        source: "ncnn 6778, 6972",
    },
    Bar {
        families: SUBGROUPS,
        applies: |info| info.vendor == 0x1010 && !info.driver.contains("Mesa"),
        what: "PowerVR's compiler crashes on subgroup reductions",
        source: "llama.cpp 20565",
    },
    Bar {
        families: SUBGROUPS,
        applies: |info| info.vendor == 0x1002 && info.driver == "MoltenVK",
        what: "the driver reports subgroups of 64 invocations, but they have 32",
        source: "MoltenVK 2750",
    },
];

/// Returns the bars of the driver of `info`.
pub(crate) fn bars(info: &wgpu::AdapterInfo) -> impl Iterator<Item = &'static Bar> {
    BARS.iter().filter(move |bar| (bar.applies)(info))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Families;

    fn barred(vendor: u32, backend: wgpu::Backend, name: &str, driver: &str, width: u32) -> Families {
        let mut info = wgpu::AdapterInfo::new(wgpu::DeviceType::DiscreteGpu, backend);
        (info.vendor, info.subgroup_min_size, info.subgroup_max_size) = (vendor, width, width);
        (info.name, info.driver) = (name.into(), driver.into());
        bars(&info).flat_map(|bar| bar.families.iter().copied()).collect()
    }

    #[test]
    fn the_drivers_that_are_meant() {
        let [matrix, subgroups]: [Families; 2] =
            [MATRIX, SUBGROUPS].map(|families| families.iter().copied().collect());
        let both = subgroups.iter().fold(matrix, Families::with);
        let vulkan = wgpu::Backend::Vulkan;
        for (vendor, backend, name, driver, width, expected) in [
            (0x10005, vulkan, "llvmpipe (LLVM 19.1.7, 256 bits)", "llvmpipe", 8, Families::NONE),
            (0x10005, vulkan, "llvmpipe (LLVM 19.1.7, 512 bits)", "llvmpipe", 16, matrix),
            (0x10005, vulkan, "llvmpipe (LLVM 19.1.7, 128 bits)", "llvmpipe", 4, matrix),
            (0x10005, wgpu::Backend::Gl, "llvmpipe (LLVM 19.1.7, 256 bits)", "4.6", 128, Families::NONE),
            (0x10de, vulkan, "NVIDIA H100", "NVIDIA", 32, Families::NONE),
            (0x8086, vulkan, "Arc B60", "Intel Corporation", 16, matrix),
            (0x8086, vulkan, "Arc B60", "Intel open-source Mesa driver", 16, Families::NONE),
            (0x8086, wgpu::Backend::Dx12, "Arc B60", "32.0.101", 16, Families::NONE),
            (0x1002, vulkan, "RX 6800", "AMD proprietary driver", 64, matrix),
            (0x1002, vulkan, "RX 6800", "radv", 64, Families::NONE),
            (0x1002, vulkan, "Radeon Pro", "MoltenVK", 64, subgroups),
            (0x5143, vulkan, "Adreno 750", "Qualcomm Technologies Inc. Adreno Vulkan Driver", 64, both),
            (0x5143, vulkan, "Turnip Adreno 750", "turnip Mesa driver", 64, Families::NONE),
            (0x1010, vulkan, "PowerVR D-Series", "Imagination proprietary driver", 32, subgroups),
        ] {
            assert_eq!(barred(vendor, backend, name, driver, width), expected, "{name}, {driver}");
        }
    }

    #[test]
    fn every_bar_says_what_and_whence() {
        assert!(
            BARS.iter().all(|bar| !bar.families.is_empty() && !bar.what.is_empty() && !bar.source.is_empty())
        );
    }
}
