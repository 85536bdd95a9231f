//! Kernels: the WGSL text of a variant, its bindings and its parameters.

mod arguments;
pub(crate) mod axes;
pub(crate) mod bindings;
mod declaration;
pub(crate) mod dispatches;
pub(crate) mod guard;
pub(crate) mod options;
pub(crate) mod pieces;
pub(crate) mod pipelines;
pub(crate) mod recording;
mod requirements;
pub(crate) mod scratch;
mod sharing;
mod slots;
pub(crate) mod texts;
pub(crate) mod unroll;
mod variant;
pub(crate) mod vec4_grid;

pub(crate) use arguments::{
    Argument, Group, GroupKey, Key, One, Opt, OptRaw, Placed, Raw, Scalar, Several, Source, Untyped, keys,
    repeating, view,
};
pub(crate) use axes::{FLOATS, FLOATS_OR_NONE, WIDTHS, memory_of, shader};
pub(crate) use bindings::{BindingCache, BindingKey, BoundDispatch};
pub(crate) use declaration::{Declared, UniformBytes, kernel};
pub(crate) use dispatches::{Dispatches, fits, in_scratch, runs};
pub use options::{Algorithm, KernelOptions, MatrixUnits, Target};
pub(crate) use pipelines::PipelineKey;
pub use pipelines::Pipelines;
pub use recording::{Prepared, Recorder, WarmUp};
pub use requirements::Requirements;
pub(crate) use scratch::Slot;
pub use scratch::{Scratch, ScratchSize};
use sharing::overlap;
pub(crate) use sharing::{Shares, Sharing};
pub(crate) use slots::Slots;
use unroll::unrolled;
pub(crate) use variant::{KernelVariant, Variant, families};

use std::fmt::Write as _;

use crate::device::{DeviceFacts, Fragment};
use crate::tensor::{Access, DType, Error, Layout, TensorView, Window, broadcast};

/// The number of elements that a binding's accessors load or store at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Width {
    /// Any stride and alignment.
    One,
    /// Aligned groups of four along the contiguous axis.
    Four,
}

impl Width {
    pub fn of(four: bool) -> Self {
        if four { Width::Four } else { Width::One }
    }

    /// The width at which kernels can load the channels of all these tensors, of which some may be
    /// absent.
    pub fn of_rows<'a>(tensors: &[impl Into<Option<TensorView<'a>>> + Copy]) -> Self {
        let present = tensors.iter().filter_map(|tensor| (*tensor).into());
        Width::of(present.into_iter().all(|tensor: TensorView| tensor.layout.in_fours(3)))
    }
}

/// A buffer of a kernel. Binding 0 is the uniform `p`. Storage buffers follow from 1 on, then other
/// uniforms.
#[derive(Clone, Debug)]
pub(crate) struct Binding {
    pub name: String,
    pub dtype: DType,
    pub width: Width,
    pub access: Access,
    /// True if `NAME_at4` returns f16 elements as f16, not as f32.
    pub native: bool,
    /// The WGSL type of a uniform.
    pub uniform: Option<&'static str>,
    /// True if f16 is packed, two elements in a word: for devices without `SHADER_F16`.
    pub packed: bool,
    /// True if a tensor that is read is bound writable, because its buffer is written as well.
    pub shared: bool,
    /// The binding of the same bytes, in place of a binding of this tensor.
    pub same_as: Option<String>,
    /// The place of the tensor's shift among [`SHIFTS`], if it begins behind that binding.
    pub shift: Option<usize>,
}

impl Binding {
    pub fn read(name: impl Into<String>, dtype: DType, width: Width) -> Self {
        Binding {
            name: name.into(),
            dtype,
            width,
            access: Access::Read,
            native: false,
            uniform: None,
            packed: false,
            shared: false,
            same_as: None,
            shift: None,
        }
    }

    /// A second uniform. Its bytes follow the parameters of a dispatch.
    pub fn uniform(name: impl Into<String>, ty: &'static str) -> Self {
        Binding { uniform: Some(ty), ..Binding::read(name, DType::U32, Width::One) }
    }

