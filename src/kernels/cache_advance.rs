//! Twin of `cache_advance.wgsl`.

use super::cache::{CacheParams, Cached, Placement};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// Where it stands how far a sequence moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Counts {
    All,
    Each,
    Device,
}

/// What changes the text of the kernel that moves lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CacheAdvance {
    pub counts: Counts,
    pub placement: Placement,
}

params! {
    pub(crate) struct Params {
        counts: View,
        cache: CacheParams,
        rows: u32,
        back: u32,
        pad0: u32,
        pad1: u32,
    }
}

impl CacheAdvance {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![Binding { access: crate::tensor::Access::Write, ..Cached::book() }];
        let counts = if self.counts == Counts::Device {
            bindings.push(Binding::read("counts", DType::U32, Width::One));
            ""
        } else {
            "fn counts_at(o: u32) -> u32 { return 0u; }\n"
        };
        let constants =
            [Constant::U32("LAYOUT", self.placement as u32), Constant::U32("COUNTS", self.counts as u32)];
        let parts = [
            shader!("shared/view"),
            shader!("shared/cache_params"),
            shader!("shared/cache"),
            shader!("cache_advance"),
            counts,
        ];
        Kernel::new::<Params>(&constants, bindings, &parts, 64)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        Placement::ALL.into_iter().flat_map(|placement| {
            [Counts::All, Counts::Each, Counts::Device].map(|counts| CacheAdvance { counts, placement })
        })
    }
}
