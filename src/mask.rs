//! Which keys a query may see, and what is added to its score.

use crate::error::Error;
use crate::problem::Shape;
use crate::tensor::{Access, DType, DeviceFacts, TensorView, count, expect_broadcast};

/// Where the diagonal of a mask lies when there are more keys than queries, or fewer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Alignment {
    /// The last query stands at the last key: query `i` is at key `i + kv_len − q_len`.
    /// What decoding with a full view of the cache needs; the default.
    #[default]
    BottomRight,
    /// The first query stands at the first key: query `i` is at key `i`.
    TopLeft,
}

/// The part of a mask that needs no tensor: bounds relative to the query's own position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Band {
    pub alignment: Alignment,
    /// Keys more than this many positions before the query are not seen.
    pub left: Option<usize>,
    /// Keys more than this many positions after the query are not seen; causal is 0.
    pub right: Option<usize>,
    pub exclude_self: bool,
}

impl Band {
    /// Key position of query 0.
    pub fn diagonal(&self, q_len: usize, kv_len: usize) -> i64 {
        match self.alignment {
            Alignment::BottomRight => kv_len as i64 - q_len as i64,
            Alignment::TopLeft => 0,
        }
    }

    pub fn permits(&self, i: usize, j: usize, diagonal: i64) -> bool {
        let position = i as i64 + diagonal;
        let distance = j as i64 - position;
        // A bound past every key bounds nothing, however large it is.
        let reach = |bound: usize| i64::try_from(bound).unwrap_or(i64::MAX);
        self.left.is_none_or(|left| -distance <= reach(left))
            && self.right.is_none_or(|right| distance <= reach(right))
            && !(self.exclude_self && distance == 0)
    }
}

/// A mask: a set of rules that must all permit a pair, and a bias added to the scores.
///
/// Every part broadcasts to `[batch, heads, q_len, kv_len]` where its own size is 1. The order is
/// `scale · q·k`, then softcap, then bias, then permission. A query that may see no key has
/// output 0 and lse −∞.
///
/// On a device the parts are [`TensorView`]s ([`DeviceMask`]), on the host slices ([`HostMask`]); a mask that
/// is made apart from its call may need one of these as its type.
///
/// ```
/// use wgpu_attention::{HostMask, Mask};
/// let mask: HostMask = Mask::causal().window(128, 0);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Mask<Lengths, Keep, Bias> {
    pub(crate) band: Band,
    pub(crate) lengths: Option<Lengths>,
    pub(crate) keep: Option<Keep>,
    pub(crate) keys: Option<Keep>,
    pub(crate) bias: Option<Bias>,
}

/// A mask whose parts are in device memory.
pub type DeviceMask<'a> = Mask<TensorView<'a>, TensorView<'a>, TensorView<'a>>;

/// A mask whose parts are slices.
pub type HostMask<'a> = Mask<HostTensor<'a, u32>, HostTensor<'a, bool>, HostTensor<'a, f32>>;

/// A dense row-major slice with its shape; an axis of 1 repeats.
#[derive(Clone, Copy, Debug)]
pub struct HostTensor<'a, T> {
    /// The elements.
    pub data: &'a [T],
    /// `[batch, heads, q_len, kv_len]`; of lengths `[batch, heads, q_len, 1]`.
    pub shape: [usize; 4],
}

impl<'a, T: Copy> HostTensor<'a, T> {
    /// A slice seen as a tensor.
    pub fn new(data: &'a [T], shape: [usize; 4]) -> Self {
        HostTensor { data, shape }
    }

    /// The element at `[b, h, i, j]`, repeating axes of 1; `None` outside.
    pub fn at(&self, index: [usize; 4]) -> Option<T> {
        if (0..4).any(|a| self.shape[a] != 1 && index[a] >= self.shape[a]) {
            return None;
        }
        let strides = crate::tensor::dense_strides(self.shape);
        let flat = (0..4).map(|a| if self.shape[a] == 1 { 0 } else { index[a] * strides[a] }).sum::<usize>();
        self.data.get(flat).copied()
    }

    pub(crate) fn check(&self, tensor: &'static str, to: [usize; 4]) -> Result<(), Error> {
        expect_broadcast(tensor, self.shape, to)?;
        let expected = count(self.shape);
        if self.data.len() != expected {
            return Err(Error::Length { tensor, expected, got: self.data.len() });
        }
        Ok(())
    }
}

impl<L, K, B> Default for Mask<L, K, B> {
    fn default() -> Self {
        Self::none()
    }
}

impl<L, K, B> Mask<L, K, B> {
    /// Every query sees every key.
    pub fn none() -> Self {
        Mask { band: Band::default(), lengths: None, keep: None, keys: None, bias: None }
    }