    fn scalar(&self) -> &'static str {
        self.dtype.wgsl()
    }

    /// The prefix of the functions that pack and unpack elements, if a word holds two elements.
    fn packing(&self) -> Option<&'static str> {
        match self.dtype {
            DType::BF16 => Some("bf16"),
            DType::F16 if self.packed => Some("f16"),
            _ => None,
        }
    }

    /// The element type of the vec4 that `NAME_at4` returns.
    pub fn loaded(&self) -> &'static str {
        if self.native { self.dtype.operand() } else { "f32" }
    }

    /// The WGSL type of the array's elements. It is atomic if two invocations may write to the same
    /// word.
    pub fn element(&self) -> String {
        match (self.packing(), self.width, self.access) {
            (Some(_), Width::One, Access::Write) => "atomic<u32>".to_string(),
            (Some(_), Width::One, Access::Read) => "u32".to_string(),
            (Some(_), Width::Four, _) => "vec2<u32>".to_string(),
            (None, Width::One, _) => self.scalar().to_string(),
            (None, Width::Four, _) => format!("vec4<{}>", self.scalar()),
        }
    }

    /// The bytes of an element of the array, on devices with `SHADER_F16` if `has_f16`.
    pub fn element_bytes(&self, has_f16: bool) -> u64 {
        let packed = self.packing().is_some() || (self.dtype == DType::F16 && !has_f16);
        let scalar = if self.dtype == DType::Bool { 4 } else { self.dtype.bytes() as u64 };
        match self.width {
            Width::One if packed => 4,
            Width::One => scalar,
            Width::Four => 4 * scalar,
        }
    }

    /// The declaration of the binding, and its accessors. They take element indices, and load and
    /// store f32 (bool, u32):
    ///
    /// - `NAME_at(o)` and `NAME_store(o, x)`, one element;
    /// - `NAME_at4(o, stride, n)`, a vec4: with width one, elements from the n-th on are zero;
    /// - `NAME_store4(o, x)`, a contiguous vec4.
    ///
    /// With width four, only the invocation that owns a vec4 may store its elements.
    fn declaration(&self, binding: usize) -> String {
        let declared = self.own_declaration(binding);
        match (&self.same_as, declared.split_once('\n')) {
            (Some(same), Some((_, accessors))) => {
                let shift = self.shift.map(|n| format!("{SHIFTS}[{}][{}] + ", n / 4, n % 4));
                indexed(accessors, &self.name, same, &shift.unwrap_or_default())
            }
            _ => declared,
        }
    }

    fn own_declaration(&self, binding: usize) -> String {
        let Binding { name, dtype, width, access, .. } = self;
        if let Some(ty) = self.uniform {
            return format!("@group(0) @binding({binding}) var<uniform> {name}: {ty};\n");
        }
        let mode = if *access == Access::Write || self.shared { "read_write" } else { "read" };
        let (scalar, load) = (self.scalar(), if dtype.is_float() { "f32" } else { "u32" });
        let (element, four) = (self.element(), self.loaded());
        let mut text =
            format!("@group(0) @binding({binding}) var<storage, {mode}> {name}: array<{element}>;\n");
        let body = match (dtype, width) {
            (DType::Bool, _) => {
                format!(
                    "fn {name}_at(o: u32) -> bool {{ return (({name}[o / 4u] >> (o % 4u * 8u)) & 0xffu) != 0u; }}\n"
                )
            }
            (DType::U32, Width::One) => format!("fn {name}_at(o: u32) -> u32 {{ return {name}[o]; }}\n"),
            // The kernels unpack these vectors.
            (DType::U32, Width::Four) => String::new(),
            _ if self.packing().is_some() => self.packed_loads(),
            (_, Width::One) => format!(
                "fn {name}_at(o: u32) -> {load} {{ return {load}({name}[o]); }}\n\
                 fn {name}_at4(o: u32, stride: u32, n: u32) -> vec4<{four}> {{\n    \
                     let c = min(vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(n - 1u)) * stride + o;\n    \
                     let v = vec4<{four}>({four}({name}[c.x]), {four}({name}[c.y]), {four}({name}[c.z]), {four}({name}[c.w]));\n    \
                     return select(vec4<{four}>(), v, vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(n));\n}}\n"
            ),
            (_, Width::Four) => format!(
                "fn {name}_at(o: u32) -> {load} {{ return {load}({name}[o / 4u][o % 4u]); }}\n\
                 fn {name}_at4(o: u32, stride: u32, n: u32) -> vec4<{four}> {{ return vec4<{four}>({name}[o / 4u]); }}\n"
            ),
        };
        text.push_str(&body);
        if *access == Access::Write {
            let put = match width {
                _ if self.packing().is_some() => self.packed_stores(),
                // As for loads.
                Width::Four if *dtype == DType::U32 => String::new(),
                _ if !dtype.is_float() => format!("fn {name}_store(o: u32, x: u32) {{ {name}[o] = x; }}\n"),
                Width::One => format!(
                    "fn {name}_store(o: u32, x: f32) {{ {name}[o] = {scalar}(x); }}\n\
                     fn {name}_store4(o: u32, x: vec4<f32>) {{\n    \
                         {name}[o] = {scalar}(x.x);\n    {name}[o + 1u] = {scalar}(x.y);\n    \
                         {name}[o + 2u] = {scalar}(x.z);\n    {name}[o + 3u] = {scalar}(x.w);\n}}\n"
                ),
                Width::Four => format!(
                    "fn {name}_store(o: u32, x: f32) {{ {name}[o / 4u][o % 4u] = {scalar}(x); }}\n\
                     fn {name}_store4(o: u32, x: vec4<f32>) {{ {name}[o / 4u] = {element}(x); }}\n"
                ),
            };
            text.push_str(&put);
        }
        text
    }

    /// The loads of a tensor with two elements per word.
    fn packed_loads(&self) -> String {
        let Binding { name, width, access, .. } = self;
        let of = self.packing().unwrap_or_default();
        match width {
            Width::One => {
                let word = if *access == Access::Write {
                    format!("atomicLoad(&{name}[o / 2u])")
                } else {
                    format!("{name}[o / 2u]")
                };
                format!(
                    "fn {name}_at(o: u32) -> f32 {{ return {of}_at({word}, o); }}\n\
                     fn {name}_at4(o: u32, stride: u32, n: u32) -> vec4<f32> {{\n    \
                         let c = min(vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(n - 1u)) * stride + o;\n    \
                         let v = vec4<f32>({name}_at(c.x), {name}_at(c.y), {name}_at(c.z), {name}_at(c.w));\n    \
                         return select(vec4<f32>(), v, vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(n));\n}}\n"
                )
            }
            Width::Four => format!(
                "fn {name}_at(o: u32) -> f32 {{ return {of}_at({name}[o / 4u][o / 2u % 2u], o); }}\n\
                 fn {name}_at4(o: u32, stride: u32, n: u32) -> vec4<f32> {{ return {of}_at4({name}[o / 4u]); }}\n"
            ),
        }
    }

    /// The stores of a tensor with two elements per word. A store does not change the other element
    /// of the word. Another invocation may write that element at the same time.
    fn packed_stores(&self) -> String {
        let name = &self.name;
        let of = self.packing().unwrap_or_default();
        match self.width {
            Width::One => format!(
                "fn {name}_store(o: u32, x: f32) {{\n    \
                     atomicAnd(&{name}[o / 2u], 0xffff0000u >> (o % 2u * 16u));\n    \
                     atomicOr(&{name}[o / 2u], {of}_of(x) << (o % 2u * 16u));\n}}\n\
                 fn {name}_store4(o: u32, x: vec4<f32>) {{\n    \
                     {name}_store(o, x.x);\n    {name}_store(o + 1u, x.y);\n    \
                     {name}_store(o + 2u, x.z);\n    {name}_store(o + 3u, x.w);\n}}\n"
            ),
            Width::Four => format!(
                "fn {name}_store(o: u32, x: f32) {{\n    \
                     let word = {name}[o / 4u][o / 2u % 2u];\n    \
                     {name}[o / 4u][o / 2u % 2u] = (word & (0xffff0000u >> (o % 2u * 16u))) | ({of}_of(x) << (o % 2u * 16u));\n}}\n\
                 fn {name}_store4(o: u32, x: vec4<f32>) {{ {name}[o / 4u] = vec2<u32>({of}_pair(x.xy), {of}_pair(x.zw)); }}\n"
            ),
        }
    }
}

