//! The host side of `linear_prefix.wgsl`.

use super::linear::{LinearForm, LinearNumbers, Pieces};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The running sums of states.
    LinearPrefix, LinearPrefixCall
    tensors {
        states: Opt Write F32 four,
        carry: Opt Write F32 four,
        chunks: Opt Read U32 one,
    }
    numbers {
        numbers: LinearNumbers,
    }
    variant {
        form: LinearForm,
        /// True if the sums go from the last chunk of query rows to the first, for gradients.
        /// Otherwise they go from the first chunk of keys to the last.
        reverse: bool,
    }
}

impl Variant for LinearPrefix {
    const LABEL: &'static str = "attention.linear_prefix";
    const FAMILIES: Families = Families::of(Family::LinearAttention);

    fn describe(&self) -> Kernel {
        Pieces::new(self.form, Width::Four, self.declare())
            .bool("IS_REVERSE", self.reverse)
            .chunks(None, if self.reverse { "p.q_len" } else { "p.kv_len" })
            .text(shader!("linear_attention/linear_prefix"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        LinearForm::all().flat_map(|(form, _)| {
            [false, true].map(|reverse| LinearPrefix {
                states: Some(DType::F32),
                carry: Some(DType::F32),
                chunks: form.chunks(),
                form,
                reverse,
            })
        })
    }
}
