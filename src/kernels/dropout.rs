//! Dropout as WGSL: the part a call uses, and its numbers.

use super::shader;
use crate::device::DeviceFacts;
use crate::dropout::Dropout;
use crate::kernel::{Binding, View, Width};
use crate::tensor::{DType, TensorView, Window, broadcast};

/// Where the decision to drop a weight comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DropoutKind {
    None,
    Seeded,
    Given,
}

impl DropoutKind {
    pub const ALL: [DropoutKind; 3] = [DropoutKind::None, DropoutKind::Seeded, DropoutKind::Given];

    pub fn of<K>(dropout: Option<&Dropout<K>>) -> Self {
        match dropout {
            None => DropoutKind::None,
            Some(Dropout::Seeded { .. }) => DropoutKind::Seeded,
            Some(Dropout::Given { .. }) => DropoutKind::Given,
        }
    }

    pub fn binding(self) -> Option<Binding> {
        (self == DropoutKind::Given).then(|| Binding::read("dropout", DType::Bool, Width::One))
    }

    pub fn wgsl(self) -> &'static str {
        match self {
            DropoutKind::None => shader!("dropout/none"),
            DropoutKind::Seeded => shader!("dropout/seeded"),
            DropoutKind::Given => shader!("dropout/given"),
        }
    }
}

/// What kernels with dropout have in their parameters.
pub(crate) struct DropoutParams<'a> {
    pub keep: Option<Window<'a>>,
    pub view: View,
    pub seed: [u32; 2],
    pub threshold: u32,
    pub scale: f32,
}

impl<'a> DropoutParams<'a> {
    pub fn new(dropout: Option<&Dropout<TensorView<'a>>>, device: &DeviceFacts) -> Self {
        let keep = dropout.and_then(Dropout::given).map(|t| t.window(device));
        let seed = dropout.map_or(0, Dropout::seed);
        DropoutParams {
            keep,
            view: keep.map_or(View::default(), |w| View::from(broadcast(w.layout))),
            seed: [seed as u32, (seed >> 32) as u32],
            threshold: dropout.map_or(0, Dropout::threshold),
            scale: dropout.map_or(1.0, Dropout::factor),
        }
    }
}
