//! The arguments of forward and backward calls, which every rank passes for its share.

use wgpu_attention::{DType, TensorView};

use super::block::Sizes;
use crate::error::Error;
use crate::schedule::{Schedule, SequenceMask, Shares};

/// One forward call, for this rank's share of the tokens.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q` | `[batch, heads, tokens, head_dim]` | F32, F16 or BF16 |
/// | `k` | `[batch, kv_heads, tokens, head_dim]` | as q |
/// | `v` | `[batch, kv_heads, tokens, value_dim]` | as q |
/// | `out` | `[batch, heads, tokens, value_dim]` | F32, or as q |
/// | `lse` | `[batch, heads, tokens, 1]` | F32 |
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct RingForward<'a> {
    pub(crate) q: TensorView<'a>,
    pub(crate) k: TensorView<'a>,
    pub(crate) v: TensorView<'a>,
    pub(crate) out: TensorView<'a>,
    pub(crate) lse: Option<TensorView<'a>>,
    pub(crate) mask: Option<&'a SequenceMask>,
    pub(crate) length: usize,
}

impl<'a> RingForward<'a> {
    /// A call with this rank's queries, keys, values and output. `length` is the number of tokens
    /// on all ranks together.
    pub fn new(
        q: TensorView<'a>,
        k: TensorView<'a>,
        v: TensorView<'a>,
        out: TensorView<'a>,
        length: usize,
    ) -> Self {
        RingForward { q, k, v, out, lse: None, mask: None, length }
    }

    /// Writes the log-sum-exp of every query's scores to `lse`, over all keys of all ranks.
    pub fn lse(mut self, lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lse = lse.into();
        self
    }

