//! The dimensions of one attention call. They are derived from its tensors and checked once.

use super::{Access, CallTensors, DType, Error, LONGEST_AXIS, TensorView, check_sizes, expect, expect_shape};

/// The seven dimensions of attention.
///
/// Queries are `[batch, heads, q_len, head_dim]`, keys `[batch, kv_heads, kv_len, head_dim]`,
/// values `[batch, kv_heads, kv_len, value_dim]`, the output `[batch, heads, q_len, value_dim]`.
/// Query head `h` uses key/value head `h / (heads / kv_heads)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Independent sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; a divisor of `heads` (grouped-query attention; 1 is multi-query).
    #[doc(alias = "enable_gqa")]
    pub kv_heads: usize,
    /// Queries per sequence.
    pub q_len: usize,
    /// Keys per sequence.
    pub kv_len: usize,
    /// Channels of queries and keys.
    pub head_dim: usize,
    /// Channels of values and of the output.
    pub value_dim: usize,
}

impl Shape {
    /// Self-attention: one length, one head count, one width.
    pub const fn new(batch: usize, heads: usize, length: usize, head_dim: usize) -> Self {
        Shape { batch, heads, kv_heads: heads, q_len: length, kv_len: length, head_dim, value_dim: head_dim }
    }

    /// Query heads per key/value head.
    pub const fn group(&self) -> usize {
        self.heads / if self.kv_heads == 0 { 1 } else { self.kv_heads }
    }

    /// `[batch, heads, q_len, head_dim]`.
    pub const fn q(&self) -> [usize; 4] {
        [self.batch, self.heads, self.q_len, self.head_dim]
    }

    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub const fn k(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.kv_len, self.head_dim]
    }

    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub const fn v(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.kv_len, self.value_dim]
    }

    /// `[batch, heads, q_len, value_dim]`.
    pub const fn out(&self) -> [usize; 4] {
        [self.batch, self.heads, self.q_len, self.value_dim]
    }

    /// `[batch, heads, q_len, kv_len]`: the shape of attention weights, to which masks are
    /// broadcast.
    pub const fn weights(&self) -> [usize; 4] {
        [self.batch, self.heads, self.q_len, self.kv_len]
    }

    /// `[batch, heads, q_len, 1]`: the log-sum-exp of every query's scores.
    pub const fn lse(&self) -> [usize; 4] {
        [self.batch, self.heads, self.q_len, 1]
    }

    /// Multiplications and additions of `q kᵀ` and `weights · v`, unmasked.
    pub fn flops(&self) -> f64 {
        let pairs = self.weights().into_iter().map(|n| n as f64).product::<f64>();
        2.0 * pairs * (self.head_dim as f64 + self.value_dim as f64)
    }

    /// Refuses zero dimensions and head counts that do not divide.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let sizes = [
            ("batch", self.batch),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("q_len", self.q_len),
            ("kv_len", self.kv_len),
            ("head_dim", self.head_dim),
            ("value_dim", self.value_dim),
        ];
        check_sizes("shape", &sizes)?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::NotDivisible {
                what: "heads",
                value: self.heads,
                by: "kv_heads",
                divisor: self.kv_heads,
            });
        }
        Ok(())
    }

    /// Refuses lengths that no tensor could have. Use it if no tensor limits these lengths.
    pub(crate) fn check_lengths(&self) -> Result<(), Error> {
        let lengths =
            [("batch", self.batch), ("heads", self.heads), ("q_len", self.q_len), ("kv_len", self.kv_len)];
        match lengths.into_iter().find(|(_, n)| *n > LONGEST_AXIS) {
            Some((option, n)) => Err(Error::Option { option, value: n as f64, expected: "below 2^29" }),
            None => Ok(()),
        }
    }

    /// Derives the dimensions from the tensors of a call: `q`, `k`, `v` and `out`. `out` is the
    /// output or its gradient. Checks these tensors against the configured type and the configured
    /// `[heads, kv_heads, head_dim, value_dim]`.
    pub(crate) fn of<'a>(
        tensors: &mut CallTensors<'a, '_>,
        dtype: DType,
        [heads, kv_heads, head_dim, value_dim]: [usize; 4],
        [q, k, v]: [TensorView<'a>; 3],
        (name, out, access): (&'static str, TensorView<'a>, Access),
    ) -> Result<Self, Error> {
        for (tensor, view) in [("q", q), ("k", k), ("v", v)] {
            tensors.read(tensor, view, dtype, view.shape())?;
        }
        tensors.add(access, name, out, dtype, out.shape())?;
        expect("q", q.shape(), 1, heads)?;
        expect("q", q.shape(), 3, head_dim)?;
        expect("k", k.shape(), 1, kv_heads)?;
        expect("v", v.shape(), 3, value_dim)?;
        let ([batch, _, q_len, _], kv_len) = (q.shape(), k.shape()[2]);
        let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        shape.check()?;
        expect_shape("k", k.shape(), shape.k())?;
        expect_shape("v", v.shape(), shape.v())?;
        expect_shape(name, out.shape(), shape.out())?;
        Ok(shape)
    }
}
