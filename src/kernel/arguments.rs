//! The arguments of kernels: tensors, and the ways in which a kernel can bind them.

use std::fmt::Write as _;

use super::{Binding, Declared, Shared, Slots, View, Width};
use crate::device::DeviceFacts;
use crate::tensor::{Access, DType, Layout, TensorView, Window, broadcast};

/// A required tensor, and an optional tensor.
pub(crate) type One<'a> = TensorView<'a>;
pub(crate) type Opt<'a> = Option<TensorView<'a>>;

/// Required and optional words. The kernel interprets them.
pub(crate) type Raw<'a> = Window<'a>;
pub(crate) type OptRaw<'a> = Option<Window<'a>>;

/// A part of a buffer that is bound as it is. Its view may count from an element outside that part.
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

/// A tensor that is read. It is not bound if the kernel writes to it in place.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub tensor: TensorView<'a>,
    pub in_place: bool,
}

/// Buffers of one type. The kernel chooses one by its number: `NAME_at(slot, o)` loads an element.
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

/// An argument of a dispatch.
pub(crate) trait Argument<'a>: Copy {
    /// The part of the argument that changes the text of the kernel.
    type Key: Key;

    fn key(self) -> Self::Key;

    /// The layout in the uniform; all zeros if it is `None`.
    fn layout(self, device: &DeviceFacts) -> Option<Layout>;

    /// Appends its windows.
    fn bind(self, windows: &mut Vec<Window<'a>>, device: &DeviceFacts);
}

impl<'a> Argument<'a> for One<'a> {
    type Key = DType;

    fn key(self) -> DType {
        self.dtype()
    }

    fn layout(self, device: &DeviceFacts) -> Option<Layout> {
        Some(self.window(device).layout)
    }

    fn bind(self, windows: &mut Vec<Window<'a>>, device: &DeviceFacts) {
        windows.push(self.window(device));
    }
}

impl<'a> Argument<'a> for Raw<'a> {
    type Key = Untyped;

    fn key(self) -> Untyped {
        Untyped
    }

    fn layout(self, _: &DeviceFacts) -> Option<Layout> {
        None
    }

    fn bind(self, windows: &mut Vec<Window<'a>>, _: &DeviceFacts) {
        windows.push(self);
    }
}

impl<'a, A: Argument<'a>> Argument<'a> for Option<A> {
    type Key = Option<A::Key>;

    fn key(self) -> Option<A::Key> {
        self.map(A::key)
    }

    fn layout(self, device: &DeviceFacts) -> Option<Layout> {
        self.and_then(|argument| argument.layout(device))
    }

    fn bind(self, windows: &mut Vec<Window<'a>>, device: &DeviceFacts) {
        if let Some(argument) = self {
            argument.bind(windows, device);
        }
    }
}

impl<'a> Argument<'a> for Source<'a> {
    type Key = Option<DType>;

    fn key(self) -> Option<DType> {
        (!self.in_place).then_some(self.tensor.dtype())
    }

    fn layout(self, device: &DeviceFacts) -> Option<Layout> {
        self.tensor.layout(device)
    }

    fn bind(self, windows: &mut Vec<Window<'a>>, device: &DeviceFacts) {
        (!self.in_place).then_some(self.tensor).bind(windows, device);
    }
}

impl<'a> Argument<'a> for Placed<'a> {
    type Key = DType;

    fn key(self) -> DType {
        self.dtype
    }

    fn layout(self, _: &DeviceFacts) -> Option<Layout> {
        Some(self.window.layout)
    }

    fn bind(self, windows: &mut Vec<Window<'a>>, _: &DeviceFacts) {
        windows.push(self.window);
    }
}

impl<'a> Argument<'a> for Several<'a> {
    type Key = Slots;

    fn key(self) -> Slots {
        Slots { count: self.windows.iter().flatten().count(), dtype: self.dtype }
    }

    fn layout(self, _: &DeviceFacts) -> Option<Layout> {
        None
    }

    fn bind(self, windows: &mut Vec<Window<'a>>, _: &DeviceFacts) {
        windows.extend(self.windows.iter().flatten());
    }
}