/// The functions that pack and unpack bf16. [`compose`] adds them to kernels with bf16 bindings.
/// Other kernels that need them add them as a part.
pub(crate) const BF16: &str = shader!("tensor/bf16");

/// The functions that pack and unpack f16 on devices without `SHADER_F16`, and the function that
/// these call.
const F16: &str = shader!("tensor/f16");
const HALF: &str = shader!("tensor/half");

/// The first lines of a kernel with f16, and of a kernel with matrix units.
const ENABLE_F16: &str = "enable f16;\n";
const ENABLE_MATRIX: &str = "enable wgpu_cooperative_matrix;\n";

/// A kernel that can be compiled: its text, its bindings and the limits that it needs.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub wgsl: String,
    pub bindings: Vec<Binding>,
    /// The Rust counterpart of the WGSL `Params`.
    #[cfg_attr(not(feature = "inspect"), allow(dead_code))]
    pub params: Vec<Field>,
    pub params_bytes: usize,
    pub invocations: u32,
    pub workgroup_memory: u32,
}

impl Kernel {
    /// Returns the kernel for devices without `SHADER_F16`, with packed F16 tensors. Returns `None`
    /// if the kernel does not use f16, or if it uses f16 on matrix units.
    pub fn without_f16(&self) -> Option<Kernel> {
        let text = self.wgsl.strip_prefix(ENABLE_F16).filter(|text| !text.starts_with(ENABLE_MATRIX))?;
        let mut kernel = Kernel { wgsl: text.to_string(), ..self.clone() };
        for (n, binding) in kernel.bindings.iter_mut().enumerate().filter(|(_, b)| b.dtype == DType::F16) {
            let native = binding.declaration(n + 1);
            binding.packed = true;
            kernel.wgsl = kernel.wgsl.replacen(&native, &binding.declaration(n + 1), 1);
        }
        let half_is_there = kernel.wgsl.contains(HALF);
        for piece in [(!half_is_there).then_some(HALF), Some(F16)].into_iter().flatten() {
            kernel.wgsl += "\n";
            kernel.wgsl += piece;
        }
        Some(kernel)
    }

