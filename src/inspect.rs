//! The WGSL that this crate compiles: the text of every kernel variant, with the host's description
//! of its interface. It is for tools and tests, with the feature `inspect`; applications do not
//! need it.
//!
//! `cargo run --features inspect --example kernels -- FOLDER` writes them as files for other WGSL
//! compilers.

use crate::mask::kernels::MaskParams;
use std::collections::HashSet;

use crate::attention::merge::kernels::merge;
use crate::cache::kernels::cache;
use crate::device::registers::Registers;
use crate::device::{DeviceFacts, Families, Family, Fragment};
use crate::kernel::{Field, Kernel, KernelVariant, Pipelines, Table, View};
use crate::kernel_list;
use crate::matmul::projection::kernels::{project, project_backward};
use crate::position::kernels::{rotation_table, row_positions};
use crate::tensor::Access;

/// Sums of the absolute values of the terms that results and gradients sum. Tests derive tolerances
/// from them. The sum for attention is
/// [`attention_backward_magnitudes`](crate::reference::attention_backward_magnitudes).
pub mod magnitudes {
    pub use crate::attention::reference::backward::additive_attention_backward_magnitudes;
    pub use crate::linear_attention::reference::{
        linear_attention_backward_magnitudes, linear_attention_magnitude,
    };
    pub use crate::linformer::reference::linformer_backward_magnitudes;
    pub use crate::local::reference::local_attention_backward_magnitudes;
    pub use crate::lsh::reference::lsh_attention_backward_magnitudes;
}

/// The crate's version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// One kernel variant: its text, and the host's description of its interface.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KernelText {
    /// A unique and readable name: the kernel, then the properties that distinguish the variant.
    pub name: String,
    /// The label of its pipeline. The part after the dot is the stem of the shader's file.
    pub label: &'static str,
    /// The whole module, as wgpu receives it.
    pub wgsl: String,
    /// The module for a part of a grid, for devices that allow fewer workgroups in a dispatch. It
    /// equals `wgsl` if the grid has a single part.
    pub wgsl_of_part: String,
    /// The uniform `p`, at binding 0.
    pub params: StructTable,
    /// Storage buffers.
    pub bindings: Vec<BindingText>,
    /// True if the uniform `mods` is bound behind the storage buffers. It holds the numbers and the
    /// tensor layouts that score and mask functions capture.
    pub binds_mods: bool,
    /// Invocations of a workgroup.
    pub invocations: u32,
    /// Bytes of workgroup memory.
    pub workgroup_memory: u32,
}

/// A Rust struct that a WGSL struct of the same name must match.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StructTable {
    /// The WGSL name.
    pub name: &'static str,
    /// The members, in order.
    pub fields: Vec<Field>,
    /// Bytes of the whole struct.
    pub bytes: usize,
}

/// A storage buffer of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindingText {
    /// The variable's name.
    pub name: String,
    /// Its number, in group 0.
    pub binding: u32,
    /// Its WGSL type.
    pub wgsl: String,
    /// `read` or `read_write`.
    pub access: &'static str,
}

/// Returns every kernel along each axis of its variants: each value of each axis, not the product
/// of all axes. Kernels with F16 tensors appear twice: with `SHADER_F16`, and without it (`name …
/// without_f16`).
pub fn kernels() -> Vec<KernelText> {
    let mut seen = HashSet::new();
    kernel_list::all()
        .into_iter()
        .filter(|stage| seen.insert(stage.clone()))
        .flat_map(|stage| texts(&stage))
        .collect()
}

/// Returns the names of the kernels that `pipelines` has compiled and not cleared, as [`kernels`]
/// names them.
pub fn compiled(pipelines: &Pipelines) -> Vec<String> {
    pipelines.variants().iter().map(name).collect()
}

/// Returns the structs that members of a kernel's `Params` may have as their types.
pub fn shared_structs() -> Vec<StructTable> {
    // WGSL adds the padding.
    let view = [
        Field { name: "strides", offset: std::mem::offset_of!(View, strides), wgsl: "vec4<u32>" },
        Field { name: "offset", offset: std::mem::offset_of!(View, offset), wgsl: "u32" },
    ];
    vec![
        StructTable { name: "View", fields: view.to_vec(), bytes: size_of::<View>() },
        table::<MaskParams>(),
        table::<cache::CacheParams>(),
        table::<merge::MergePart>(),
        table::<project::ProjectPart>(),
        table::<project_backward::ProductAxis>(),
        table::<row_positions::PositionParams>(),
        table::<rotation_table::RotationParams>(),
    ]
}

/// Returns the sides of the matrix fragments that `adapter` can run: the sides that it lists,
/// except on lavapipe. Lavapipe lists 8 and also runs 16. If its subgroups are not 8 wide, its
/// compiler crashes with both, and the list is empty.
pub fn fragments(adapter: &wgpu::Adapter) -> Vec<u32> {
    if !adapter.features().contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
        return Vec::new();
    }
    let info = adapter.get_info();
    let lavapipe = info.name.starts_with("llvmpipe");
    let runs = |f: &Fragment| if lavapipe { info.subgroup_max_size == 8 } else { f.is_listed(adapter) };
    [Fragment::Eight, Fragment::Sixteen].into_iter().filter(runs).map(Fragment::side).collect()
}

/// Returns pipelines that assume matrix units with fragments of `side` (8 or 16). The adapter of
/// `device` need not list them: software drivers run more fragments than they list. The behaviour
/// of a driver that does not know the fragments is undefined. `subgroup` replaces the device's
/// number of invocations of a subgroup.
pub fn with_fragments(device: &wgpu::Device, side: u32, subgroup: Option<u32>) -> Pipelines {
    let fragment = [Fragment::Eight, Fragment::Sixteen].into_iter().find(|f| f.side() == side);
    let mut facts = DeviceFacts::of(device).with_fragment(device, fragment);
    if let Some(width) = subgroup {
        (facts.subgroup_min, facts.subgroup_max) = (width, width);
    }
    Pipelines::with_facts(device, facts)
}

