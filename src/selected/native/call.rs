//! The calls of native sparse attention.

use crate::tensor::TensorView;

/// The results of the branches, which the backward pass reads.
///
/// Branch 0 is compressed attention, 1 is selected attention, 2 is the window. Along the first axis
/// come all batch entries of branch 0, then those of branches 1 and 2.
#[derive(Clone, Copy, Debug)]
pub struct NativeSparseBranches<'a> {
    /// `[3 · batch, heads, q_len, value_dim]`, of the configured type.
    pub out: TensorView<'a>,
    /// The log-sum-exp, `[3 · batch, heads, q_len, 1]`, F32.
    pub lse: TensorView<'a>,
    /// The selected blocks, `[batch, kv_heads, q_len, count]`, U32. The best come first. An index
    /// is −1 (`u32::MAX`) if there are fewer.
    pub indices: TensorView<'a>,
}

/// One forward call of native sparse attention.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q` | `[batch, heads, q_len, head_dim]` | the configured |
/// | `k`, window keys | `[batch, kv_heads, kv_len, head_dim]` | the configured |
/// | `v`, window values | `[batch, kv_heads, kv_len, value_dim]` | the configured |
/// | compressed keys | `[batch, kv_heads, compressed_len, head_dim]` | the configured |
/// | compressed values | `[batch, kv_heads, compressed_len, value_dim]` | the configured |
/// | `gates` | `[batch, heads, q_len, 3]` | F32, F16 or BF16 |
/// | `out` | `[batch, heads, q_len, value_dim]` | the configured |
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct NativeSparseForward<'a> {
    pub(crate) q: TensorView<'a>,
    pub(crate) k: TensorView<'a>,
    pub(crate) v: TensorView<'a>,
    pub(crate) gates: TensorView<'a>,
    pub(crate) out: TensorView<'a>,
    pub(crate) compressed: Option<[TensorView<'a>; 2]>,
    pub(crate) window: Option<[TensorView<'a>; 2]>,
    pub(crate) branches: Option<NativeSparseBranches<'a>>,
}

impl<'a> NativeSparseForward<'a> {
    /// Attention of `q` to `k` and `v`, written to `out`. The last query is at the last key, so
    /// `q_len` is at most `kv_len`. `gates` multiply the compressed, the selected and the window
    /// branch. In the paper they are sigmoids of a product with the layer's input.
    pub fn new(
        q: TensorView<'a>,
        k: TensorView<'a>,
        v: TensorView<'a>,
        gates: TensorView<'a>,
        out: TensorView<'a>,
    ) -> Self {
        let [compressed, window] = [None; 2];
        NativeSparseForward { q, k, v, gates, out, compressed, window, branches: None }
    }

    /// Reads compressed keys and values from tensors, for example from a learned compression. Their
    /// length is [`compressed_len`](super::NativeSparseConfig::compressed_len). The default is the
    /// mean of the keys and values of each block.
    pub fn compressed(mut self, k: TensorView<'a>, v: TensorView<'a>) -> Self {
        self.compressed = Some([k, v]);
        self
    }

    /// Reads the keys and values of the window from other tensors. In the paper each branch has its
    /// own.
    pub fn window_keys(mut self, k: TensorView<'a>, v: TensorView<'a>) -> Self {
        self.window = Some([k, v]);
        self
    }

    /// Writes the results of the branches, which the backward pass needs.
    pub fn branches(mut self, branches: impl Into<Option<NativeSparseBranches<'a>>>) -> Self {
        self.branches = branches.into();
        self
    }
}

/// One backward call: the gradients of a [`NativeSparseForward`]. The selection of blocks has no
/// gradient.
///
/// Gradients have the shape of their tensors. They are F32 or of the tensor's type.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct NativeSparseBackward<'a> {
    pub(crate) forward: NativeSparseForward<'a>,
    pub(crate) d_out: TensorView<'a>,
    pub(crate) d_q: Option<TensorView<'a>>,
    pub(crate) d_k: Option<TensorView<'a>>,
    pub(crate) d_v: Option<TensorView<'a>>,
    pub(crate) d_gates: Option<TensorView<'a>>,
    pub(crate) d_compressed: Option<[TensorView<'a>; 2]>,
    pub(crate) d_window: Option<[TensorView<'a>; 2]>,
    pub(crate) accumulates: bool,
}

impl<'a> NativeSparseBackward<'a> {
    /// Takes the forward call, unchanged, and the gradient of its `out`. The forward call must have
    /// [`branches`](NativeSparseForward::branches). No gradient is written unless requested.
    pub fn new(forward: NativeSparseForward<'a>, d_out: TensorView<'a>) -> Self {
        let [d_q, d_k, d_v, d_gates] = [None; 4];
        let [d_compressed, d_window] = [None; 2];
        let accumulates = false;
        NativeSparseBackward { forward, d_out, d_q, d_k, d_v, d_gates, d_compressed, d_window, accumulates }
    }

    /// Writes the gradient of the queries, from all branches.
    pub fn d_q(mut self, d_q: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_q = d_q.into();
        self
    }

    /// Writes the gradient of `k`, from all branches that read it.
    pub fn d_k(mut self, d_k: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_k = d_k.into();
        self
    }

    /// Writes the gradient of `v`, from all branches that read it.
    pub fn d_v(mut self, d_v: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_v = d_v.into();
        self
    }

    /// Writes the gradient of the gates.
    pub fn d_gates(mut self, d_gates: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_gates = d_gates.into();
        self
    }

    /// Writes the gradients of the compressed keys and values of the forward call.
    pub fn d_compressed(mut self, d_k: TensorView<'a>, d_v: TensorView<'a>) -> Self {
        self.d_compressed = Some([d_k, d_v]);
        self
    }

    /// Writes the gradients of the window's own keys and values.
    pub fn d_window_keys(mut self, d_k: TensorView<'a>, d_v: TensorView<'a>) -> Self {
        self.d_window = Some([d_k, d_v]);
        self
    }

    /// Adds the gradients to the tensors' previous values, and rounds each sum once to its type.
    pub fn accumulate(mut self, accumulates: bool) -> Self {
        self.accumulates = accumulates;
        self
    }
}
