//! One declaration for each kernel: what it binds, what its uniform holds, what changes its text.
//!
//! ```text
//! kernel! {
//!     /// The documentation of the key.
//!     TopK, TopKCall
//!     tensors {
//!         x: One Read F32 width view,
//!         values: Opt Write F32 one view,
//!         indices: One Write U32 one view,
//!     }
//!     numbers { columns: u32, k: u32 }
//!     variant { lanes: u32, width: Width }
//! }
//! ```
//!
//! A line of `tensors` says: the name; whether it may be absent (`Opt`, and `Source`, which is absent where it is written in place) or is
//! words without a type (`Raw`, `OptRaw`), a part of a buffer with a view of its own (`Placed`), or several buffers in one (`Several`); how it is accessed; what its accessors in WGSL speak; the field
//! of the variant that says its width, or `one` or `four`; and, if the uniform holds its strides and offset, `view` (`repeating` where axes of one
//! element stand for any length). Bindings have the order of the lines. From this come
//!
//! - `TopK`, the key of the pipeline: the type of each tensor that is there, then the fields of `variant`;
//! - `TopKCall`, all that a dispatch is made of, and `TopKCall::dispatch`;
//! - `TopK::declare`, the part of the text that follows from it: bindings with their accessors, for each `Opt` tensor the constant
//!   `HAS_NAME` and, if it is absent, accessors that do nothing, `struct Params` and the uniform `p`;
//! - the layout of `Params`: the views, then the numbers, each aligned as WGSL aligns it.
//!
//! What several kernels bind together, as the tensors of a mask, is a [`Group`]. A section `groups { mask: Masked MaskVariant, }` between `tensors`
//! and `numbers` gives the types of the group and of its key. It binds the group behind the tensors, and the uniform holds its numbers between
//! views and numbers.
//!
//! `describe` and `all` stay: the rest of the text, and the variants that tests and tools compile.

use std::fmt::Write as _;

use super::{Binding, Constant, Field, Kernel, Shared, Slots, View, Width, compose};
use crate::device::DeviceFacts;
use crate::tensor::{Access, DType, Layout, TensorView, Window, broadcast};

/// A tensor that is always there, and one that may be absent.
pub(crate) type One<'a> = TensorView<'a>;
pub(crate) type Opt<'a> = Option<TensorView<'a>>;

/// Words whose meaning the kernel knows, and words that may be absent.
pub(crate) type Raw<'a> = Window<'a>;
pub(crate) type OptRaw<'a> = Option<Window<'a>>;

/// A part of a buffer that is bound as it stands. Its view may count from an element outside of that part.
#[derive(Clone, Copy)]
pub(crate) struct Placed<'a> {
    pub window: Window<'a>,
    pub dtype: DType,
}

impl<'a> Placed<'a> {
    /// A whole tensor.
    pub fn of(t: TensorView<'a>, device: &DeviceFacts) -> Self {
        Placed { window: t.window(device), dtype: t.dtype() }
    }
}

/// A tensor that is read, and not bound where the kernel writes to it.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub tensor: TensorView<'a>,
    pub in_place: bool,
}

/// Buffers of one type, of which the kernel picks one by its number. `NAME_at(slot, o)` loads an element.
#[derive(Clone, Copy)]
pub(crate) struct Several<'a> {
    windows: [Option<Window<'a>>; Several::MOST],
    dtype: DType,
}

impl<'a> Several<'a> {
    pub const MOST: usize = 3;

    /// The first [`MOST`](Self::MOST) of these buffers.
    pub fn of(windows: impl IntoIterator<Item = Window<'a>>, dtype: DType) -> Self {
        let mut windows = windows.into_iter();
        Several { windows: std::array::from_fn(|_| windows.next()), dtype }
    }
}

/// The keys of arguments, by the names of those. They are no projections: the compiler does not copy fields whose types are.
pub(crate) mod keys {
    use crate::kernel::{Slots, Untyped};
    use crate::tensor::DType;

    pub(crate) type One = DType;
    pub(crate) type Opt = Option<DType>;
    pub(crate) type Raw = Untyped;
    pub(crate) type OptRaw = Option<Untyped>;
    pub(crate) type Placed = DType;
    pub(crate) type Source = Option<DType>;
    pub(crate) type Several = Slots;
}

/// What the accessors of a tensor speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speaks {
    F32,
    U32,
    Bool,
}

/// What a kernel binds under one name.
pub(crate) trait Argument<'a>: Copy {
    /// What of it changes the text.
    type Key: Key;

    fn key(self) -> Self::Key;

    fn tensor(self) -> Option<TensorView<'a>>;

    /// The layout that the uniform's view tells.
    fn layout(self, device: &DeviceFacts) -> Option<Layout> {
        self.tensor().map(|t| t.window(device).layout)
    }

    fn bind(self, device: &DeviceFacts) -> Option<Window<'a>> {
        self.tensor().map(|t| t.window(device))
    }

    /// Appends its windows.
    fn bind_to(self, windows: &mut Vec<Window<'a>>, device: &DeviceFacts) {
        windows.extend(self.bind(device));
    }
}

