//! What kernels that look into a cache have in common: twin of `shared/cache.wgsl` and `shared/keys_cache.wgsl`.

use crate::kernel::{Binding, Constant, Width, params, shared};
use crate::tensor::DType;

/// How the elements of a cache are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Format {
    F32,
    F16,
    Q8,
    Q4,
}

impl Format {
    pub const ALL: [Format; 4] = [Format::F32, Format::F16, Format::Q8, Format::Q4];

    /// Channels of one word.
    pub fn per_word(self) -> usize {
        match self {
            Format::F32 => 1,
            Format::F16 => 2,
            Format::Q8 => 4,
            Format::Q4 => 8,
        }
    }

    /// Whether channels share scales.
    pub fn is_scaled(self) -> bool {
        matches!(self, Format::Q8 | Format::Q4)
    }
}

/// How the rows of a sequence lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Placement {
    Contiguous,
    Ring,
    Paged,
}

impl Placement {
    pub const ALL: [Placement; 3] = [Placement::Contiguous, Placement::Ring, Placement::Paged];
}

/// What of a cache changes the text of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cached {
    pub format: Format,
    pub placement: Placement,
    /// Channels of a key, of a value, that share a scale.
    pub groups: [u32; 2],
}

/// Words of the book that a sequence has, as in the shader.
pub(crate) const WORDS: usize = 8;
pub(crate) const START: usize = 0;
pub(crate) const LENGTH: usize = 1;
pub(crate) const HIGH: usize = 2;
pub(crate) const LIMIT: usize = 3;
pub(crate) const REFUSED: usize = 4;
pub(crate) const COUNT: usize = 5;

params! {
    /// The WGSL `CacheParams`.
    #[derive(Default)]
    pub(crate) struct CacheParams {
        batch: u32,
        kv_heads: u32,
        page_len: u32,
        page_bits: u32,
        table: u32,
        pages_each: u32,
        sinks: u32,
        window: u32,
        ragged: u32,
        k_words: u32,
        v_words: u32,
        k_groups: u32,
        v_groups: u32,
        k_scales: u32,
        v_scales: u32,
        longest: u32,
        pages: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}
shared! { CacheParams = "CacheParams" }

impl Cached {
    /// The constants of `shared/cache.wgsl`.
    pub fn placed(&self) -> Constant {
        Constant::U32("LAYOUT", self.placement as u32)
    }

    /// The constants of `shared/keys_cache.wgsl`.
    pub fn constants(&self) -> [Constant; 4] {
        let [k, v] = self.groups;
        let format = Constant::U32("FORMAT", self.format as u32);
        [self.placed(), format, Constant::U32("K_GROUP", k), Constant::U32("V_GROUP", v)]
    }

    pub fn book() -> Binding {
        Binding::read("book", DType::U32, Width::One)
    }

    /// Keys, values, book.
    pub fn bindings() -> [Binding; 3] {
        let of = |name| Binding::read(name, DType::U32, Width::Four);
        [of("cache_k"), of("cache_v"), Self::book()]
    }

    /// Every format and every placement.
    pub fn all() -> impl Iterator<Item = Self> {
        let groups = |format: Format| if format.is_scaled() { [32, 64] } else { [1; 2] };
        let of = move |format, placement| Cached { format, placement, groups: groups(format) };
        let formats = Format::ALL.into_iter().map(move |format| of(format, Placement::Contiguous));
        formats.chain(Placement::ALL.into_iter().map(move |placement| of(Format::Q8, placement)))
    }
}
