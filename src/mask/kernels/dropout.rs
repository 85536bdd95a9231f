//! Dropout as WGSL: the text that a call uses, and its numbers.

use crate::device::DeviceFacts;
use crate::kernel::{
    Binding, Constant, Declared, Field, Group, GroupKey, Shared, Table, View, Width, params, shader,
};
use crate::mask::Dropout;
use crate::tensor::{DType, TensorView, Window, broadcast};

/// The source of the decision to drop a weight.
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
            DropoutKind::None => shader!("mask/dropout/none"),
            DropoutKind::Seeded => shader!("mask/dropout/seeded"),
            DropoutKind::Given => shader!("mask/dropout/given"),
        }
    }
}

impl GroupKey for DropoutKind {
    fn declare(&self, to: &mut Declared) {
        to.constants.push(Constant::Bool("HAS_DROPOUT", *self != DropoutKind::None));
        to.bindings.extend(self.binding());
        to.add_text(self.wgsl());
    }
}

params! {
    /// The parameters of kernels with dropout.
    pub(crate) struct DropoutParams {
        dropout: View,
        seed: [u32; 2],
        dropout_threshold: u32,
        dropout_scale: f32,
    }
}

impl Shared for DropoutParams {
    const WGSL: &'static str = "DropoutParams";
    const MEMBERS: &'static [Field] = Self::FIELDS;
}

/// The dropout of a call.
#[derive(Clone, Copy)]
pub(crate) struct Dropped<'a> {
    kind: DropoutKind,
    pub keep: Option<Window<'a>>,
    pub params: DropoutParams,
}

impl<'a> Dropped<'a> {
    pub fn new(dropout: Option<&Dropout<TensorView<'a>>>, device: &DeviceFacts) -> Self {
        let keep = dropout.and_then(Dropout::given).map(|t| t.window(device));
        let seed = dropout.map_or(0, Dropout::seed);
        Dropped {
            kind: DropoutKind::of(dropout),
            keep,
            params: DropoutParams {
                dropout: keep.map_or(View::default(), |w| View::from(broadcast(w.layout))),
                seed: [seed as u32, (seed >> 32) as u32],
                dropout_threshold: dropout.map_or(0, Dropout::threshold),
                dropout_scale: dropout.map_or(1.0, Dropout::factor),
            },
        }
    }
}

impl<'a> Group<'a> for Dropped<'a> {
    type Key = DropoutKind;
    type Uniform = DropoutParams;

    fn key(&self) -> DropoutKind {
        self.kind
    }

    fn uniform(&self) -> DropoutParams {
        self.params
    }

    fn windows(&self) -> Vec<Window<'a>> {
        self.keep.into_iter().collect()
    }
}
