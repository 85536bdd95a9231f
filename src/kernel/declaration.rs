//! The declaration of a kernel: its tensors, the numbers in its uniform, and the fields of its
//! variant.
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
//!     numbers { columns: u32, k: u32, }
//!     variant { lanes: u32, width: Width, }
//! }
//! ```
//!
//! After the name, a line of `tensors` has
//!
//! 1. the kind of argument (`arguments.rs`): `One` is required. `Opt` may be absent. `Source` is
//!    absent if the kernel writes it in place. `Raw` and `OptRaw` are untyped words. `Placed` is a
//!    part of a buffer with a separate view. `Several` is a list of buffers.
//! 2. the access;
//! 3. the scalar type of its accessors in WGSL;
//! 4. the field of the variant with the width of the tensor, or `one` or `four`;
//! 5. `view` if the uniform holds strides and offset, or `repeating` if in addition axes of one
//!    element are repeated.
//!
//! Bindings have the order of the lines. The macro generates
//!
//! - `TopK`, the key of the pipeline: the type of each tensor that is present, then the fields of
//!   `variant`;
//! - `TopKCall`, the arguments of a dispatch, and `TopKCall::dispatch`;
//! - `TopK::declare`, the part of the text that depends on the declaration: bindings with their
//!   accessors, `struct Params` and the uniform `p`. For each `Opt` tensor it adds the constant
//!   `HAS_NAME` and, if the tensor is absent, accessors that do nothing;
//! - the layout of `Params`: the views, then the numbers, with the alignments of WGSL.
//!
//! A [`Group`](super::Group) is a set of tensors that several kernels bind together, such as the
//! tensors of a mask. A section `groups { mask: Masked MaskVariant, }` between `tensors` and
//! `numbers` declares the types of the group and of its key. The group is bound after the tensors.
//! In the uniform, its members lie between the views and the numbers.
//!
//! `describe`, the rest of the text, is written by hand. So is `all`, the list of variants that
//! tests and tools compile.

use std::fmt::Write as _;

use super::{Binding, Constant, Field, Kernel, Shared, Slots, Width, compose};
use crate::tensor::{Access, DType};

/// The bytes of a uniform, with each member aligned as in WGSL.
#[derive(Default)]
pub(crate) struct UniformBytes(Vec<u8>);

impl UniformBytes {
    pub fn push<T: Shared>(&mut self, value: T) {
        self.0.resize(self.0.len().next_multiple_of(align::<T>()), 0);
        self.0.extend_from_slice(bytemuck::bytes_of(&value));
    }

    /// Appends a second uniform, aligned to 16 bytes.
    pub fn append(&mut self, second: &[u8]) {
        self.0.resize(self.0.len().next_multiple_of(16), 0);
        self.0.extend_from_slice(second);
    }

    pub fn finish(mut self) -> Vec<u8> {
        self.append(&[]);
        self.0
    }
}

/// The alignment of a member of a uniform: a scalar, a vector or a struct.
const fn align<T>() -> usize {
    match size_of::<T>() {
        4 => 4,
        8 => 8,
        _ => 16,
    }
}

/// The part of a kernel that follows from its declaration, with the additions of `describe`.
#[derive(Default)]
pub(crate) struct Declared {
    pub bindings: Vec<Binding>,
    pub constants: Vec<Constant>,
    /// `HAS_NAME` of each optional tensor, and the text of groups.
    text: String,
    /// Accessors of absent tensors.
    pub(super) absent: Vec<(&'static str, String)>,
    /// The buffers that the kernel chooses by number, and the element type of their vec4 loads.
    pub(super) several: Vec<(&'static str, Slots, &'static str)>,
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

    /// Adds this text.
    pub fn add_text(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Adds these constants.
    pub fn with(mut self, constants: impl IntoIterator<Item = Constant>) -> Self {
        self.constants.extend(constants);
        self
    }

    /// Changes the access of a tensor.
    pub fn access(mut self, name: &str, access: Access) -> Self {
        self.bindings
            .iter_mut()
            .filter(|binding| binding.name == name)
            .for_each(|binding| binding.access = access);
        self
    }

    /// Binds a tensor as vectors of words, which the kernel unpacks.
    pub fn words(mut self, name: &str) -> Self {
        self.bindings
            .iter_mut()
            .filter(|binding| binding.name == name)
            .for_each(|binding| (binding.dtype, binding.width) = (DType::U32, Width::Four));
        self
    }

    /// Loads a tensor of several buffers as vec4 in its stored type, not as f32.
    pub fn native(mut self, several: &str) -> Self {
        for (name, slots, four) in self.several.iter_mut().filter(|(name, ..)| *name == several) {
            *four = slots.dtype.operand();
            let is_one =
                |binding: &&mut Binding| (0..slots.count).any(|n| binding.name == format!("{name}{n}"));
            self.bindings.iter_mut().filter(is_one).for_each(|binding| binding.native = true);
        }
        self
    }

    /// Replaces the accessors of an absent tensor with this text.
    pub fn instead_of(mut self, name: &str, text: &str) -> Self {
        self.absent
            .iter_mut()
            .filter(|(absent, _)| *absent == name)
            .for_each(|(_, with)| *with = text.to_string());
        self
    }

    /// Builds the kernel from these parts. `invocations` counts the invocations of a workgroup,
    /// `workgroup_memory` its bytes of workgroup memory.
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

/// Declares a kernel: see the documentation of this file.
macro_rules! kernel {
    (
        $(#[$doc:meta])*
        $Key:ident, $Call:ident
        tensors { $($tensor:ident: $Presence:ident $Access:ident $Scalar:ident $width:ident $($view:ident)?,)* }
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

        /// A dispatch of the kernel.
        #[derive(Clone)]
        pub(crate) struct $Call<'a> {
            $(pub $tensor: $crate::kernel::$Presence<'a>,)*
            $($(pub $group: $Group<'a>,)*)?
            $($(#[$number_doc])* pub $number: $Number,)*
            $($(#[$field_doc])* pub $field: $Field,)*
        }

        impl<'a> $Call<'a> {
            /// The dispatch of `grid` workgroups along each axis.
            pub fn dispatch(
                self,
                grid: [impl TryInto<u32>; 3],
                device: &$crate::device::DeviceFacts,
            ) -> $crate::kernel::Dispatch<'a> {
                use $crate::kernel::Argument as _;
                let mut params = $crate::kernel::UniformBytes::default();
                $($(params.push($crate::kernel::$view(self.$tensor.layout(device)));)?)*
                $($(params.push($crate::kernel::Group::uniform(&self.$group));)*)?
                $(params.push(self.$number);)*
                let mut tensors = Vec::new();
                $(self.$tensor.bind(&mut tensors, device);)*
                $($(
                    tensors.extend($crate::kernel::Group::windows(&self.$group));
                    params.append($crate::kernel::Group::second_uniform(&self.$group));
                )*)?
                let key = $Key {
                    $($tensor: self.$tensor.key(),)*
                    $($($group: $crate::kernel::Group::key(&self.$group),)*)?
                    $($field: self.$field,)*
                };
                $crate::kernel::Dispatch {
                    variant: $crate::kernel::KernelVariant::new(key),
                    params: params.finish(),
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
                    $crate::kernel::Scalar::$Scalar,
                    $crate::kernel::kernel!(@width self $width),
                    &mut declared,
                );)*
                $($(
                    // Only named for the macro repetition.
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