    /// Returns the kernel for inputs that share a buffer with an output.
    ///
    /// # Errors
    /// Two inputs overlap, and the kernel reads them as different types or without accessors. More
    /// than [`MOST_SHIFTS`] inputs begin behind the tensors whose bindings they share.
    pub fn with_sharing(mut self, label: &'static str, sharing: &Sharing) -> Result<Self, Error> {
        let mut shifts = 0;
        let mut joined = Vec::new();
        for (n, shares) in sharing.bindings() {
            let mut shared = self.bindings[n].clone();
            let own = shared.declaration(n + 1);
            match shares {
                Shares::Buffer => shared.shared = true,
                Shares::Binding { owner, shifted } => {
                    let same = &self.bindings[owner];
                    if same.element() != shared.element() {
                        return Err(overlap(label, same, &shared));
                    }
                    shared.same_as = Some(same.name.clone());
                    joined.push((owner, n));
                    if shifted {
                        if shifts == MOST_SHIFTS {
                            return Err(overlap(label, same, &shared));
                        }
                        shared.shift = Some(shifts);
                        shifts += 1;
                    }
                }
            }
            self.wgsl = self.wgsl.replacen(&own, &shared.declaration(n + 1), 1);
            self.bindings[n] = shared;
        }
        if shifts > 0 {
            let uniform = Binding::uniform(SHIFTS, "array<vec4<u32>, 4>");
            self.wgsl += &uniform.declaration(self.bindings.len() + 1);
            self.bindings.push(uniform);
        }
        // A kernel that reads an array without its accessors now names an array that is not there.
        if !joined.is_empty() && naga::front::wgsl::parse_str(&self.wgsl).is_err() {
            let indexes = |n: usize| self.wgsl.contains(&format!("{}[", self.bindings[n].name));
            let (owner, n) = *joined.iter().find(|(_, n)| indexes(*n)).unwrap_or(&joined[0]);
            return Err(overlap(label, &self.bindings[owner], &self.bindings[n]));
        }
        Ok(self)
    }

