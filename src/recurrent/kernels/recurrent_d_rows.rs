//! The host side of `recurrent_d_rows.wgsl`.

use super::numbers::{Pieces, RecurrentForm, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradients of queries and keys.
    RecurrentDRows, RecurrentDRowsCall
    tensors {
        q: Opt Read F32 one view,
        k: Opt Read F32 one view,
        chunks: One Read U32 one,
        memory: One Read F32 four,
        d_q: Opt Write F32 one view,
        d_k: Opt Write F32 one view,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        form: RecurrentForm,
    }
}

pub(crate) const WORKGROUP: usize = 64;

impl Variant for RecurrentDRows {
    const LABEL: &'static str = "attention.recurrent_d_rows";
    const FAMILIES: Families = Families::of(Family::RecurrenceGradients);

    fn describe(&self) -> Kernel {
        Pieces::new(self.declare(), WORKGROUP as u32)
            .form(self.form)
            .chunks()
            .text("fn at4(o: u32) -> vec4<f32> { return memory_at4(o, 1u, 4u); }\n")
            .text(shader!("recurrent/recurrent_d_rows"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |form: RecurrentForm, dtype, d_q: bool, d_k: bool| RecurrentDRows {
            q: form.unit.then_some(dtype),
            k: form.unit.then_some(dtype),
            chunks: DType::U32,
            memory: DType::F32,
            d_q: d_q.then_some(dtype),
            d_k: d_k.then_some(dtype),
            form: RecurrentForm { by_channel: false, ..form },
        };
        let [form, plain, ..] = RecurrentForm::all();
        let typed = FLOATS.into_iter().flat_map(move |dtype| {
            [(form, true, true), (plain, true, true), (form, true, false), (form, false, true)]
                .map(|(form, d_q, d_k)| of(form, dtype, d_q, d_k))
        });
        let others = [RecurrentForm { unit: false, ..form }, RecurrentForm { unit: true, ..plain }];
        typed.chain(others.map(|form| of(form, DType::F32, true, true)))
    }
}
