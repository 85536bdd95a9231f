//! Element types.

/// Element type of a tensor in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 16-bit float, for storage only: sums are always f32. Needs no device feature: without
    /// `wgpu::Features::SHADER_F16` kernels pack two elements in a word.
    F16,
    /// The upper 16 bits of a 32-bit float (bfloat16), for storage only: sums are always f32. Needs
    /// no device feature: kernels pack and unpack its bits, and round to nearest, ties to even.
    /// Matrix units do not multiply bf16.
    BF16,
    /// 32-bit unsigned integer, for lengths.
    U32,
    /// Boolean, one byte each: 0 is false, any other value is true.
    Bool,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::Bool => 1,
        }
    }

    /// The WGSL scalar type of the memory. One scalar stores one element or several.
    pub(crate) const fn wgsl(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 | DType::U32 | DType::Bool => "u32",
        }
    }

    /// The narrowest WGSL float type that represents every value exactly.
    pub(crate) const fn operand(self) -> &'static str {
        if matches!(self, DType::F16) { "f16" } else { "f32" }
    }

    /// True for float types.
    pub(crate) const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }
}

/// The float types, as error messages list them.
pub(crate) const FLOAT: &str = "F32, F16 or BF16";

/// The meaning of an element, independent of the type that stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    Number,
    Bool,
    Float,
}

impl Element {
    /// The WGSL type that kernels load an element as.
    pub fn wgsl(self) -> &'static str {
        match self {
            Element::Number => "u32",
            Element::Bool => "bool",
            Element::Float => "f32",
        }
    }
}
