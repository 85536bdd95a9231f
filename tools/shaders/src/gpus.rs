//! The GPUs that Mesa's drivers compile for, none of which is there: drm-shim answers for the
//! kernel's driver.

/// Oldest first of each driver's.
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

/// Of each driver one GPU gets more.
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
    /// As tables and `permitted.txt` have it; the driver's name is its beginning.
    pub name: &'static str,
    pub driver: Driver,
    /// What chooses it, where the driver has a choice.
    pub variable: Option<(&'static str, &'static str)>,
    /// That the device is it.
    pub sign: Sign,
    /// If its matrix units multiply fragments of 16 × 16: how many invocations plans count on in a
    /// subgroup.
    pub matrix_subgroup: Option<u32>,
    pub covering: Covering,
}

/// How large a part of the variants it compiles: one that has every so many values of axes that
/// occur together.
#[derive(Clone, Copy, Debug)]
pub struct Covering {
    pub values: usize,
    /// The same of those for matrix units.
    pub matrix: usize,
}

/// Every variant: no kernel has so many axes.
pub const ALL: usize = usize::MAX;

/// What is the case of the device of a GPU and of no other of its driver.
#[derive(Clone, Copy, Debug)]
pub enum Sign {
    /// Its name has this, in whatever case.
    Name(&'static str),
    /// Its UUID begins with this: NVK knows no name of a GPU that drm-shim makes up.
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
    /// Invocations that the GPU's unit holds, of subgroups of `subgroup`, by the driver's number of
    /// them.
    pub fn held(self, occupancy: u64, subgroup: u64) -> u64 {
        match self {
            Driver::Honeykrisp => occupancy,
            // RADV counts subgroups of 32 on RDNA, whatever their size.
            Driver::Radv => 32 * occupancy,
            Driver::Nvk | Driver::Turnip => occupancy * subgroup,
        }
    }

    /// The word of tiles that plans choose for its registers (`src/device/mod.rs`). Those for 64,
    /// which none of these GPUs is held to, Honeykrisp compiles as well.
    pub fn registers(self) -> &'static [&'static str] {
        match self {
            Driver::Nvk | Driver::Radv => &["registers=Wide"],
            Driver::Honeykrisp => &["registers=Middle", "registers=Narrow"],
            Driver::Turnip => &["registers=Middle"],
        }
    }
}

/// What a driver calls the numbers of [`crate::mesa::Statistics`].
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
    /// The text that is nearest to what the GPU runs.
    pub text: Option<&'static str>,
}

impl Driver {
    pub const ALL: [Driver; 4] = [Driver::Nvk, Driver::Radv, Driver::Honeykrisp, Driver::Turnip];

    /// As `scripts/gpu` and the beginning of its GPUs' names have it.
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
            // Its `Fills from memory` repeats another number.
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