    /// Returns the kernel for a part of a grid that has more workgroups than one dispatch allows.
    /// This kernel counts workgroups from the uniform `first_workgroup` on, its last binding.
    pub fn of_part(mut self) -> Self {
        let uniform = Binding::uniform("first_workgroup", "vec4<u32>");
        let declared = uniform.declaration(self.bindings.len() + 1);
        // A kernel that does not read its workgroup index has a single workgroup, and is never
        // split.
        if let Some((before, rest)) = self.wgsl.split_once("@builtin(workgroup_id) ")
            && let Some((id, rest)) = rest.split_once(": vec3<u32>")
            && let Some((inputs, body)) = rest.split_once('{')
        {
            self.wgsl = format!(
                "{before}@builtin(workgroup_id) workgroup_of_part: vec3<u32>{inputs}{{\n    \
                     let {id} = workgroup_of_part + first_workgroup.xyz;{body}\n{declared}"
            );
            self.bindings.push(uniform);
        }
        self
    }

    /// The limits that the kernel needs and that wgpu does not check. Each has a description, a
    /// value, and a name in `wgpu::Limits`.
    pub fn limits(&self) -> [(&'static str, u32, &'static str); 3] {
        [
            ("invocations per workgroup", self.invocations, "max_compute_invocations_per_workgroup"),
            ("bytes of workgroup memory", self.workgroup_memory, "max_compute_workgroup_storage_size"),
            ("storage buffers", self.storage_buffers(), "max_storage_buffers_per_shader_stage"),
        ]
    }

    /// The number of storage buffers that the kernel binds.
    pub fn storage_buffers(&self) -> u32 {
        self.bindings.iter().filter(|binding| binding.uniform.is_none() && binding.same_as.is_none()).count()
            as u32
    }
}

/// The uniform with the first elements of tensors in the bindings that they share.
const SHIFTS: &str = "shared_shifts";

/// The length of [`SHIFTS`].
pub(crate) const MOST_SHIFTS: usize = 16;

/// The text with elements of the array `to` in place of those of `name`. `shift` precedes each
/// index.
fn indexed(text: &str, name: &str, to: &str, shift: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(name) {
        let (before, found) = rest.split_at(at);
        let after = &found[name.len()..];
        out.push_str(before);
        let is_part = out.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        rest = after;
        match after.strip_prefix('[') {
            Some(index) if !is_part => {
                out.extend([to, "[", shift]);
                rest = index;
            }
            _ => out.push_str(name),
        }
    }
    out + rest
}