/// The keys of arguments, under the same names. They are not written as projections of associated
/// types, because the compiler does not copy fields of such types.
pub(crate) mod keys {
    use super::{Slots, Untyped};
    use crate::tensor::DType;

    pub(crate) type One = DType;
    pub(crate) type Opt = Option<DType>;
    pub(crate) type Raw = Untyped;
    pub(crate) type OptRaw = Option<Untyped>;
    pub(crate) type Placed = DType;
    pub(crate) type Source = Option<DType>;
    pub(crate) type Several = Slots;
}

/// The key of words. It never changes the text of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Untyped;

/// The scalar type that the accessors of a tensor take and return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scalar {
    F32,
    U32,
    Bool,
}

/// The key of an argument.
pub(crate) trait Key: Copy {
    fn declare(self, name: &'static str, access: Access, scalar: Scalar, width: Width, to: &mut Declared);
}

impl Key for DType {
    fn declare(self, name: &'static str, access: Access, _: Scalar, width: Width, to: &mut Declared) {
        to.bindings.push(Binding { access, ..Binding::read(name, self, width) });
    }
}

impl Key for Untyped {
    fn declare(self, name: &'static str, access: Access, scalar: Scalar, width: Width, to: &mut Declared) {
        let dtype = if scalar == Scalar::F32 { DType::F32 } else { DType::U32 };
        dtype.declare(name, access, scalar, width, to);
    }
}

impl Key for Slots {
    fn declare(self, name: &'static str, _: Access, _: Scalar, width: Width, to: &mut Declared) {
        to.bindings.extend(self.bindings(name, width));
        to.several.push((name, self, "f32"));
    }
}

impl<K: Key> Key for Option<K> {
    fn declare(self, name: &'static str, access: Access, scalar: Scalar, width: Width, to: &mut Declared) {
        to.add_text(&format!("const HAS_{}: bool = {};\n", name.to_uppercase(), self.is_some()));
        match self {
            Some(key) => key.declare(name, access, scalar, width, to),
            None => to.absent.push((name, accessors_of_none(name, access, scalar))),
        }
    }
}

/// The accessors of an absent tensor: loads return zero, and stores do nothing.
fn accessors_of_none(name: &str, access: Access, scalar: Scalar) -> String {
    let (ty, zero) = match scalar {
        Scalar::F32 => ("f32", "0.0"),
        Scalar::U32 => ("u32", "0u"),
        Scalar::Bool => ("bool", "false"),
    };
    let mut text = format!("fn {name}_at(o: u32) -> {ty} {{ return {zero}; }}\n");
    if scalar == Scalar::F32 {
        let _ = writeln!(
            text,
            "fn {name}_at4(o: u32, stride: u32, n: u32) -> vec4<f32> {{ return vec4<f32>(); }}"
        );
    }
    if access == Access::Write {
        let _ = writeln!(text, "fn {name}_store(o: u32, x: {ty}) {{}}");
        if scalar == Scalar::F32 {
            let _ = writeln!(text, "fn {name}_store4(o: u32, x: vec4<f32>) {{}}");
        }
    }
    text
}

/// The view of a tensor in the uniform; zeros if the tensor is absent.
pub(crate) fn view(layout: Option<Layout>) -> View {
    layout.map_or(View::default(), View::from)
}

/// The view of a tensor in the uniform, with axes of one element repeated.
pub(crate) fn repeating(layout: Option<Layout>) -> View {
    view(layout.map(broadcast))
}

/// Tensors and numbers that several kernels share.
pub(crate) trait Group<'a>: Clone {
    /// The part of the group that changes the text of the kernel.
    type Key: GroupKey;
    /// The members of the group in the uniform.
    type Uniform: Shared;

    fn key(&self) -> Self::Key;

    fn uniform(&self) -> Self::Uniform;

    fn windows(&self) -> Vec<Window<'a>>;

    /// The bytes of a second uniform.
    fn second_uniform(&self) -> &[u8] {
        &[]
    }
}

/// The key of a group.
pub(crate) trait GroupKey {
    fn declare(&self, to: &mut Declared);
}
