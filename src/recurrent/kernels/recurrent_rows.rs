//! The host side of `recurrent_rows.wgsl`.

use super::numbers::{Pieces, RecurrentForm, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The rows of queries and keys of a chunk, with their decays.
    RecurrentRows, RecurrentRowsCall
    tensors {
        q: One Read F32 width view,
        k: One Read F32 width view,
        decay: Opt Read F32 one repeating,
        beta: Opt Read F32 one repeating,
        chunks: One Read U32 one,
        memory: One Write F32 four,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
        form: RecurrentForm,
        workgroup: u32,
        width: Width,
    }
}

impl Variant for RecurrentRows {
    const LABEL: &'static str = "attention.recurrent_rows";
    const FAMILIES: Families = Families::of(Family::Recurrence);

    fn describe(&self) -> Kernel {
        let in_fours = self.width == Width::Four;
        Pieces::new(self.declare(), self.workgroup)
            .form(self.form)
            .chunks()
            .tensor("q", "query4", "p.head_dim", in_fours)
            .tensor("k", "key4", "p.head_dim", in_fours)
            .text(shader!("recurrent/rates"))
            .text(shader!("recurrent/decays"))
            .text(shader!("recurrent/recurrent_rows"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |form: RecurrentForm, workgroup, dtype, decay: Option<DType>, width| RecurrentRows {
            q: dtype,
            k: dtype,
            decay: if form.by_channel { Some(decay.unwrap_or(dtype)) } else { decay },
            beta: form.delta.then_some(dtype),
            chunks: DType::U32,
            memory: DType::F32,
            form,
            workgroup,
            width,
        };
        let forms = RecurrentForm::all().into_iter().flat_map(move |form| {
            [(8, Width::Four), (16, Width::One), (64, Width::Four)]
                .map(|(workgroup, width)| of(form, workgroup, DType::F32, None, width))
        });
        let typed = FLOATS.into_iter().flat_map(move |dtype| {
            let form = RecurrentForm::all()[0];
            FLOATS.map(|decay| of(form, 64, dtype, Some(decay), Width::One))
        });
        forms.chain(typed)
    }
}
