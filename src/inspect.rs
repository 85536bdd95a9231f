//! The WGSL this crate compiles, for tools and tests, with the feature `inspect`: every kernel
//! variant's text, with what the host believes of it. No application needs it.
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

/// Sums of the absolute values of the terms that results and gradients sum: tolerances of tests are
/// measured by them. That of attention
/// is [`attention_backward_magnitudes`](crate::reference::attention_backward_magnitudes).
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

/// One kernel variant: its text, and the Rust side's idea of its interface.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KernelText {
    /// Unique and readable: the kernel, then whatever distinguishes the variant.
    pub name: String,
    /// The label its pipeline gets; the part after the dot is the stem of its shader's file.
    pub label: &'static str,
    /// The whole module, as it is given to wgpu.
    pub wgsl: String,
    /// The module for parts of a grid, which a device with fewer workgroups to a dispatch is given;
    /// as `wgsl` if it has a single one.
    pub wgsl_of_part: String,
    /// The uniform `p`, at binding 0.
    pub params: StructTable,
    /// Storage buffers.
    pub bindings: Vec<BindingText>,
    /// True if the uniform `mods` is bound behind the storage buffers: numbers that score and mask
    /// functions capture, and the layouts of the tensors that they capture.
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
    /// Bytes of the whole.
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

/// Every kernel along each axis of its variants: not the product of all axes, but each value of
/// each. Kernels with tensors of F16 are there twice: as they are with `SHADER_F16`, and without
/// (`name … without_f16`).
pub fn kernels() -> Vec<KernelText> {
    let mut seen = HashSet::new();
    kernel_list::all()
        .into_iter()
        .filter(|stage| seen.insert(stage.clone()))
        .flat_map(|stage| texts(&stage))
        .collect()
}

/// The names of what `pipelines` has compiled and not cleared, as [`kernels`] names them.
pub fn compiled(pipelines: &Pipelines) -> Vec<String> {
    pipelines.variants().iter().map(name).collect()
}

/// The structs that members of a kernel's `Params` may have as their types.
pub fn shared_structs() -> Vec<StructTable> {
    // Its padding is WGSL's own.
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

/// The sides of the fragments that `adapter` can run: those it lists, and both on lavapipe, which
/// lists 8 and runs 16 as well, but crashes in its compiler with either where its subgroups are not
/// 8 wide.
pub fn fragments(adapter: &wgpu::Adapter) -> Vec<u32> {
    if !adapter.features().contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
        return Vec::new();
    }
    let info = adapter.get_info();
    let lavapipe = info.name.starts_with("llvmpipe");
    let runs = |f: &Fragment| if lavapipe { info.subgroup_max_size == 8 } else { f.is_listed(adapter) };
    [Fragment::Eight, Fragment::Sixteen].into_iter().filter(runs).map(Fragment::side).collect()
}

/// Pipelines that take it that the matrix units of `device` multiply fragments of `side` (8 or 16),
/// whatever its adapter
/// lists: software drivers run more than they list. With fragments that a driver does not know it
/// may do anything. `subgroup`: invocations of a subgroup, if the plan is to believe in others than
/// the device says.
pub fn with_fragments(device: &wgpu::Device, side: u32, subgroup: Option<u32>) -> Pipelines {
    let fragment = [Fragment::Eight, Fragment::Sixteen].into_iter().find(|f| f.side() == side);
    let mut facts = DeviceFacts::of(device).with_fragment(device, fragment);
    if let Some(width) = subgroup {
        (facts.subgroup_min, facts.subgroup_max) = (width, width);
    }
    Pipelines::with_facts(device, facts)
}

/// Pipelines that plan for a GPU that has about so many registers of 32 bits for an invocation: 64
/// (Arm's), 128 (Apple's, Qualcomm's, unknown ones) or 255.
pub fn with_registers(device: &wgpu::Device, count: u32) -> Pipelines {
    let registers = match count {
        0..96 => Registers::Narrow,
        96..192 => Registers::Middle,
        192.. => Registers::Wide,
    };
    Pipelines::with_facts(device, DeviceFacts { registers, ..DeviceFacts::of(device) })
}

/// Pipelines that plan for a software driver whose vectors have so many lanes, 4, 8 or 16, whatever
/// those of `device` have.
pub fn with_lanes(device: &wgpu::Device, count: u32) -> Pipelines {
    let lanes = count.clamp(4, 16).next_power_of_two();
    Pipelines::with_facts(device, DeviceFacts { lanes, ..DeviceFacts::of(device) })
}

/// Pipelines that plan for a GPU, though `device` is a program, with matrix units for fragments of
/// that side, if any.
pub fn as_gpu(device: &wgpu::Device, side: Option<u32>) -> Pipelines {
    let fragment = [Fragment::Eight, Fragment::Sixteen].into_iter().find(|f| Some(f.side()) == side);
    let facts = DeviceFacts::of(device).with_fragment(device, fragment);
    Pipelines::with_facts(device, DeviceFacts { software: false, ..facts })
}

/// Pipelines as `pipelines`, with nothing compiled: what a check put aside stays there.
pub fn emptied(pipelines: &Pipelines) -> Pipelines {
    pipelines.emptied()
}

/// What `work` gives, and the label and the workgroups of each dispatch that it binds on this
/// thread, recorded or not, in order.
pub fn bound<T>(work: impl FnOnce() -> T) -> (T, Vec<(&'static str, [u32; 3])>) {
    crate::kernel::recording::log(work)
}

/// Pipelines of a driver that compiles something else than it is given: `rewrite` gets the families
/// of a kernel and its text, and gives the text to compile. For tests of [`Pipelines::check`].
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

/// A variant's `Debug` text without what is absent: `attention.fused q=F32 k=F32 v=F32 out=F32 mask
/// tiles=Gpu rows=64 …`.
fn name(stage: &KernelVariant) -> String {
    let mut name = stage.label().to_string();
    for piece in format!("{stage:?}").split(['{', '}', '(', ')', ',']) {
        let Some((key, value)) = piece.trim().split_once(": ") else {
            // What a `Some` holds; the type names in front come before any field.
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
