//! Twin of `lsh_gradients.wgsl`.

use super::lsh_gather::{CONSTANTS, WORKGROUP};
use super::lsh_hash::lengths;
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the gradients of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LshGradients {
    /// The rows themselves, of queries that are keys too once they are divided by their length; of values none.
    pub x: Option<DType>,
    pub d_x: DType,
    /// Whether sequences have lengths.
    pub lengths: bool,
    /// Whether gradients are added to what is there.
    pub accumulates: bool,
}

const OF_QUERIES: &str =
    "fn x_of(b: u32, h: u32, i: u32, d: u32) -> f32 { return x_at(view_at(p.x, b, h, i, d)); }\n";
const OF_VALUES: &str = "fn x_of(b: u32, h: u32, i: u32, d: u32) -> f32 { return 0.0; }\n\
     fn d_queries_at(o: u32) -> f32 { return 0.0; }\n";

params! {
    pub(crate) struct Params {
        d_keys: View,
        d_queries: View,
        x: View,
        d_x: View,
        ranks: View,
        lengths: View,
        rounds: u32,
        length: u32,
        chunk: u32,
        ahead: u32,
        dim: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl LshGradients {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![Binding::read("d_keys", DType::F32, Width::One)];
        if let Some(x) = self.x {
            bindings.push(Binding::read("d_queries", DType::F32, Width::One));
            bindings.push(Binding::read("x", x, Width::One));
        }
        bindings.push(Binding::read("ranks", DType::U32, Width::One));
        let lengths = lengths(self.lengths, &mut bindings);
        bindings.push(Binding::write("d_x", self.d_x, Width::One));
        let [rows, lanes] = CONSTANTS;
        let constants = [
            rows,
            lanes,
            Constant::Bool("NORMALISES", self.x.is_some()),
            Constant::Bool("ACCUMULATES", self.accumulates),
        ];
        let of = if self.x.is_some() { OF_QUERIES } else { OF_VALUES };
        let parts = [shader!("tensor/view"), shader!("lsh_gradients"), lengths, of];
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32);
        Kernel { workgroup_memory: (4 * WORKGROUP * size_of::<f32>()) as u32, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS_OR_NONE.into_iter().flat_map(|x| {
            super::FLOATS.into_iter().flat_map(move |d_x| {
                [[false; 2], [false, true], [true, false], [true; 2]]
                    .into_iter()
                    .map(move |[lengths, accumulates]| LshGradients { x, d_x, lengths, accumulates })
            })
        })
    }
}
