//! Twin of `cache_reorder.wgsl`.

use super::cache::{CacheParams, CacheVariant};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, Width, params};
use crate::storage::LayoutKind;
use crate::tensor::DType;

/// The moves of whole sequences: one text, since rows of a ring lie as those of a contiguous cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CacheReorder;

params! {
    pub(crate) struct Params {
        cache: CacheParams,
        words: u32,
        groups: u32,
        scales: u32,
        pad0: u32,
    }
}

impl CacheReorder {
    pub fn describe(&self) -> Kernel {
        let rows = Binding::write("rows", DType::U32, Width::One);
        let constants = [Constant::U32("LAYOUT_KIND", LayoutKind::Contiguous as u32)];
        let parts = [shader!("cache/params"), shader!("cache/sequence_table"), shader!("cache_reorder")];
        Kernel::new::<Params>(&constants, vec![rows, CacheVariant::sequence_table()], &parts, 64)
    }

    pub fn all() -> [Self; 1] {
        [CacheReorder]
    }
}