impl<'a> Argument<'a> for Source<'a> {
    type Key = Option<DType>;

    fn key(self) -> Option<DType> {
        (!self.in_place).then_some(self.tensor.dtype())
    }

    fn tensor(self) -> Option<TensorView<'a>> {
        Some(self.tensor)
    }

    fn bind(self, device: &DeviceFacts) -> Option<Window<'a>> {
        (!self.in_place).then(|| self.tensor.window(device))
    }
}

impl<'a> Argument<'a> for Several<'a> {
    type Key = Slots;

    fn key(self) -> Slots {
        Slots { count: self.windows.iter().flatten().count(), dtype: self.dtype }
    }

    fn tensor(self) -> Option<TensorView<'a>> {
        None
    }

    fn bind_to(self, windows: &mut Vec<Window<'a>>, _: &DeviceFacts) {
        windows.extend(self.windows.iter().flatten());
    }
}

impl<'a> Argument<'a> for Raw<'a> {
    type Key = Untyped;

    fn key(self) -> Untyped {
        Untyped
    }

    fn tensor(self) -> Option<TensorView<'a>> {
        None
    }

    fn bind(self, _: &DeviceFacts) -> Option<Window<'a>> {
        Some(self)
    }
}

impl<'a> Argument<'a> for OptRaw<'a> {
    type Key = Option<Untyped>;

    fn key(self) -> Option<Untyped> {
        self.map(Raw::key)
    }

    fn tensor(self) -> Option<TensorView<'a>> {
        None
    }

    fn bind(self, _: &DeviceFacts) -> Option<Window<'a>> {
        self
    }
}

impl<'a> Argument<'a> for One<'a> {
    type Key = DType;

    fn key(self) -> DType {
        self.dtype()
    }

    fn tensor(self) -> Option<TensorView<'a>> {
        Some(self)
    }
}

impl<'a> Argument<'a> for Opt<'a> {
    type Key = Option<DType>;

    fn key(self) -> Option<DType> {
        self.map(|t| t.dtype())
    }

    fn tensor(self) -> Option<TensorView<'a>> {
        self
    }
}

impl<'a> Argument<'a> for Placed<'a> {
    type Key = DType;

    fn key(self) -> DType {
        self.dtype
    }

    fn tensor(self) -> Option<TensorView<'a>> {
        None
    }

    fn layout(self, _: &DeviceFacts) -> Option<Layout> {
        Some(self.window.layout)
    }

    fn bind(self, _: &DeviceFacts) -> Option<Window<'a>> {
        Some(self.window)
    }
}

/// Tensors and numbers that several kernels have together.
pub(crate) trait Group<'a>: Clone {
    /// What of it changes the text.
    type Key: GroupKey;
    /// What the uniform holds of it.
    type Uniform: Shared;

    fn key(&self) -> Self::Key;

    fn uniform(&self) -> Self::Uniform;

    fn windows(&self) -> Vec<Window<'a>>;

    /// What a second uniform has, behind `Params`.
    fn behind(&self) -> &[u8] {
        &[]
    }
}

/// The key of a group.
pub(crate) trait GroupKey {
    fn declare(&self, to: &mut Declared);
}

