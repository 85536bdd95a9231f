//! The GPUs that Mesa's drivers compile for. None of them is present: drm-shim simulates the
//! kernel's driver.

/// Each driver's GPUs, the oldest first.
pub const GPUS: [Gpu; 11] = [
    Gpu {
        name: "nvk-turing",
        driver: Driver::Nvk,
        variable: Some(("NOUVEAU_CHIPSET", "162")),
        sign: Sign::Uuid(0x62),
        matrix_subgroup: Some(32),
        covering: EACH,
    },
    Gpu {
        name: "nvk-ampere",
        driver: Driver::Nvk,
        variable: Some(("NOUVEAU_CHIPSET", "172")),
        sign: Sign::Uuid(0x72),
        matrix_subgroup: Some(32),
        // NVK takes five times as long as RADV.
        covering: Covering { values: 2, matrix: 1 },
    },
    radv("radv-vega10", "vega10", None, EACH),
    radv("radv-navi10", "navi10", None, EACH),
    radv("radv-navi21", "navi21", None, PAIRS),
    radv("radv-navi31", "navi31", Some(64), Covering { values: 3, matrix: ALL }),
    radv("radv-gfx1201", "gfx1201", Some(64), PAIRS),
    Gpu {
        name: "honeykrisp-m1",
        driver: Driver::Honeykrisp,
        variable: None,
        sign: Sign::Name("Apple M1"),
        matrix_subgroup: None,
        covering: PAIRS,
    },
    turnip("turnip-660", "660", EACH),
    turnip("turnip-750", "750", PAIRS),
    turnip("turnip-830", "830", EACH),
];

/// One GPU of each driver compiles more variants.
pub const EACH: Covering = Covering { values: 1, matrix: 1 };
pub const PAIRS: Covering = Covering { values: 2, matrix: 2 };

const fn radv(name: &'static str, id: &'static str, matrix_subgroup: Option<u32>, covering: Covering) -> Gpu {
    let variable = Some(("AMDGPU_GPU_ID", id));
    Gpu { name, driver: Driver::Radv, variable, sign: Sign::Name(id), matrix_subgroup, covering }
}

const fn turnip(name: &'static str, id: &'static str, covering: Covering) -> Gpu {
    let variable = Some(("FD_GPU_ID", id));
    Gpu { name, driver: Driver::Turnip, variable, sign: Sign::Name(id), matrix_subgroup: None, covering }
}

#[derive(Clone, Copy, Debug)]
pub struct Gpu {
    /// The name in tables and in `permitted.txt`. It begins with the driver's name.
    pub name: &'static str,
    pub driver: Driver,
    /// The variable that chooses the GPU, if the driver has a choice.
    pub variable: Option<(&'static str, &'static str)>,
    /// The sign that the device is this GPU.
    pub sign: Sign,
    /// For matrix units that multiply fragments of 16 × 16: the invocations of a subgroup, as plans
    /// assume them.
    pub matrix_subgroup: Option<u32>,
    pub covering: Covering,
}

/// The part of the variants that the GPU compiles. The part covers every combination of this number
/// of values of axes.
#[derive(Clone, Copy, Debug)]
pub struct Covering {
    pub values: usize,
    /// The same number, for variants with matrix units.
    pub matrix: usize,
}

/// Every variant: no kernel has more axes.
pub const ALL: usize = usize::MAX;

/// A property of a GPU's device that no other GPU of its driver has.
#[derive(Clone, Copy, Debug)]
pub enum Sign {
    /// The name contains this text, in any case.
    Name(&'static str),
    /// The UUID begins with this byte: NVK has no names for the GPUs of drm-shim.
    Uuid(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    Nvk,
    Radv,
    Honeykrisp,
    Turnip,
}

impl Driver {
    /// Returns the invocations that the GPU's unit holds, from the driver's `occupancy` and the
    /// size of a subgroup.
    pub fn held(self, occupancy: u64, subgroup: u64) -> u64 {
        match self {
            Driver::Honeykrisp => occupancy,
            // RADV counts subgroups of 32 on RDNA, whatever their actual size.
            Driver::Radv => 32 * occupancy,
            Driver::Nvk | Driver::Turnip => occupancy * subgroup,
        }
    }

    /// Returns the words of tiles that plans choose for the GPU's registers (`src/device/mod.rs`).
    /// No GPU of the list has 64 registers, so Honeykrisp also compiles those tiles.
    pub fn registers(self) -> &'static [&'static str] {
        match self {
            Driver::Nvk | Driver::Radv => &["registers=Wide"],
            Driver::Honeykrisp => &["registers=Middle", "registers=Narrow"],
            Driver::Turnip => &["registers=Middle"],
        }
    }
}

/// A driver's names for the numbers of [`crate::mesa::Statistics`].
pub struct Names {
    pub registers: &'static str,
    pub spills: &'static str,
    pub memory: Option<&'static str>,
    pub occupancy: &'static str,
    pub instructions: &'static str,
    pub cycles: Option<&'static str>,
    pub scalar_spills: Option<&'static str>,
    pub lds: Option<&'static str>,
    pub code: Option<&'static str>,
    /// The text that is closest to the GPU code.
    pub text: Option<&'static str>,
}

impl Driver {
    pub const ALL: [Driver; 4] = [Driver::Nvk, Driver::Radv, Driver::Honeykrisp, Driver::Turnip];

    /// The name in `scripts/gpu`, and the beginning of its GPUs' names.
    pub fn name(self) -> &'static str {
        match self {
            Driver::Nvk => "nvk",
            Driver::Radv => "radv",
            Driver::Honeykrisp => "honeykrisp",
            Driver::Turnip => "turnip",
        }
    }

    pub fn names(self) -> Names {
        match self {
            // NVK's `Fills from memory` repeats another number.
            Driver::Nvk => Names {
                registers: "Number of GPRs",
                spills: "Spills to memory",
                memory: Some("SLM size"),
                occupancy: "Max warps/SM",
                instructions: "Instruction count",
                cycles: Some("Static cycle count"),
                scalar_spills: None,
                lds: None,
                code: Some("Code size"),
                text: Some("NAK assembly"),
            },
            Driver::Radv => Names {
                registers: "VGPRs",
                spills: "Spilled VGPRs",
                memory: Some("Scratch size"),
                occupancy: "Subgroups per SIMD",
                instructions: "Instructions",
                cycles: Some("Latency"),
                scalar_spills: Some("Spilled SGPRs"),
                lds: Some("LDS size"),
                code: Some("Code size"),
                text: Some("Assembly"),
            },
            Driver::Honeykrisp => Names {
                registers: "GPRs",
                spills: "Spills",
                memory: Some("Scratch"),
                occupancy: "Threads",
                instructions: "Instructions",
                cycles: None,
                scalar_spills: None,
                lds: None,
                code: Some("Code size"),
                text: None,
            },
            Driver::Turnip => Names {
                registers: "Registers used",
                spills: "STP Count",
                memory: None,
                occupancy: "Max Waves Per Core",
                instructions: "Instruction Count",
                cycles: None,
                scalar_spills: None,
                lds: None,
                code: Some("Code size"),
                text: Some("IR3 Assembly"),
            },
        }
    }
}

pub fn find(name: &str) -> Option<Gpu> {
    GPUS.into_iter().find(|gpu| gpu.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_named_by_their_driver() {
        for gpu in GPUS {
            assert!(gpu.name.starts_with(&format!("{}-", gpu.driver.name())));
            assert_eq!(find(gpu.name).map(|found| found.variable), Some(gpu.variable));
        }
    }
}