    /// Sets the mask. Without one, every query sees every key.
    pub fn mask(mut self, mask: &'a SequenceMask) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Returns the call's dimensions, if this rank's tensors match each other and its share.
    pub(crate) fn check(&self, schedule: Schedule, rank: usize, ranks: usize) -> Result<Sizes, Error> {
        let RingForward { q, k, v, out, .. } = self;
        let (sizes, tokens) = sizes([q, k, v], self.length, schedule, rank, ranks)?;
        expect("out", out, sizes.out(tokens), &[DType::F32, sizes.dtype])?;
        if let Some(lse) = &self.lse {
            expect("lse", lse, sizes.lse(tokens), &[DType::F32])?;
        }
        let outputs: Vec<_> = [Some(*out), self.lse].into_iter().flatten().collect();
        apart(&outputs, &[*q, *k, *v])?;
        Ok(sizes)
    }
}

/// One backward call, for this rank's share of the tokens. It takes the inputs and outputs of
/// [`RingForward`], and the tensors for the gradients.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `out`, `d_out` | `[batch, heads, tokens, value_dim]` | F32, F16 or BF16 |
/// | `lse` | `[batch, heads, tokens, 1]` | F32 |
/// | `d_q`, `d_k`, `d_v` | as `q`, `k`, `v` | F32, or as q |
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct RingBackward<'a> {
    pub(crate) inputs: [TensorView<'a>; 3],
    pub(crate) out: TensorView<'a>,
    pub(crate) lse: TensorView<'a>,
    pub(crate) d_out: TensorView<'a>,
    pub(crate) gradients: [TensorView<'a>; 3],
    pub(crate) mask: Option<&'a SequenceMask>,
    pub(crate) length: usize,
}

impl<'a> RingBackward<'a> {
    /// A call with the `[q, k, v]`, `out` and `lse` of a forward call, the gradient of `out`, and
    /// outputs `[d_q, d_k, d_v]`. `length` is the number of tokens on all ranks together.
    pub fn new(
        inputs: [TensorView<'a>; 3],
        out: TensorView<'a>,
        lse: TensorView<'a>,
        d_out: TensorView<'a>,
        gradients: [TensorView<'a>; 3],
        length: usize,
    ) -> Self {
        RingBackward { inputs, out, lse, d_out, gradients, mask: None, length }
    }

    /// Sets the mask, which must be the forward call's.
    pub fn mask(mut self, mask: &'a SequenceMask) -> Self {
        self.mask = Some(mask);
        self
    }

    pub(crate) fn check(&self, schedule: Schedule, rank: usize, ranks: usize) -> Result<Sizes, Error> {
        let [q, k, v] = &self.inputs;
        let (sizes, tokens) = sizes([q, k, v], self.length, schedule, rank, ranks)?;
        let floats = [DType::F32, DType::F16, DType::BF16];
        expect("out", &self.out, sizes.out(tokens), &floats)?;
        expect("d_out", &self.d_out, sizes.out(tokens), &floats)?;
        expect("lse", &self.lse, sizes.lse(tokens), &[DType::F32])?;
        let shapes = [sizes.q(tokens), sizes.k(tokens), sizes.v(tokens)];
        for ((name, view), shape) in ["d_q", "d_k", "d_v"].into_iter().zip(&self.gradients).zip(shapes) {
            expect(name, view, shape, &[DType::F32, sizes.dtype])?;
        }
        apart(&self.gradients, &[*q, *k, *v, self.out, self.lse, self.d_out])?;
        Ok(sizes)
    }
}

fn refused(text: String) -> Error {
    Error::Device(text)
}

fn expect(name: &str, view: &TensorView, shape: [usize; 4], dtypes: &[DType]) -> Result<(), Error> {
    if view.shape() != shape {
        return Err(refused(format!("`{name}`: shape must be {shape:?}, got {:?}", view.shape())));
    }
    if !dtypes.contains(&view.dtype()) {
        return Err(refused(format!("`{name}`: dtype must be one of {dtypes:?}, got {:?}", view.dtype())));
    }
    let of_axis = |axis: usize| (shape[axis] as u128 - 1) * view.strides()[axis] as u128;
    let reach = view.offset() as u128 + (0..4).map(of_axis).sum::<u128>();
    let width = super::block::width(view.dtype()) as u128;
    if (reach + 1) * width > u128::from(view.buffer().size()) {
        return Err(refused(format!("`{name}`: the view reaches past the end of its buffer")));
    }
    if !view.buffer().usage().contains(wgpu_attention::wgpu::BufferUsages::STORAGE) {
        return Err(refused(format!("`{name}`: its buffer lacks the usage `STORAGE`")));
    }
    Ok(())
}

/// Checks that no output shares a buffer with an input or with another output.
fn apart(written: &[TensorView], read: &[TensorView]) -> Result<(), Error> {
    for (n, view) in written.iter().enumerate() {
        let others = read.iter().chain(&written[n + 1..]);
        if others.into_iter().any(|other| other.buffer() == view.buffer()) {
            return Err(refused("a written tensor shares its buffer with another tensor".into()));
        }
    }
    Ok(())
}

/// The dimensions that q, k and v agree on, and this rank's tokens.
fn sizes(
    [q, k, v]: [&TensorView; 3],
    length: usize,
    schedule: Schedule,
    rank: usize,
    ranks: usize,
) -> Result<(Sizes, usize), Error> {
    if length >= 1 << 29 {
        return Err(refused(format!("the sequence has {length} tokens, but fewer than 2^29 are supported")));
    }
    let tokens = Shares::new(schedule, length, ranks)?.tokens(rank);
    let [batch, heads, _, head_dim] = q.shape();
    let sizes =
        Sizes { batch, heads, kv_heads: k.shape()[1], head_dim, value_dim: v.shape()[3], dtype: q.dtype() };
    let numbers = [batch, heads, sizes.kv_heads, head_dim, sizes.value_dim];
    if numbers.contains(&0) {
        return Err(refused("q, k and v: every dimension must be at least 1".into()));
    }
    let floats = [DType::F32, DType::F16, DType::BF16];
    expect("q", q, sizes.q(tokens), &floats)?;
    expect("k", k, sizes.k(tokens), &[sizes.dtype])?;
    expect("v", v, sizes.v(tokens), &[sizes.dtype])?;
    if schedule == Schedule::Ulysses && !sizes.kv_heads.is_multiple_of(ranks) {
        let kv_heads = sizes.kv_heads;
        return Err(refused(format!(
            "`kv_heads` is {kv_heads}; for Ulysses it must be a multiple of {ranks} ranks: use a ring"
        )));
    }
    Ok((sizes, tokens))
}
