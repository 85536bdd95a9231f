//! Twin of `linear_map_backward.wgsl`.

use super::linear::{Params, Randoms};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, Width};
use crate::tensor::DType;

/// What changes the text of the gradients of random features.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearMapBackward {
    pub kind: Randoms,
    pub rows: DType,
}

pub(crate) const WORKGROUP: usize = 64;

const ANGLE: &str = "fn angle_of(b: u32, h: u32, i: u32, n: u32) -> f32 {
    var product = 0.0;
    for (var d = 0u; d < p.head_dim; d++) {
        product += rows_at(view_at(p.q, b, h, i, d)) * directions_at(view_at(p.k, 0u, h / p.group, n, d));
    }
    return product;
}
";
const NO_ANGLE: &str = "fn angle_of(b: u32, h: u32, i: u32, n: u32) -> f32 { return 0.0; }\n";

impl LinearMapBackward {
    pub fn describe(&self) -> Kernel {
        let is_unit = self.kind == Randoms::Fourier;
        let mut bindings = vec![
            Binding::read("rows", self.rows, Width::One),
            Binding::read("features", DType::F32, Width::One),
        ];
        bindings.extend(is_unit.then(|| Binding::read("directions", DType::F32, Width::One)));
        bindings.push(Binding::write("d_features", DType::F32, Width::One));
        let sign = match self.kind {
            Randoms::Positive | Randoms::Hyperbolic => "-1.0",
            Randoms::Trigonometric => "1.0",
            _ => "0.0",
        };
        let constants = [
            Constant::U32("WORKGROUP", WORKGROUP as u32),
            Constant::Bool("IS_UNIT", is_unit),
            Constant::Bool("HAS_LENGTH", sign != "0.0"),
        ];
        let sign = format!("const LENGTH_SIGN: f32 = {sign};\n");
        let parts = [
            shader!("tensor/view"),
            shader!("linear/params"),
            shader!("linear/random"),
            shader!("linear_map_backward"),
            &sign,
            self.kind.gradient(),
            if is_unit { ANGLE } else { NO_ANGLE },
        ];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        Randoms::ALL
            .into_iter()
            .flat_map(|kind| super::FLOATS.into_iter().map(move |rows| LinearMapBackward { kind, rows }))
    }
}