    /// Causal, aligned bottom-right: query `i` sees keys `j ≤ i + kv_len − q_len`.
    pub fn causal() -> Self {
        Self::none().and_causal()
    }

    /// Causal, aligned top-left: query `i` sees keys `j ≤ i`.
    pub fn causal_top_left() -> Self {
        Self::causal().aligned(Alignment::TopLeft)
    }

    /// Adds the causal rule.
    pub fn and_causal(mut self) -> Self {
        self.band.right = Some(0);
        self
    }

    /// Chooses where the query's own position lies, for `causal`, `window` and `exclude_self`. It follows
    /// from the shapes of q and k alone; [`lengths`](Self::lengths) does not move it. For a cache filled to n
    /// keys, [`slice`](crate::TensorView::slice) k and v to n.
    pub fn aligned(mut self, alignment: Alignment) -> Self {
        self.band.alignment = alignment;
        self
    }

    /// At most `left` keys before the query's own position and `right` after it are seen, and the one at it:
    /// a window of W tokens that ends with the query's own is `window(W - 1, 0)`. `usize::MAX` is no bound.
    /// With a causal mask or another window, the narrower bounds hold.
    pub fn window(mut self, left: usize, right: usize) -> Self {
        self.band.left = Some(self.band.left.map_or(left, |l| l.min(left)));
        self.band.right = Some(self.band.right.map_or(right, |r| r.min(right)));
        self
    }

    /// A query does not see the key at its own position (`j ≠ i`).
    pub fn exclude_self(mut self) -> Self {
        self.band.exclude_self = true;
        self
    }

    /// Only the first `lengths[b, h, i]` keys are seen. Shape `[batch, heads, q_len, 1]`, any of the
    /// first three may be 1: `[batch, 1, 1, 1]` is one length per sequence. A length beyond `kv_len`
    /// means all keys. On a device the dtype is U32.
    pub fn lengths(mut self, lengths: L) -> Self {
        self.lengths = Some(lengths);
        self
    }

    /// Only pairs that hold `true` are seen, as in PyTorch's `scaled_dot_product_attention`; the masks of
    /// `nn.MultiheadAttention` say the opposite. Shape `[batch, heads, q_len, kv_len]`, any may be 1.
    pub fn keep(mut self, keep: K) -> Self {
        self.keep = Some(keep);
        self
    }

    /// Only keys that hold `true` are seen: a second boolean mask beside [`keep`](Self::keep), usually
    /// `[batch, 1, 1, kv_len]` for padding.
    pub fn keys(mut self, keys: K) -> Self {
        self.keys = Some(keys);
        self
    }

    /// Added to the scaled and softcapped scores; may hold −∞. Shape `[batch, heads, q_len, kv_len]`,
    /// any may be 1. On a device the dtype is F32 or F16.
    pub fn bias(mut self, bias: B) -> Self {
        self.bias = Some(bias);
        self
    }

    /// What `lengths` must broadcast to.
    fn lengths_shape(shape: &Shape) -> [usize; 4] {
        [shape.batch, shape.heads, shape.q_len, 1]
    }
}

impl HostMask<'_> {
    /// Refuses parts that do not broadcast to `[batch, heads, q_len, kv_len]`.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Length`].
    pub fn check(&self, shape: &Shape) -> Result<(), Error> {
        let pairs = shape.weights();
        self.lengths.map_or(Ok(()), |t| t.check("lengths", Self::lengths_shape(shape)))?;
        self.keep.map_or(Ok(()), |t| t.check("keep", pairs))?;
        self.keys.map_or(Ok(()), |t| t.check("keys", pairs))?;
        self.bias.map_or(Ok(()), |t| t.check("bias", pairs))
    }
}

impl<'a> DeviceMask<'a> {
    /// Every tensor of the mask, with its name.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&'static str, TensorView<'a>)> + use<'a> {
        [("lengths", self.lengths), ("keep", self.keep), ("keys", self.keys), ("bias", self.bias)]
            .into_iter()
            .filter_map(|(name, tensor)| tensor.map(|t| (name, t)))
    }

    /// Checks shapes, dtypes and memory of every part.
    pub(crate) fn check(&self, shape: &Shape, device: &DeviceFacts) -> Result<(), Error> {
        for (name, tensor) in self.tensors() {
            let (to, expected, fits) = match name {
                "lengths" => (Self::lengths_shape(shape), "U32", tensor.dtype == DType::U32),
                "bias" => (shape.weights(), "F32 or F16", tensor.dtype.is_float()),
                _ => (shape.weights(), "Bool", tensor.dtype == DType::Bool),
            };
            if !fits {
                return Err(Error::Type { tensor: name, expected: expected.into(), got: tensor.dtype });
            }
            tensor.check(name, Access::Read, device)?;
            expect_broadcast(name, tensor.shape(), to)?;
        }
        Ok(())
    }
}
