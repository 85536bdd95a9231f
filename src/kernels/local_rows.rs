//! Twin of `local_rows.wgsl`.

use super::local::{WORKGROUP, WindowSums};
use super::shader;
use crate::kernel::{Constant, Kernel, View, Width, params};

/// What changes the text of the sums over keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LocalRows(pub WindowSums);

params! {
    pub(crate) struct Params {
        band: View,
        x: View,
        positions: View,
        lengths: View,
        y: View,
        kv_len: u32,
        dim: u32,
        group: u32,
        half_window: i32,
        fours: u32,
        work: u32,
        step: u32,
        pad: u32,
    }
}

impl LocalRows {
    pub fn describe(&self) -> Kernel {
        let (bindings, lengths) = self.0.bindings();
        let constants = [
            Constant::U32("WORKGROUP", WORKGROUP as u32),
            Constant::Bool("ACCUMULATES", self.0.accumulates),
            Constant::Bool("IN_FOURS", self.0.width == Width::Four),
        ];
        let parts = [
            shader!("tensor/view"),
            shader!("local_rows"),
            shader!("local/reach"),
            shader!("local/store"),
            lengths,
        ];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        WindowSums::all().map(LocalRows)
    }
}