/// The key of an argument.
pub(crate) trait Key: Copy {
    fn declare(self, name: &'static str, access: Access, speaks: Speaks, width: Width, to: &mut Declared);
}

impl Key for DType {
    fn declare(self, name: &'static str, access: Access, _: Speaks, width: Width, to: &mut Declared) {
        to.bindings.push(Binding { access, ..Binding::read(name, self, width) });
    }
}

/// The key of words: nothing of them changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Untyped;

impl Key for Untyped {
    fn declare(self, name: &'static str, access: Access, speaks: Speaks, width: Width, to: &mut Declared) {
        let dtype = if speaks == Speaks::F32 { DType::F32 } else { DType::U32 };
        dtype.declare(name, access, speaks, width, to);
    }
}

impl Key for Slots {
    fn declare(self, name: &'static str, _: Access, _: Speaks, width: Width, to: &mut Declared) {
        to.bindings.extend(self.bindings(name, width));
        to.several.push((name, self, "f32"));
    }
}

impl<K: Key> Key for Option<K> {
    fn declare(self, name: &'static str, access: Access, speaks: Speaks, width: Width, to: &mut Declared) {
        let _ = writeln!(to.text, "const HAS_{}: bool = {};", name.to_uppercase(), self.is_some());
        match self {
            Some(key) => key.declare(name, access, speaks, width, to),
            None => to.absent.push((name, accessors_of_none(name, access, speaks))),
        }
    }
}

/// Accessors of a tensor that is absent: zeros, and stores that do nothing.
fn accessors_of_none(name: &str, access: Access, speaks: Speaks) -> String {
    let (ty, zero) = match speaks {
        Speaks::F32 => ("f32", "0.0"),
        Speaks::U32 => ("u32", "0u"),
        Speaks::Bool => ("bool", "false"),
    };
    let mut text = format!("fn {name}_at(o: u32) -> {ty} {{ return {zero}; }}\n");
    if speaks == Speaks::F32 {
        let _ = writeln!(
            text,
            "fn {name}_at4(o: u32, stride: u32, n: u32) -> vec4<f32> {{ return vec4<f32>(); }}"
        );
    }
    if access == Access::Write {
        let _ = writeln!(text, "fn {name}_store(o: u32, x: {ty}) {{}}");
        if speaks == Speaks::F32 {
            let _ = writeln!(text, "fn {name}_store4(o: u32, x: vec4<f32>) {{}}");
        }
    }
    text
}

/// The view of a tensor in the uniform, zeros if it is absent.
pub(crate) fn view(layout: Option<Layout>) -> View {
    layout.map_or(View::default(), View::from)
}

/// The same of a tensor whose axes of one element repeat it.
pub(crate) fn repeating(layout: Option<Layout>) -> View {
    view(layout.map(broadcast))
}

/// The bytes of a uniform, each member aligned as in WGSL.
#[derive(Default)]
pub(crate) struct Words(Vec<u8>);

impl Words {
    pub fn push<T: Shared>(&mut self, value: T) {
        self.0.resize(self.0.len().next_multiple_of(align::<T>()), 0);
        self.0.extend_from_slice(bytemuck::bytes_of(&value));
    }

    pub fn bytes(mut self) -> Vec<u8> {
        self.0.resize(self.0.len().next_multiple_of(16), 0);
        self.0
    }
}

/// Of a scalar, of a vector, of a struct in a uniform.
const fn align<T>() -> usize {
    match size_of::<T>() {
        4 => 4,
        8 => 8,
        _ => 16,
    }
}

/// The part of a kernel that follows from its declaration, and what `describe` adds to it.
#[derive(Default)]
pub(crate) struct Declared {
    pub bindings: Vec<Binding>,
    pub constants: Vec<Constant>,
    /// `HAS_NAME` of each tensor that may be absent.
    text: String,
    /// The tensors that the kernel picks by number, and the type of the elements that it loads in fours.
    several: Vec<(&'static str, Slots, &'static str)>,
    /// The accessors of those that are.
    absent: Vec<(&'static str, String)>,
    fields: Vec<Field>,
    bytes: usize,
}

impl Declared {
    pub fn member<T: Shared>(&mut self, name: &'static str) {
        let offset = self.bytes.next_multiple_of(align::<T>());
        match T::MEMBERS {
            [] => self.fields.push(Field { name, offset, wgsl: T::WGSL }),
            members => self.fields.extend(members.iter().map(|f| Field { offset: offset + f.offset, ..*f })),
        }
        self.bytes = offset + size_of::<T>();
    }

    pub fn u32(mut self, name: &'static str, value: u32) -> Self {
        self.constants.push(Constant::U32(name, value));
        self
    }

    pub fn bool(mut self, name: &'static str, value: bool) -> Self {
        self.constants.push(Constant::Bool(name, value));
        self
    }

