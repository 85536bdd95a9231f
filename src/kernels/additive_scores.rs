//! Twin of `additive_scores.wgsl`.

use super::{FLOATS, WIDTHS, mask, shader};
use crate::device::DeviceFacts;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the kernel of additive scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AdditiveScores {
    /// Whether it runs for a software driver.
    pub cpu: bool,
    /// Invocations that share a query.
    pub key_lanes: u32,
    /// Of q and k.
    pub dtype: DType,
    /// Whether q and k load in fours along their channels.
    pub width: Width,
    pub score_vector: DType,
    /// Only the parts that bound the range of keys.
    pub range: mask::MaskVariant,
}

/// Keys of an invocation.
pub(crate) const KEYS: u32 = 8;

params! {
    pub(crate) struct Params {
        q: View,
        k: View,
        score_vector: View,
        scores: View,
        mask: mask::MaskParams,
        first: [u32; 4],
        end: [u32; 4],
        heads: u32,
        group: u32,
        hidden: u32,
        pad: u32,
    }
}

/// `range`, if the device binds its tensors beside so many others; without it more is computed.
pub(crate) fn fitting(range: mask::MaskVariant, others: usize, device: &DeviceFacts) -> mask::MaskVariant {
    let fits = others + range.bindings().len() <= device.max_storage_buffers as usize;
    if fits { range } else { mask::MaskVariant::default() }
}

impl AdditiveScores {
    /// Invocations of a workgroup: of a software driver as many as it may compute at once.
    pub const fn workgroup(cpu: bool) -> u32 {
        if cpu { 16 } else { 64 }
    }

    /// Those that share each of `queries`: all, of one.
    pub fn key_lanes(queries: usize, cpu: bool) -> u32 {
        let most = Self::workgroup(cpu);
        most / queries.next_power_of_two().min(most as usize) as u32
    }

    /// Queries and keys of a workgroup.
    pub fn tile(&self) -> [usize; 2] {
        [Self::workgroup(self.cpu) / self.key_lanes, self.key_lanes * KEYS].map(|n| n as usize)
    }

    pub fn describe(&self) -> Kernel {
        let workgroup = Self::workgroup(self.cpu);
        let mut bindings = vec![
            Binding::read("q", self.dtype, self.width),
            Binding::read("k", self.dtype, self.width),
            Binding::read("score_vector", self.score_vector, Width::One),
            Binding::write("scores", DType::F32, Width::One),
        ];
        bindings.extend(self.range.bindings());
        let constants = [
            Constant::U32("WORKGROUP", workgroup),
            Constant::U32("KEY_LANES", self.key_lanes),
            Constant::U32("KEYS", KEYS),
        ];
        let parts = [
            shader!("tensor/view"),
            shader!("additive_scores"),
            shader!("additive/tanh"),
            &self.range.wgsl(),
        ];
        Kernel::new::<Params>(&constants, bindings, &parts, workgroup)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let of = |cpu, key_lanes, dtype, width| AdditiveScores {
            cpu,
            key_lanes,
            dtype,
            width,
            score_vector: dtype,
            range: mask::MaskVariant::default(),
        };
        let plain = [false, true].into_iter().flat_map(move |cpu| {
            [1, Self::workgroup(cpu)].into_iter().flat_map(move |key_lanes| {
                FLOATS
                    .into_iter()
                    .flat_map(move |dtype| WIDTHS.map(move |width| of(cpu, key_lanes, dtype, width)))
            })
        });
        let ranges = mask::MaskVariant::all().into_iter().map(mask::MaskVariant::range_only);
        let masked =
            ranges.map(move |range| AdditiveScores { range, ..of(false, 1, DType::F32, Width::Four) });
        plain.chain(masked)
    }
}
