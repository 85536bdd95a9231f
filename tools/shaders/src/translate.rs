//! Translates a kernel with naga, with the options of wgpu's backends for the crate's modules.

use naga::back::{hlsl, msl, spv};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::ModuleInfo;
use naga::{Module, ShaderStage};

use crate::verdict::{Compiler, Verdict};
use support::wgsl::{halves, matrix_units, parse, validate};
use wgpu_attention::inspect::KernelText;

/// A kernel in the languages that naga writes.
#[derive(Default)]
pub struct Translated {
    pub verdicts: Vec<(Compiler, Verdict)>,
    pub spirv: Option<Vec<u32>>,
    /// True if the SPIR-V is in a file.
    pub module: bool,
    pub hlsl: Option<String>,
}

/// As `pipelines.rs` requests: modules without runtime checks, and workgroup memory without
/// zeroing.
const UNCHECKED: BoundsCheckPolicies = BoundsCheckPolicies {
    index: BoundsCheckPolicy::Unchecked,
    buffer: BoundsCheckPolicy::Unchecked,
    image_load: BoundsCheckPolicy::Unchecked,
    binding_array: BoundsCheckPolicy::Unchecked,
};

const STAGE: ShaderStage = ShaderStage::Compute;

/// Translates the kernel to every possible language. naga's HLSL has no matrix units.
pub fn translate(kernel: &KernelText) -> Translated {
    let text = &kernel.wgsl;
    let mut all = Translated::default();
    let mut note = |compiler, verdict| all.verdicts.push((compiler, verdict));
    let checked = guarded(|| {
        let module = parse(text)?;
        let info = validate(&module, text)?;
        Ok((module, info))
    });
    let (module, info) = match checked {
        Ok(checked) => checked,
        Err(why) => {
            note(Compiler::Naga, Verdict::Rejected(why));
            return all;
        }
    };
    note(Compiler::Naga, Verdict::Accepted);
    all.spirv = kept(&mut note, Compiler::NagaSpirv, || spirv(&module, &info));
    kept(&mut note, Compiler::NagaMsl, || metal(&module, &info));
    note(Compiler::Metal, crate::msl::check(&module, &info, kernel.workgroup_memory));
    if matrix_units(text) {
        note(Compiler::NagaHlsl, Verdict::Unsuited);
    } else {
        all.hlsl = kept(&mut note, Compiler::NagaHlsl, || direct3d(&module, &info, text));
    }
    all
}

/// naga panics on some modules that it cannot write.
fn guarded<T>(make: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(make)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(format!("naga panicked: {}", text.or(panic.downcast_ref::<&str>().copied()).unwrap_or_default()))
    })
}

fn kept<T>(
    note: &mut impl FnMut(Compiler, Verdict),
    compiler: Compiler,
    make: impl FnOnce() -> Result<T, String>,
) -> Option<T> {
    match guarded(make) {
        Ok(made) => {
            note(compiler, Verdict::Accepted);
            Some(made)
        }
        Err(why) => {
            note(compiler, Verdict::Rejected(why));
            None
        }
    }
}

fn spirv(module: &Module, info: &ModuleInfo) -> Result<Vec<u32>, String> {
    spirv_with(module, info, spv::WriterFlags::LABEL_VARYINGS | spv::WriterFlags::FORCE_POINT_SIZE)
}

fn spirv_with(module: &Module, info: &ModuleInfo, flags: spv::WriterFlags) -> Result<Vec<u32>, String> {
    let options = spv::Options {
        lang_version: (1, 6),
        flags,
        bounds_check_policies: UNCHECKED,
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        ray_query_initialization_tracking: false,
        mesh_shader_primitive_indices_clamp: false,
        emit_int_div_checks: false,
        ..Default::default()
    };
    let pipeline = spv::PipelineOptions { shader_stage: STAGE, entry_point: "main".into() };
    spv::write_vec(module, info, &options, Some(&pipeline)).map_err(|e| e.to_string())
}

/// Returns the FNV-1a hash of a kernel's SPIR-V without names, to compare two versions of the
/// crate.
pub fn spirv_hash(text: &str) -> Result<u64, String> {
    guarded(|| {
        let module = parse(text)?;
        let info = validate(&module, text)?;
        let words = spirv_with(&module, &info, spv::WriterFlags::empty())?;
        Ok(fnv(words.iter().flat_map(|word| word.to_le_bytes())))
    })
}

/// FNV-1a.
pub fn fnv(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// Returns the kernel in MSL, for `cpp.rs`.
pub fn msl_text(text: &str) -> Result<String, String> {
    guarded(|| {
        let module = parse(text)?;
        let info = validate(&module, text)?;
        metal(&module, &info)
    })
}

/// `msl.rs` and `cpp.rs` check it; nothing here compiles it.
fn metal(module: &Module, info: &ModuleInfo) -> Result<String, String> {
    let options = msl::Options {
        // The first version with simdgroup matrices.
        lang_version: (2, 3),
        bounds_check_policies: UNCHECKED,
        zero_initialize_workgroup_memory: false,
        force_loop_bounding: false,
        ray_query_initialization_tracking: false,
        mesh_shader_primitive_indices_clamp: false,
        emit_int_div_checks: false,
        fake_missing_bindings: true,
        ..Default::default()
    };
    let pipeline = msl::PipelineOptions { entry_point: Some((STAGE, "main".into())), ..Default::default() };
    msl::write_string(module, info, &options, &pipeline).map(|(text, _)| text).map_err(|e| e.to_string())
}

fn direct3d(module: &Module, info: &ModuleInfo, text: &str) -> Result<String, String> {
    hlsl(module, info, if halves(text) { hlsl::ShaderModel::V6_2 } else { hlsl::ShaderModel::V6_0 })
}

/// Returns HLSL for the newest shader model that FXC compiles.
pub fn shader_model_5_1(text: &str) -> Result<String, String> {
    guarded(|| {
        let module = parse(text)?;
        let info = validate(&module, text)?;
        hlsl(&module, &info, hlsl::ShaderModel::V5_1)
    })
}

fn hlsl(module: &Module, info: &ModuleInfo, shader_model: hlsl::ShaderModel) -> Result<String, String> {
    let options = hlsl::Options {
        shader_model,
        // As for a kernel that uses the number of workgroups. wgpu passes it in constants.
        special_constants_binding: Some(hlsl::BindTarget { register: 63, ..Default::default() }),
        zero_initialize_workgroup_memory: false,
        restrict_indexing: false,
        force_loop_bounding: false,
        mesh_shader_primitive_indices_clamp: false,
        ray_query_initialization_tracking: false,
        ..Default::default()
    };
    let pipeline = hlsl::PipelineOptions { entry_point: Some((STAGE, "main".into())) };
    let mut text = String::new();
    hlsl::Writer::new(&mut text, &options, &pipeline).write(module, info, None).map_err(|e| e.to_string())?;
    Ok(text)
}
