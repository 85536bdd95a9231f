//! Twin of `cache_advance.wgsl`.

use super::cache::{CacheParams, CacheVariant};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::storage::LayoutKind;
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
    pub layout_kind: LayoutKind,
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
        let mut bindings =
            vec![Binding { access: crate::tensor::Access::Write, ..CacheVariant::sequence_table() }];
        let counts = if self.counts == Counts::Device {
            bindings.push(Binding::read("counts", DType::U32, Width::One));
            ""
        } else {
            "fn counts_at(o: u32) -> u32 { return 0u; }\n"
        };
        let constants = [
            Constant::U32("LAYOUT_KIND", self.layout_kind as u32),
            Constant::U32("COUNTS", self.counts as u32),
        ];
        let parts = [
            shader!("tensor/view"),
            shader!("cache/params"),
            shader!("cache/sequence_table"),
            shader!("cache_advance"),
            counts,
        ];
        Kernel::new::<Params>(&constants, bindings, &parts, 64)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        LayoutKind::ALL.into_iter().flat_map(|layout_kind| {
            [Counts::All, Counts::Each, Counts::Device].map(|counts| CacheAdvance { counts, layout_kind })
        })
    }
}