/// A constant that precedes a shader's text.
pub(crate) enum Constant {
    U32(&'static str, u32),
    Bool(&'static str, bool),
    /// The fragments of matrix units: their side, `FRAGMENT`, and the types `Left`, `Right`,
    /// `Sums`.
    Fragments(Fragment),
}

/// Composes a kernel's text: `enable` lines, constants, bindings, then the parts. Marked loops are
/// unrolled. The order of everything after the `enable` lines does not matter in WGSL.
fn compose(constants: &[Constant], bindings: &[Binding], parts: &[&str]) -> String {
    let mut text = String::new();
    let matrix = constants.iter().any(|c| matches!(c, Constant::Fragments(_)));
    if matrix || bindings.iter().any(|b| b.dtype == DType::F16) {
        text.push_str(ENABLE_F16);
    }
    if matrix {
        // naga treats every variable as non-uniform, and therefore every fragment that depends on
        // one.
        text.push_str(ENABLE_MATRIX);
        text.push_str("diagnostic(off, derivative_uniformity);\n");
    }
    for constant in constants {
        let _ = match constant {
            Constant::U32(name, value) => writeln!(text, "const {name}: u32 = {value}u;"),
            Constant::Bool(name, value) => writeln!(text, "const {name}: bool = {value};"),
            Constant::Fragments(fragment) => {
                let side = fragment.side();
                let ty = |scalar, role| format!("coop_mat{side}x{side}<{scalar}, {role}>");
                let [left, right, sums] = [ty("f16", "A"), ty("f16", "B"), ty("f32", "C")];
                writeln!(
                    text,
                    "const FRAGMENT: u32 = {side}u;\nalias Left = {left};\nalias Right = {right};\nalias Sums = {sums};"
                )
            }
        };
    }
    for (n, binding) in bindings.iter().enumerate() {
        text.push_str(&binding.declaration(n + 1));
    }
    let has_bf16 = bindings.iter().any(|b| b.dtype == DType::BF16) && !parts.contains(&BF16);
    for part in parts.iter().chain(has_bf16.then_some(&BF16)) {
        text.push('\n');
        text.push_str(part);
    }
    unrolled(&text)
}

/// A member of a parameter struct, for the test that compares the Rust struct with the WGSL struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Field {
    /// The member's name, the same in Rust and WGSL.
    pub name: &'static str,
    /// Bytes from the start of the struct.
    pub offset: usize,
    /// The WGSL type.
    pub wgsl: &'static str,
}

/// A parameter struct and its members.
pub(crate) trait Table: Sized {
    const NAME: &'static str;
    const FIELDS: &'static [Field];
}

/// The WGSL struct of `P`.
pub(crate) fn declaration<P: Table>() -> String {
    let members: String = P::FIELDS.iter().map(|f| format!("    {}: {},\n", f.name, f.wgsl)).collect();
    format!("struct {} {{\n{members}}}\n", P::NAME)
}

/// A Rust type with a WGSL counterpart of the same layout.
pub(crate) trait Shared: bytemuck::Pod {
    const WGSL: &'static str;
    /// The members of a struct whose members are also members of `Params`.
    const MEMBERS: &'static [Field] = &[];
}

macro_rules! shared {
    ($($rust:ty = $wgsl:literal),* $(,)?) => {
        $(impl $crate::kernel::Shared for $rust { const WGSL: &'static str = $wgsl; })*
    };
}
pub(crate) use shared;

shared! { u32 = "u32", i32 = "i32", f32 = "f32", [u32; 2] = "vec2<u32>", [u32; 4] = "vec4<u32>", View = "View" }

/// Declares a parameter struct and the table of its fields.
macro_rules! params {
    ($(#[$doc:meta])* $vis:vis struct $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
        $vis struct $name { $($(#[$field_doc])* pub $field: $type,)* }

        impl $crate::kernel::Table for $name {
            const NAME: &'static str = stringify!($name);
            const FIELDS: &'static [$crate::kernel::Field] = &[$($crate::kernel::Field {
                name: stringify!($field),
                offset: std::mem::offset_of!($name, $field),
                wgsl: <$type as $crate::kernel::Shared>::WGSL,
            }),*];
        }
    };
}
pub(crate) use params;

/// The WGSL `View`: strides and offset in elements. Checked tensors fit in 32 bits.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct View {
    pub strides: [u32; 4],
    pub offset: u32,
    pub pad: [u32; 3],
}

impl View {
    /// The view of a tensor, relative to the bound part of its buffer.
    pub fn of(t: TensorView, device: &DeviceFacts) -> Self {
        View::from(t.window(device).layout)
    }

    /// The view of a tensor whose axes of one element are repeated.
    pub fn repeating(t: TensorView, device: &DeviceFacts) -> Self {
        View::from(broadcast(t.window(device).layout))
    }

    /// The view of a tensor; zeros if it is absent.
    pub fn optional(t: Option<TensorView>, device: &DeviceFacts) -> Self {
        t.map_or(View::default(), |t| View::of(t, device))
    }
}

impl From<Layout> for View {
    fn from(layout: Layout) -> Self {
        View { strides: layout.strides.map(|s| s as u32), offset: layout.offset as u32, pad: [0; 3] }
    }
}

/// Converts workgroup counts to u32. A larger count becomes `u32::MAX`, which is above every
/// device's limit.
pub(crate) fn grid(counts: [impl TryInto<u32>; 3]) -> [u32; 3] {
    counts.map(|n| n.try_into().unwrap_or(u32::MAX))
}

/// A dispatch that is ready to be bound. After its parameters, `params` may contain the bytes of a
/// second uniform. `tensors` are in binding order, and `grid` counts workgroups.
pub(crate) struct Dispatch<'a> {
    pub variant: KernelVariant,
    pub params: Vec<u8>,
    pub tensors: Vec<Window<'a>>,
    pub grid: [u32; 3],
}
