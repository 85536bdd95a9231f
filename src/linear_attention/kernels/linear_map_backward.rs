//! The host side of `linear_map_backward.wgsl`.

use super::linear::{LinearNumbers, Randoms};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradients of random features.
    LinearMapBackward, LinearMapBackwardCall
    tensors {
        rows: One Read F32 one view,
        row_features: One Read F32 one view,
        // Present if rows are divided by their length.
        directions: Opt Read F32 one view,
        d_features: One Write F32 one view,
    }
    numbers {
        numbers: LinearNumbers,
    }
    variant {
        kind: Randoms,
    }
}

pub(crate) const WORKGROUP: usize = 64;

const ANGLE: &str = "fn angle_of(b: u32, h: u32, i: u32, n: u32) -> f32 {
    var product = 0.0;
    for (var d = 0u; d < p.head_dim; d++) {
        product += rows_at(view_at(p.rows, b, h, i, d)) * directions_at(view_at(p.directions, 0u, h / p.group, n, d));
    }
    return product;
}
";
const NO_ANGLE: &str = "fn angle_of(b: u32, h: u32, i: u32, n: u32) -> f32 { return 0.0; }\n";

impl Variant for LinearMapBackward {
    const LABEL: &'static str = "attention.linear_map_backward";
    const FAMILIES: Families = Families::of(Family::LinearGradients);

    fn describe(&self) -> Kernel {
        let sign = match self.kind {
            Randoms::Positive | Randoms::Hyperbolic => "-1.0",
            Randoms::Trigonometric => "1.0",
            _ => "0.0",
        };
        let length_sign = format!("const LENGTH_SIGN: f32 = {sign};\n");
        let is_unit = self.directions.is_some();
        let parts = [
            shader!("tensor/view"),
            shader!("linear_attention/random"),
            shader!("linear_attention/linear_map_backward"),
            &length_sign,
            self.kind.gradient(),
            if is_unit { ANGLE } else { NO_ANGLE },
        ];
        self.declare()
            .u32("WORKGROUP", WORKGROUP as u32)
            .bool("IS_UNIT", is_unit)
            .bool("HAS_LENGTH", sign != "0.0")
            .kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        Randoms::ALL.into_iter().flat_map(|kind| {
            FLOATS.into_iter().map(move |rows| LinearMapBackward {
                rows,
                row_features: DType::F32,
                directions: (kind == Randoms::Fourier).then_some(DType::F32),
                d_features: DType::F32,
                kind,
            })
        })
    }
}
