//! Element types.

/// Element type of a tensor in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 16-bit float; storage only, sums are always f32. Needs no device feature: without
    /// `wgpu::Features::SHADER_F16` kernels pack two elements in a word.
    F16,
    /// The upper half of a 32-bit float (bfloat16); storage only, sums are always f32. Needs no
    /// device feature: kernels pack and unpack it by its bits, and round to the nearest, ties to
    /// even. Matrix units do not multiply it.
    BF16,
    /// 32-bit unsigned integer, for lengths.
    U32,
    /// Boolean, one byte each: 0 is false, anything else true.
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

    /// The WGSL scalar that memory holds it in, or several of it.
    pub(crate) const fn wgsl(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 | DType::U32 | DType::Bool => "u32",
        }
    }

    /// The WGSL float that loses nothing of it.
    pub(crate) const fn operand(self) -> &'static str {
        if matches!(self, DType::F16) { "f16" } else { "f32" }
    }

    /// Whether this is one of the float types.
    pub(crate) const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }
}

/// What messages say where any of the float types would do.
pub(crate) const FLOAT: &str = "F32, F16 or BF16";

/// What elements stand for, in whichever type they are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    Number,
    Bool,
    Float,
}

impl Element {
    /// What kernels read them as.
    pub fn wgsl(self) -> &'static str {
        match self {
            Element::Number => "u32",
            Element::Bool => "bool",
            Element::Float => "f32",
        }
    }
}
