//! The number of registers of a device's invocations.

/// The number of 32-bit registers of an invocation, before drivers spill to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Registers {
    /// About 64.
    Narrow,
    /// About 128.
    Middle,
    /// About 255.
    Wide,
}

/// AMD's PCI vendor id.
const AMD: u32 = 0x1002;

/// Registers by PCI vendor, as `AdapterInfo` gives it. Vendors that are not listed are
/// [`Registers::Middle`], for example in browsers.
const REGISTERS: &[(u32, Registers)] = &[
    // NVIDIA: 255 registers an invocation.
    (0x10de, Registers::Wide),
    // 256 vector registers, for both GCN and RDNA.
    (AMD, Registers::Wide),
    // Apple: 256 registers of 16 bits.
    (0x106b, Registers::Middle),
    // Qualcomm: at most 48 vec4 registers; 32 if an Adreno 660 holds four waves.
    (0x5143, Registers::Middle),
    // Intel: 128 registers of 32 bytes, for 8 or 16 invocations.
    (0x8086, Registers::Middle),
    // Arm: "every thread has 64 32-bit working registers" (OpenCL developer guide for Mali, on
    // Bifrost and Valhall).
    (0x13b5, Registers::Narrow),
    // Broadcom V3D: 64 with two threads on a core, 32 with four (Mesa's V3D compiler).
    (0x14e4, Registers::Narrow),
];

impl Registers {
    pub const ALL: [Registers; 3] = [Registers::Narrow, Registers::Middle, Registers::Wide];

    /// True if kernels load the next tile into registers ahead of its use.
    pub fn load_ahead(self) -> bool {
        self == Registers::Wide
    }

    pub fn of(info: &wgpu::AdapterInfo) -> Self {
        let listed = REGISTERS.iter().find(|(vendor, _)| *vendor == info.vendor);
        match info.device_type {
            // A CPU's registers spill to memory in any case.
            wgpu::DeviceType::Cpu => Registers::Wide,
            _ => listed.map_or(Registers::Middle, |(_, registers)| *registers),
        }
    }
}

/// True if a subgroup has registers for numbers that its invocations share, about a hundred on
/// AMD's GPUs. Addresses and loop counters then take none of an invocation's registers. NVIDIA's
/// uniform registers are not counted: drivers use few of them.
pub fn has_scalar(info: &wgpu::AdapterInfo) -> bool {
    info.vendor == AMD && info.device_type != wgpu::DeviceType::Cpu
}
