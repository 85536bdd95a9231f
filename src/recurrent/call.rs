//! The calls of recurrent attention.

use crate::tensor::TensorView;

/// One forward call. `q` and `k` are `[batch, heads, length, head_dim]`, `v` and `out` `[batch,
/// value_heads, length, value_dim]`, in the type of the configuration.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct RecurrentForward<'a> {
    pub(crate) q: TensorView<'a>,
    pub(crate) k: TensorView<'a>,
    pub(crate) v: TensorView<'a>,
    pub(crate) out: TensorView<'a>,
    pub(crate) decay: Option<TensorView<'a>>,
    pub(crate) beta: Option<TensorView<'a>>,
    pub(crate) lengths: Option<TensorView<'a>>,
    pub(crate) packed: Option<TensorView<'a>>,
    pub(crate) initial_state: Option<TensorView<'a>>,
    pub(crate) final_state: Option<TensorView<'a>>,
    pub(crate) in_place: bool,
    pub(crate) slots: Option<TensorView<'a>>,
    pub(crate) initial_slots: Option<TensorView<'a>>,
    pub(crate) states: Option<TensorView<'a>>,
}

impl<'a> RecurrentForward<'a> {
    /// Computes `out` from `q`, `k` and `v`.
    pub fn new(q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>, out: TensorView<'a>) -> Self {
        RecurrentForward {
            q,
            k,
            v,
            out,
            decay: None,
            beta: None,
            lengths: None,
            packed: None,
            initial_state: None,
            final_state: None,
            in_place: false,
            slots: None,
            initial_slots: None,
            states: None,
        }
    }

    /// The logarithm of the factor by which a state decays before a token is added. It is `[batch,
    /// value_heads, length, 1]`, with `head_dim` channels for [`Decay::PerChannel`](super::Decay).
    /// F32, F16 or BF16. Axes of one element are repeated, so that a constant for each head is `[1,
    /// value_heads, 1, 1]`. −∞ forgets everything.
    pub fn decay(mut self, decay: impl Into<Option<TensorView<'a>>>) -> Self {
        self.decay = decay.into();
        self
    }

    /// The rate β of a delta rule, `[batch, value_heads, length, 1]`, F32, F16 or BF16. Axes of one
    /// element are repeated.
    pub fn beta(mut self, beta: impl Into<Option<TensorView<'a>>>) -> Self {
        self.beta = beta.into();
        self
    }

    /// The number of tokens of each batch entry, `[batch, 1, 1, 1]`, U32. Later tokens do not
    /// change the state, and their results are 0.
    pub fn lengths(mut self, lengths: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lengths = lengths.into();
        self
    }

    /// Packed sequences: batch 1, and `[1, 1, 1, sequences + 1]`, U32. Sequence n has the tokens
    /// from element n to element n + 1, and its own state. It may be empty. Tokens of no sequence
    /// give 0.
    #[doc(alias = "cu_seqlens")]
    pub fn packed(mut self, starts: impl Into<Option<TensorView<'a>>>) -> Self {
        self.packed = starts.into();
        self
    }

    /// The state of each sequence before the call, `[sequences, value_heads, head_dim, value_dim]`,
    /// F32. Without it sequences begin with zeros.
    pub fn initial_state(mut self, state: impl Into<Option<TensorView<'a>>>) -> Self {
        (self.initial_state, self.in_place) = (state.into(), false);
        self
    }

    /// Writes the state of each sequence after the call: the shape of
    /// [`initial_state`](Self::initial_state). An empty sequence passes its state on.
    pub fn final_state(mut self, state: impl Into<Option<TensorView<'a>>>) -> Self {
        (self.final_state, self.in_place) = (state.into(), false);
        self
    }

    /// The state of each sequence before the call, which the call replaces: for generation. Use
    /// [`final_state`](Self::final_state) for the prompt, then this for each further token.
    pub fn state(mut self, state: impl Into<Option<TensorView<'a>>>) -> Self {
        self.final_state = state.into();
        self.initial_state = self.final_state;
        self.in_place = self.final_state.is_some();
        self
    }

