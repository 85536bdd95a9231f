//! Twin of `cache_copy.wgsl`.

use super::shader;
use crate::kernel::{Binding, Kernel, Width, params};
use crate::tensor::DType;

/// The copy of a page; it has one text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CacheCopy;

params! {
    pub(crate) struct Params {
        src: u32,
        dst: u32,
        slots: u32,
        page_len: u32,
        kv_heads: u32,
        words: u32,
        groups: u32,
        scales: u32,
    }
}

impl CacheCopy {
    pub fn describe(&self) -> Kernel {
        let bindings = vec![Binding::write("rows", DType::U32, Width::One)];
        Kernel::new::<Params>(&[], bindings, &[shader!("cache_copy")], 64)
    }

    pub fn all() -> [Self; 1] {
        [CacheCopy]
    }
}