/// Returns pipelines that plan for a GPU with about `count` 32-bit registers an invocation. `count`
/// is 64 (Arm), 128 (Apple, Qualcomm, unknown vendors), 255 (NVIDIA) or 256. With 256 (AMD) the GPU
/// also has scalar registers.
pub fn with_registers(device: &wgpu::Device, count: u32) -> Pipelines {
    let registers = match count {
        0..96 => Registers::Narrow,
        96..192 => Registers::Middle,
        192.. => Registers::Wide,
    };
    let scalar_registers = count > 255;
    Pipelines::with_facts(device, DeviceFacts { registers, scalar_registers, ..DeviceFacts::of(device) })
}

/// Returns pipelines that plan for a software driver with vectors of `count` lanes (4, 8 or 16).
/// The lanes of `device` do not matter.
pub fn with_lanes(device: &wgpu::Device, count: u32) -> Pipelines {
    let lanes = count.clamp(4, 16).next_power_of_two();
    Pipelines::with_facts(device, DeviceFacts { lanes, ..DeviceFacts::of(device) })
}

/// Returns pipelines that plan for a GPU, though `device` is a software driver. `side` is the side
/// of the fragments of its matrix units, if it has any.
pub fn as_gpu(device: &wgpu::Device, side: Option<u32>) -> Pipelines {
    let fragment = [Fragment::Eight, Fragment::Sixteen].into_iter().find(|f| Some(f.side()) == side);
    let facts = DeviceFacts::of(device).with_fragment(device, fragment);
    Pipelines::with_facts(device, DeviceFacts { software: false, ..facts })
}

/// Returns a copy of `pipelines` with no compiled kernels. Kernels that a check disabled stay
/// disabled.
pub fn emptied(pipelines: &Pipelines) -> Pipelines {
    pipelines.emptied()
}

/// Runs `work` and returns its result with the label and the workgroups of each dispatch, in order.
/// It lists every dispatch that `work` binds on this thread, recorded or not.
pub fn bound<T>(work: impl FnOnce() -> T) -> (T, Vec<(&'static str, [u32; 3])>) {
    crate::kernel::recording::log(work)
}

/// Runs `work` and returns its result with the number of compute passes that it opened in encoders
/// on this thread.
pub fn passes<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = crate::kernel::recording::passes();
    let result = work();
    (result, crate::kernel::recording::passes() - before)
}

/// Returns pipelines that compile another text than the library's, for tests of
/// [`Pipelines::check`]. `rewrite` gets a kernel's families and text, and returns the text to
/// compile.
pub fn rewritten(
    pipelines: &Pipelines,
    rewrite: impl Fn(&[Family], &str) -> String + Send + Sync + 'static,
) -> Pipelines {
    let rewrite = move |families: Families, text: &str| rewrite(&families.iter().collect::<Vec<_>>(), text);
    pipelines.rewritten(std::sync::Arc::new(rewrite))
}

fn table<T: Table>() -> StructTable {
    StructTable { name: T::NAME, fields: T::FIELDS.to_vec(), bytes: size_of::<T>() }
}

fn texts(stage: &KernelVariant) -> Vec<KernelText> {
    let kernel = stage.describe();
    let packed = kernel.without_f16().map(|kernel| text(stage, kernel, " without_f16"));
    [text(stage, kernel, "")].into_iter().chain(packed).collect()
}

fn text(stage: &KernelVariant, kernel: Kernel, device: &str) -> KernelText {
    let storage = kernel.bindings.iter().filter(|binding| binding.uniform.is_none());
    let bindings = storage.enumerate().map(|(n, binding)| BindingText {
        name: binding.name.clone(),
        binding: n as u32 + 1,
        wgsl: format!("array<{}>", binding.element()),
        access: if binding.access == Access::Write { "read_write" } else { "read" },
    });
    KernelText {
        name: name(stage) + device,
        label: stage.label(),
        bindings: bindings.collect(),
        binds_mods: kernel.bindings.len() as u32 > kernel.storage_buffers(),
        wgsl_of_part: kernel.clone().of_part().wgsl,
        wgsl: kernel.wgsl,
        params: StructTable { name: "Params", fields: kernel.params.clone(), bytes: kernel.params_bytes },
        invocations: kernel.invocations,
        workgroup_memory: kernel.workgroup_memory,
    }
}

/// Returns a variant's `Debug` text without absent fields: `attention.fused q=F32 k=F32 v=F32
/// out=F32 mask tiles=Gpu rows=64 …`.
fn name(stage: &KernelVariant) -> String {
    let mut name = stage.label().to_string();
    for piece in format!("{stage:?}").split(['{', '}', '(', ')', ',']) {
        let Some((key, value)) = piece.trim().split_once(": ") else {
            // The value in a `Some`. The names of types come before the first field.
            match piece.trim() {
                "" | "CacheVariant" | "FusedMatrix" => {}
                "Untyped" => name.truncate(name.rfind(' ').unwrap_or(name.len())),
                value if name.contains(' ') => name = format!("{name}={value}"),
                _ => {}
            }
            continue;
        };
        match value {
            "false" | "None" | "Untyped" => {}
            "true" | "Some" | "Blocks" | "CacheVariant" | "DecodeCpu" | "DecodeGpu" | "FusedMatrix"
            | "Matrix" | "MaskVariant" | "Rows" | "Slots" => name = format!("{name} {key}"),
            _ => name = format!("{name} {key}={value}"),
        }
    }
    name
}