    /// The place of each sequence's state among many: `[sequences, 1, 1, 1]`, U32. The states are
    /// then `[any number, value_heads, head_dim, value_dim]`. Different sequences must have
    /// different places. A sequence whose place does not exist is left out: its results are 0.
    pub fn slots(mut self, slots: impl Into<Option<TensorView<'a>>>) -> Self {
        self.slots = slots.into();
        self
    }

    /// The same for [`initial_state`](Self::initial_state) alone, where places may repeat. With the
    /// [`states`](Self::states) of a call of draft tokens, it goes on from any of them.
    pub fn initial_slots(mut self, slots: impl Into<Option<TensorView<'a>>>) -> Self {
        self.initial_slots = slots.into();
        self
    }

    /// Writes the state after every token, `[batch · length, value_heads, head_dim, value_dim]`,
    /// F32, for at most 16 tokens. Token t of batch entry b has place `b · length + t`.
    ///
    /// This is a checkpoint of each draft token of speculative decoding. To accept n of the tokens,
    /// pass the tensor as [`initial_state`](Self::initial_state) of the next call, with
    /// [`initial_slots`](Self::initial_slots) `b · length + n − 1`. Nothing is computed again.
    #[doc(alias = "speculative decoding")]
    pub fn states(mut self, states: impl Into<Option<TensorView<'a>>>) -> Self {
        self.states = states.into();
        self
    }
}

/// One backward call. It reads the inputs of a [`RecurrentForward`] and the gradients of its
/// results, and writes the gradients of its inputs. It does not need `out`.
///
/// Each gradient has the shape of its tensor without repeated axes, and its type or F32.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct RecurrentBackward<'a> {
    pub(crate) forward: RecurrentForward<'a>,
    pub(crate) d_out: TensorView<'a>,
    pub(crate) d_final_state: Option<TensorView<'a>>,
    pub(crate) d_q: Option<TensorView<'a>>,
    pub(crate) d_k: Option<TensorView<'a>>,
    pub(crate) d_v: Option<TensorView<'a>>,
    pub(crate) d_decay: Option<TensorView<'a>>,
    pub(crate) d_beta: Option<TensorView<'a>>,
    pub(crate) d_initial_state: Option<TensorView<'a>>,
    pub(crate) accumulates: bool,
}

impl<'a> RecurrentBackward<'a> {
    /// Takes `forward` and the gradient of its `out`. The call writes only the gradients that you
    /// request.
    pub fn new(forward: RecurrentForward<'a>, d_out: TensorView<'a>) -> Self {
        RecurrentBackward {
            forward,
            d_out,
            d_final_state: None,
            d_q: None,
            d_k: None,
            d_v: None,
            d_decay: None,
            d_beta: None,
            d_initial_state: None,
            accumulates: false,
        }
    }

    /// The gradient of the final state, `[sequences, value_heads, head_dim, value_dim]`, F32.
    pub fn d_final_state(mut self, d_state: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_final_state = d_state.into();
        self
    }

    /// Writes the gradient of the queries.
    pub fn d_q(mut self, d_q: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_q = d_q.into();
        self
    }

    /// Writes the gradient of the keys.
    pub fn d_k(mut self, d_k: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_k = d_k.into();
        self
    }

    /// Writes the gradient of the values.
    pub fn d_v(mut self, d_v: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_v = d_v.into();
        self
    }

    /// Writes the gradient of the logarithmic decay: `[batch, value_heads, length, 1 or head_dim]`,
    /// F32, F16 or BF16.
    pub fn d_decay(mut self, d_decay: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_decay = d_decay.into();
        self
    }

    /// Writes the gradient of β: `[batch, value_heads, length, 1]`, F32, F16 or BF16.
    pub fn d_beta(mut self, d_beta: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_beta = d_beta.into();
        self
    }

    /// Writes the gradient of the initial state, `[sequences, value_heads, head_dim, value_dim]`,
    /// F32, also of a call that begins with zeros.
    pub fn d_initial_state(mut self, d_state: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_initial_state = d_state.into();
        self
    }

    /// Adds the gradients to the contents of their tensors, and rounds each sum once to its type.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }
}
