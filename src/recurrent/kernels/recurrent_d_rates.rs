//! The host side of `recurrent_d_rates.wgsl`.

use super::numbers::{Pieces, RecurrentForm, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradients of decays and of β.
    RecurrentDRates, RecurrentDRatesCall
    tensors {
        chunks: One Read U32 one,
        memory: One Read F32 four,
        d_decay: Opt Write F32 one view,
        d_beta: Opt Write F32 one view,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        form: RecurrentForm,
    }
}

/// The invocations of a workgroup: at least the rows of a chunk.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for RecurrentDRates {
    const LABEL: &'static str = "attention.recurrent_d_rates";
    const FAMILIES: Families = Families::of(Family::RecurrenceGradients);

    fn describe(&self) -> Kernel {
        Pieces::new(self.declare(), WORKGROUP as u32)
            .form(self.form)
            .chunks()
            .text(shader!("recurrent/recurrent_d_rates"))
            .workgroup_memory(WORKGROUP * size_of::<f32>())
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        RecurrentForm::all().into_iter().flat_map(|form| {
            FLOATS.into_iter().flat_map(move |dtype| {
                [(true, form.delta), (false, true)].map(|(decay, beta)| RecurrentDRates {
                    chunks: DType::U32,
                    memory: DType::F32,
                    d_decay: decay.then_some(dtype),
                    d_beta: beta.then_some(dtype),
                    form: RecurrentForm { unit: false, ..form },
                })
            })
        })
    }
}
