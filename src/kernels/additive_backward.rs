//! Twin of `additive_backward.wgsl`.

use super::{FLOATS, WIDTHS, mask, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::GradientsOf;
use crate::tensor::DType;

/// What changes the text of the gradients of additive scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AdditiveBackward {
    /// Whether it runs for a software driver.
    pub cpu: bool,
    /// Never of keys and values at once.
    pub of: GradientsOf,
    /// Invocations of a workgroup that have rows beside each other.
    pub row_lanes: u32,
    /// Of own rows and others.
    pub own: DType,
    /// Whether others load in fours.
    pub width: Width,
    pub score_vector: DType,
    pub gradient: DType,
    /// Whether the own rows' gradient is wanted.
    pub owns: bool,
    /// Whether it stores in fours.
    pub store: Width,
    /// Whether the vector's gradient is.
    pub parts: bool,
    /// Only what bounds the range of keys, of queries' gradients.
    pub range: mask::MaskVariant,
}

/// Vectors of four channels that an invocation has.
pub(crate) const VECTORS: u32 = 2;

params! {
    pub(crate) struct Params {
        own: View,
        others: View,
        pairs: View,
        score_vector: View,
        gradient: View,
        mask: mask::MaskParams,
        first: [u32; 4],
        end: [u32; 4],
        heads: u32,
        kv_heads: u32,
        group: u32,
        channels: u32,
        accumulates: u32,
        parts: u32,
        vector_heads: u32,
        pad: u32,
    }
}

const NO_OWN: &str = "fn gradient_at(o: u32) -> f32 { return 0.0; }
fn gradient_at4(o: u32, stride: u32, n: u32) -> vec4<f32> { return vec4<f32>(); }
fn gradient_store(o: u32, x: f32) {}
fn gradient_store4(o: u32, x: vec4<f32>) {}
";
const NO_PARTS: &str = "fn parts_store(o: u32, x: f32) {}\n";
const OF_VALUES: &str = "fn own_at4(o: u32, stride: u32, n: u32) -> vec4<f32> { return vec4<f32>(); }
fn score_vector_at4(o: u32, stride: u32, n: u32) -> vec4<f32> { return vec4<f32>(); }
";

impl AdditiveBackward {
    /// Invocations of a workgroup: of a software driver as many as it may compute at once.
    pub const fn workgroup(cpu: bool) -> u32 {
        if cpu { 16 } else { 64 }
    }

    /// Those that have rows beside each other: all, unless there are fewer of `rows`.
    pub fn row_lanes(rows: usize, cpu: bool) -> u32 {
        rows.next_power_of_two().min(Self::workgroup(cpu) as usize) as u32
    }

    /// Channels of a workgroup.
    pub fn channels(&self) -> usize {
        (Self::workgroup(self.cpu) / self.row_lanes * VECTORS * 4) as usize
    }

    pub fn describe(&self) -> Kernel {
        let scores = self.of.scores();
        let mut bindings = Vec::new();
        if scores {
            bindings.push(Binding::read("own", self.own, Width::One));
        }
        bindings.push(Binding::read("others", self.own, self.width));
        bindings.push(Binding::read("pairs", DType::F32, Width::One));
        if scores {
            bindings.push(Binding::read("score_vector", self.score_vector, Width::One));
        }
        if self.owns {
            bindings.push(Binding::write("gradient", self.gradient, self.store));
        }
        if self.parts {
            bindings.push(Binding::write("parts", DType::F32, Width::One));
        }
        bindings.extend(self.range.bindings());
        let workgroup = Self::workgroup(self.cpu);
        let constants = [
            Constant::Bool("OF_QUERIES", self.of == GradientsOf::Queries),
            Constant::Bool("OF_KEYS", self.of == GradientsOf::Keys),
            Constant::Bool("OWN", self.owns),
            Constant::Bool("HAS_PARTS", self.parts),
            Constant::Bool("STORE_IN_FOURS", self.store == Width::Four),
            Constant::U32("WORKGROUP", workgroup),
            Constant::U32("ROW_LANES", self.row_lanes),
            Constant::U32("VECTORS", VECTORS),
        ];
        let mut parts = vec![shader!("tensor/view"), shader!("additive_backward"), shader!("additive/tanh")];
        parts.extend((!self.owns).then_some(NO_OWN));
        parts.extend((!self.parts).then_some(NO_PARTS));
        parts.extend((!scores).then_some(OF_VALUES));
        let mask = self.range.wgsl();
        parts.push(&mask);
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, workgroup);
        Kernel { workgroup_memory: 16 * workgroup, ..kernel }
    }

    pub fn all() -> Vec<Self> {
        let of = |cpu, of, row_lanes, own| AdditiveBackward {
            cpu,
            of,
            row_lanes,
            own,
            width: Width::Four,
            score_vector: own,
            gradient: own,
            owns: true,
            store: Width::Four,
            parts: of == GradientsOf::Queries,
            range: mask::MaskVariant::default(),
        };
        let mut all = Vec::new();
        for kind in [GradientsOf::Queries, GradientsOf::Keys, GradientsOf::Values] {
            for cpu in [false, true] {
                let most = Self::workgroup(cpu);
                for own in FLOATS {
                    let plain = of(cpu, kind, most, own);
                    all.extend(WIDTHS.map(|width| AdditiveBackward { width, ..plain }));
                    all.extend([AdditiveBackward { store: Width::One, gradient: DType::F32, ..plain }]);
                }
                all.push(of(cpu, kind, 1, DType::F32));
            }
        }
        let queries = of(false, GradientsOf::Queries, 64, DType::F32);
        all.push(AdditiveBackward { owns: false, ..queries });
        all.push(AdditiveBackward { parts: false, ..queries });
        let ranges = mask::MaskVariant::all().into_iter().map(mask::MaskVariant::range_only);
        all.extend(ranges.map(|range| AdditiveBackward { range, ..queries }));
        all.retain(|kernel| kernel.range.bindings().len() <= 2);
        all
    }
}