    /// This text too.
    pub fn add_text(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// These constants too.
    pub fn with(mut self, constants: impl IntoIterator<Item = Constant>) -> Self {
        self.constants.extend(constants);
        self
    }

    /// Changes how the kernel accesses a tensor.
    pub fn access(mut self, name: &str, access: Access) -> Self {
        self.bindings
            .iter_mut()
            .filter(|binding| binding.name == name)
            .for_each(|binding| binding.access = access);
        self
    }

    /// Binds a tensor as vectors of words, which the kernel unpacks itself.
    pub fn words(mut self, name: &str) -> Self {
        self.bindings
            .iter_mut()
            .filter(|binding| binding.name == name)
            .for_each(|binding| (binding.dtype, binding.width) = (DType::U32, Width::Four));
        self
    }

    /// Loads several tensors in fours as they are, not as f32.
    pub fn native(mut self, several: &str) -> Self {
        for (name, slots, four) in self.several.iter_mut().filter(|(name, ..)| *name == several) {
            *four = slots.dtype.operand();
            let is_one =
                |binding: &&mut Binding| (0..slots.count).any(|n| binding.name == format!("{name}{n}"));
            self.bindings.iter_mut().filter(is_one).for_each(|binding| binding.native = true);
        }
        self
    }

    /// What stands for a tensor where it is absent, in place of zeros.
    pub fn instead_of(mut self, name: &str, text: &str) -> Self {
        self.absent
            .iter_mut()
            .filter(|(absent, _)| *absent == name)
            .for_each(|(_, with)| *with = text.to_string());
        self
    }

    /// The kernel with these parts, invocations in a workgroup, and bytes of workgroup memory.
    pub fn kernel(mut self, parts: &[&str], invocations: u32, workgroup_memory: u32) -> Kernel {
        self.bindings.sort_by_key(|binding| binding.uniform.is_some());
        let members = self.fields.iter().map(|f| format!("    {}: {},\n", f.name, f.wgsl));
        let mut own = self.text;
        let _ = writeln!(own, "struct Params {{\n{}}}", members.collect::<String>());
        own.push_str("@group(0) @binding(0) var<uniform> p: Params;\n");
        own.extend(self.absent.into_iter().map(|(_, text)| text));
        own.extend(self.several.into_iter().map(|(name, slots, four)| slots.functions(name, four)));
        let parts = [&[own.as_str()], parts].concat();
        Kernel {
            wgsl: compose(&self.constants, &self.bindings, &parts),
            bindings: self.bindings,
            params: self.fields,
            params_bytes: self.bytes.next_multiple_of(16),
            invocations,
            workgroup_memory,
        }
    }
}

/// Declares a kernel: see the top of this file.
macro_rules! kernel {
    (
        $(#[$doc:meta])*
        $Key:ident, $Call:ident
        tensors { $($tensor:ident: $Presence:ident $Access:ident $Speaks:ident $width:ident $($view:ident)?,)* }
        $(groups { $($group:ident: $Group:ident $GroupKey:ty,)* })?
        numbers { $($(#[$number_doc:meta])* $number:ident: $Number:ty,)* }
        variant { $($(#[$field_doc:meta])* $field:ident: $Field:ty,)* }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) struct $Key {
            $(pub $tensor: $crate::kernel::keys::$Presence,)*
            $($(pub $group: $GroupKey,)*)?
            $($(#[$field_doc])* pub $field: $Field,)*
        }

        /// A dispatch of it.
        #[derive(Clone)]
        pub(crate) struct $Call<'a> {
            $(pub $tensor: $crate::kernel::$Presence<'a>,)*
            $($(pub $group: $Group<'a>,)*)?
            $($(#[$number_doc])* pub $number: $Number,)*
            $($(#[$field_doc])* pub $field: $Field,)*
        }

        impl<'a> $Call<'a> {
            /// Of so many workgroups along each axis.
            pub fn dispatch<V: From<$Key>>(
                self,
                grid: [usize; 3],
                device: &$crate::device::DeviceFacts,
            ) -> $crate::kernel::Dispatch<'a, V> {
                use $crate::kernel::Argument as _;
                let mut words = $crate::kernel::Words::default();
                $($(words.push($crate::kernel::$view(self.$tensor.layout(device)));)?)*
                $($(words.push($crate::kernel::Group::uniform(&self.$group));)*)?
                $(words.push(self.$number);)*
                #[allow(unused_mut)]
                let mut params = words.bytes();
                let mut tensors = Vec::new();
                $(self.$tensor.bind_to(&mut tensors, device);)*
                $($(
                    tensors.extend($crate::kernel::Group::windows(&self.$group));
                    params.extend_from_slice($crate::kernel::Group::behind(&self.$group));
                )*)?
                let key = $Key {
                    $($tensor: self.$tensor.key(),)*
                    $($($group: $crate::kernel::Group::key(&self.$group),)*)?
                    $($field: self.$field,)*
                };
                $crate::kernel::Dispatch {
                    variant: key.into(),
                    params,
                    tensors,
                    grid: $crate::kernel::grid(grid),
                }
            }
        }

        impl $Key {
            fn declare(&self) -> $crate::kernel::Declared {
                use $crate::kernel::Key as _;
                let mut declared = $crate::kernel::Declared::default();
                $(self.$tensor.declare(
                    stringify!($tensor),
                    $crate::tensor::Access::$Access,
                    $crate::kernel::Speaks::$Speaks,
                    $crate::kernel::kernel!(@width self $width),
                    &mut declared,
                );)*
                $($(
                    let _ = $crate::kernel::$view;
                    declared.member::<$crate::kernel::View>(stringify!($tensor));
                )?)*
                $($(
                    $crate::kernel::GroupKey::declare(&self.$group, &mut declared);
                    declared.member::<<$Group as $crate::kernel::Group>::Uniform>(stringify!($group));
                )*)?
                $(declared.member::<$Number>(stringify!($number));)*
                declared
            }
        }
    };
    (@width $self:ident one) => { $crate::kernel::Width::One };
    (@width $self:ident four) => { $crate::kernel::Width::Four };
    (@width $self:ident $field:ident) => { $self.$field };
}
pub(crate) use kernel;
