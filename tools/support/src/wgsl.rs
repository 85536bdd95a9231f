//! WGSL that naga reads and validates, with only the capabilities that its text enables.

use naga::Module;
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};

/// True if a kernel uses matrix units.
pub fn matrix_units(wgsl: &str) -> bool {
    wgsl.lines().any(|line| line == "enable wgpu_cooperative_matrix;")
}

/// True if a kernel uses f16 outside of packed words.
pub fn halves(wgsl: &str) -> bool {
    wgsl.lines().any(|line| line == "enable f16;")
}

/// True if a kernel has subgroup operations.
pub fn subgroups(wgsl: &str) -> bool {
    let is_operation = |rest: &str| rest.starts_with(|c: char| c.is_ascii_uppercase());
    wgsl.contains("builtin(subgroup_") || wgsl.split("subgroup").skip(1).any(is_operation)
}

/// Returns the module, or naga's message about the text.
pub fn parse(wgsl: &str) -> Result<Module, String> {
    naga::front::wgsl::parse_str(wgsl).map_err(|e| e.emit_to_string(wgsl))
}

/// Returns naga's facts about a valid module, or its message.
pub fn validate(module: &Module, wgsl: &str) -> Result<ModuleInfo, String> {
    // WebGPU itself can pack and unpack f16.
    let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    capabilities.set(Capabilities::SHADER_FLOAT16, halves(wgsl));
    capabilities.set(Capabilities::SUBGROUP, subgroups(wgsl) || matrix_units(wgsl));
    capabilities.set(Capabilities::COOPERATIVE_MATRIX, matrix_units(wgsl));
    Validator::new(ValidationFlags::all(), capabilities).validate(module).map_err(|e| e.emit_to_string(wgsl))
}
