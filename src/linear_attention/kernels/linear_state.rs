//! The host side of `linear_state.wgsl`.

use super::linear::{LinearForm, LinearNumbers, Phi, Pieces, listed};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The states of chunks: of keys and values, or, for the backward pass, of queries and the
    /// gradients of results.
    LinearState, LinearStateCall
    tensors {
        k: Opt Read F32 width view,
        v: Opt Read F32 width view,
        q: Opt Read F32 width view,
        d_out: Opt Read F32 width view,
        stats: Opt Read F32 four,
        logs: Opt Read F32 one,
        chunks: Opt Read U32 one,
        states: Opt Write F32 four,
    }
    numbers {
        numbers: LinearNumbers,
    }
    variant {
        form: LinearForm,
        phi: Phi,
        width: Width,
    }
}

impl Variant for LinearState {
    const LABEL: &'static str = "attention.linear_state";
    const FAMILIES: Families = Families::of(Family::LinearAttention);

    fn describe(&self) -> Kernel {
        let pieces = Pieces::new(self.form, self.width, self.declare()).product().phi(self.phi);
        let pieces = if self.q.is_some() {
            let pieces = pieces.queries().d_out().stats();
            pieces.chunks(self.logs, "p.q_len").text(shader!("linear_attention/query_items"))
        } else {
            let pieces = pieces.keys().values();
            pieces.chunks(self.logs, "p.kv_len").text(shader!("linear_attention/key_items"))
        };
        pieces.text(shader!("linear_attention/linear_state")).kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |of_queries: bool| {
            listed(move |form, width, dtype, phi| {
                let [queries, keys] = [of_queries, !of_queries].map(|used| used.then_some(dtype));
                LinearState {
                    k: keys,
                    v: keys,
                    q: queries,
                    d_out: queries,
                    stats: queries.map(|_| DType::F32),
                    logs: form.logs().filter(|_| !of_queries),
                    chunks: form.chunks(),
                    states: Some(DType::F32),
                    form,
                    phi,
                    width,
                }
            })
        };
        [of(false), of(true)].concat()
    }
}
