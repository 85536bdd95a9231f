//! How many registers a device's invocations have.

/// How many registers of 32 bits an invocation has before drivers put values into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Registers {
    /// About 64.
    Narrow,
    /// About 128.
    Middle,
    /// About 255.
    Wide,
}

/// By PCI vendor, as `AdapterInfo` gives it; what it does not name, browsers for one, is
/// [`Registers::Middle`].
const REGISTERS: &[(u32, Registers)] = &[
    // NVIDIA: 255 of an invocation.
    (0x10de, Registers::Wide),
    // AMD: 256 vector registers, of GCN as of RDNA.
    (0x1002, Registers::Wide),
    // Apple: 256 of 16 bits.
    (0x106b, Registers::Middle),
    // Qualcomm: at most 48 vectors of four, 32 where an Adreno 660 holds four waves.
    (0x5143, Registers::Middle),
    // Intel: 128 registers of 32 bytes, for 8 or 16 invocations.
    (0x8086, Registers::Middle),
    // Arm: "every thread has 64 32-bit working registers" (OpenCL developer guide for Mali, on
    // Bifrost and Valhall).
    (0x13b5, Registers::Narrow),
    // Broadcom's V3D: 64 with two threads on a core, 32 with four (Mesa's compiler for it).
    (0x14e4, Registers::Narrow),
];

impl Registers {
    pub const ALL: [Registers; 3] = [Registers::Narrow, Registers::Middle, Registers::Wide];

    /// Whether kernels keep in registers what they stage next.
    pub fn load_ahead(self) -> bool {
        self == Registers::Wide
    }

    pub fn of(info: &wgpu::AdapterInfo) -> Self {
        let listed = REGISTERS.iter().find(|(vendor, _)| *vendor == info.vendor);
        match info.device_type {
            // Memory is where they have theirs anyway.
            wgpu::DeviceType::Cpu => Registers::Wide,
            _ => listed.map_or(Registers::Middle, |(_, registers)| *registers),
        }
    }
}
