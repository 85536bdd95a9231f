//! Twin of `additive_backward.wgsl`.

use crate::attention::plan::GradientsOf;
use crate::device::Families;
use crate::device::family::GRADIENTS;
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, families, kernel, shader};
use crate::mask::kernels::{MaskVariant, Masked};
use crate::tensor::DType;

kernel! {
    /// The gradients of queries and the score vector, of keys, or of values.
    AdditiveBackward, AdditiveBackwardCall
    tensors {
        // The rows whose gradient is computed; for queries and keys only.
        own: Opt Read F32 one view,
        others: One Read F32 width view,
        pairs: Placed Read F32 one view,
        // For queries and keys only.
        score_vector: Opt Read F32 one repeating,
        // The gradient of the rows in `own`, or of values.
        gradient: Opt Write F32 store view,
        // Parts of the gradient of the vector.
        parts: Opt Write F32 one,
    }
    // The rules that bound the range of keys, for the gradients of queries only.
    groups { mask: Masked MaskVariant, }
    numbers {
        /// Batch entry, query and key of the first pair of the rectangle.
        first: [u32; 4],
        /// Batch entry, query and key past the last pair of the rectangle.
        end: [u32; 4],
        heads: u32,
        kv_heads: u32,
        group: u32,
        channels: u32,
        /// 1 if the gradients are added to the contents of their tensors.
        accumulates: u32,
        /// Parts of an element of the gradient of the vector.
        part_count: u32,
        /// 1 if all heads share a vector.
        vector_heads: u32,
    }
    variant {
        /// True if the kernel runs for a software driver.
        cpu: bool,
        /// Queries, keys or values.
        of: GradientsOf,
        /// Invocations of a workgroup with neighbouring rows.
        row_lanes: u32,
        width: Width,
        store: Width,
    }
}

/// Vec4s of channels that an invocation computes.
pub(crate) const VECTORS: u32 = 2;

impl Variant for AdditiveBackward {
    const LABEL: &'static str = "attention.additive_backward";

    fn describe(&self) -> Kernel {
        let workgroup = Self::workgroup(self.cpu);
        let mask = self.mask.wgsl();
        let parts =
            [shader!("tensor/view"), shader!("additive/additive_backward"), shader!("additive/tanh"), &mask];
        self.declare()
            .bool("OF_QUERIES", self.of == GradientsOf::Queries)
            .bool("OF_KEYS", self.of == GradientsOf::Keys)
            .bool("STORE_IN_FOURS", self.store == Width::Four)
            .u32("WORKGROUP", workgroup)
            .u32("ROW_LANES", self.row_lanes)
            .u32("VECTORS", VECTORS)
            .kernel(&parts, workgroup, 16 * workgroup)
    }

    fn families(&self) -> Families {
        let tensors = [Some(self.others), self.score_vector, self.gradient];
        families(&[Some(GRADIENTS.of(self.cpu))], &tensors.map(|t| t.unwrap_or(DType::F32)))
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |cpu, of: GradientsOf, row_lanes, dtype| AdditiveBackward {
            own: of.scores().then_some(dtype),
            others: dtype,
            pairs: DType::F32,
            score_vector: of.scores().then_some(dtype),
            gradient: Some(dtype),
            parts: (of == GradientsOf::Queries).then_some(DType::F32),
            mask: MaskVariant::default(),
            cpu,
            of,
            row_lanes,
            width: Width::Four,
            store: Width::Four,
        };
        let mut all = Vec::new();
        for kind in [GradientsOf::Queries, GradientsOf::Keys, GradientsOf::Values] {
            for cpu in [false, true] {
                let most = Self::workgroup(cpu);
                for dtype in FLOATS {
                    let plain = of(cpu, kind, most, dtype);
                    all.extend(WIDTHS.map(|width| AdditiveBackward { width, ..plain }));
                    let gradient = Some(DType::F32);
                    all.extend([AdditiveBackward { store: Width::One, gradient, ..plain }]);
                }
                all.push(of(cpu, kind, 1, DType::F32));
            }
        }
        let queries = of(false, GradientsOf::Queries, 64, DType::F32);
        all.push(AdditiveBackward { gradient: None, ..queries });
        all.push(AdditiveBackward { parts: None, ..queries });
        let ranges = MaskVariant::all().into_iter().map(MaskVariant::range_only);
        all.extend(ranges.map(|mask| AdditiveBackward { mask, ..queries }));
        all.retain(|kernel| kernel.mask.bindings().len() <= 2);
        all
    }
}

impl AdditiveBackward {
    /// Returns the invocations of a workgroup. A software driver gets as many as it can compute at
    /// once.
    pub const fn workgroup(cpu: bool) -> u32 {
        if cpu { 16 } else { 64 }
    }

    /// Returns the invocations with neighbouring rows: the whole workgroup, unless there are fewer
    /// `rows`.
    pub fn row_lanes(rows: usize, cpu: bool) -> u32 {
        rows.next_power_of_two().min(Self::workgroup(cpu) as usize) as u32
    }

    /// Returns the channels of a workgroup.
    pub fn channels(cpu: bool, row_lanes: u32) -> usize {
        (Self::workgroup(cpu) / row_lanes * VECTORS * 4) as usize
    }
}
