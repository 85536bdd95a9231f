//! Twin of `additive_scores.wgsl`.

use crate::device::family::STAGED;
use crate::device::{DeviceFacts, Families};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, families, kernel, shader};
use crate::mask::kernels::{MaskVariant, Masked};
use crate::tensor::DType;

kernel! {
    /// The kernel of additive scores.
    AdditiveScores, AdditiveScoresCall
    tensors {
        // The kernel loads q and k as vec4 along their channels.
        q: One Read F32 width view,
        k: One Read F32 width view,
        score_vector: One Read F32 one repeating,
        scores: Placed Write F32 one view,
    }
    // Only the rules that bound the range of keys.
    groups { mask: Masked MaskVariant, }
    numbers {
        /// Batch entry, query and key of the first score. `end` is past the last score.
        first: [u32; 4],
        end: [u32; 4],
        heads: u32,
        group: u32,
        hidden: u32,
    }
    variant {
        /// True if the kernel runs on a software driver.
        cpu: bool,
        /// The number of invocations that share a query.
        key_lanes: u32,
        width: Width,
    }
}

/// The number of keys of an invocation.
pub(crate) const KEYS: u32 = 8;

/// Returns `range` if the device can bind its tensors together with the other tensors. Otherwise
/// returns no rules, and the kernel computes more scores.
pub(crate) fn fitting(range: MaskVariant, others: usize, device: &DeviceFacts) -> MaskVariant {
    let fits = others + range.bindings().len() <= device.max_storage_buffers as usize;
    if fits { range } else { MaskVariant::default() }
}

impl Variant for AdditiveScores {
    const LABEL: &'static str = "attention.additive_scores";

    fn describe(&self) -> Kernel {
        let workgroup = Self::workgroup(self.cpu);
        let parts = [
            shader!("tensor/view"),
            shader!("attention/additive_scores"),
            shader!("additive/tanh"),
            &self.mask.wgsl(),
        ];
        self.declare()
            .u32("WORKGROUP", workgroup)
            .u32("KEY_LANES", self.key_lanes)
            .u32("KEYS", KEYS)
            .kernel(&parts, workgroup, 0)
    }

    fn families(&self) -> Families {
        families(&[Some(STAGED.of(self.cpu))], &[self.q, self.k, self.score_vector])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |cpu, key_lanes, dtype, width| AdditiveScores {
            cpu,
            key_lanes,
            q: dtype,
            k: dtype,
            scores: DType::F32,
            width,
            score_vector: dtype,
            mask: MaskVariant::default(),
        };
        let plain = [false, true].into_iter().flat_map(move |cpu| {
            [1, Self::workgroup(cpu)].into_iter().flat_map(move |key_lanes| {
                FLOATS
                    .into_iter()
                    .flat_map(move |dtype| WIDTHS.map(move |width| of(cpu, key_lanes, dtype, width)))
            })
        });
        let ranges = MaskVariant::all().into_iter().map(MaskVariant::range_only);
        let masked = ranges.map(move |mask| AdditiveScores { mask, ..of(false, 1, DType::F32, Width::Four) });
        plain.chain(masked)
    }
}

impl AdditiveScores {
    /// The invocations of a workgroup. A software driver can compute 16 at once.
    pub const fn workgroup(cpu: bool) -> u32 {
        if cpu { 16 } else { 64 }
    }

    /// The invocations that share a query. A single query uses the whole workgroup.
    pub fn key_lanes(queries: usize, cpu: bool) -> u32 {
        let most = Self::workgroup(cpu);
        most / queries.next_power_of_two().min(most as usize) as u32
    }

    /// The queries and keys of a workgroup.
    pub fn tile(cpu: bool, key_lanes: u32) -> [usize; 2] {
        [Self::workgroup(cpu) / key_lanes, key_lanes * KEYS].map(|n| n as usize)
    }
}
