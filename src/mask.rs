//! Which keys a query may see, and what is added to its score.

use crate::block_map::Blocks;
use crate::device::DeviceFacts;
use crate::error::Error;
use crate::pattern::Pattern;
use crate::problem::Shape;
use crate::tensor::{Access, DType, TensorView, count, expect, expect_broadcast};

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

impl Alignment {
    /// Key position of query 0.
    pub(crate) fn diagonal(self, q_len: usize, kv_len: usize) -> i64 {
        match self {
            Alignment::BottomRight => kv_len as i64 - q_len as i64,
            Alignment::TopLeft => 0,
        }
    }
}

/// The part of a mask that needs no tensor: bounds relative to the query's own position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Band {
    pub alignment: Alignment,
    pub causal: bool,
    /// Keys more than this many positions before the query are not seen.
    pub left: Option<usize>,
    /// Keys more than this many positions after the query are not seen.
    pub right: Option<usize>,
    pub pattern: Option<Pattern>,
    pub exclude_self: bool,
}

/// What is added to a score by the distance between key and query.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alibi<B> {
    pub slopes: B,
    /// By how far the key is, before or after, instead of by how far it is after.
    pub symmetric: bool,
}

/// Several sequences side by side, by where each begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed<L> {
    pub queries: L,
    pub keys: L,
}

/// Which document every query and key belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Documents<L> {
    pub queries: L,
    pub keys: L,
}

/// A mask: a set of rules that must all permit a pair, and what is added to the scores.
///
/// Every tensor broadcasts to the shape its method names where its own size is 1. The order is
/// `scale · q·k`, then softcap, then bias, ALiBi and relative bias, then permission. A query that may see no
/// key has output 0 and lse −∞.
///
/// A pair must be permitted by all of `lengths`, `attn_mask`, `key_padding_mask`, `tree`, `documents`, `packed` and `exclude_self`, and
/// stand before `prefix` or be permitted by the causal rule and by `window` and `pattern`; `globals` lifts the
/// latter two. `blocks` goes before: what it calls hidden is hidden, what it calls full is asked only
/// for `lengths`, `packed`, the causal rule and `prefix`.
///
/// On a device the parts are [`TensorView`]s ([`DeviceMask`]), on the host slices ([`HostMask`]); a mask that
/// is made apart from its call may need one of these as its type.
///
/// ```
/// use wgpu_attention::{HostMask, Mask};
/// let mask: HostMask = Mask::causal().window(128, 0);
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Mask<Lengths, Keep, Bias> {
    pub(crate) band: Band,
    pub(crate) lengths: Option<Lengths>,
    pub(crate) prefix: Option<Lengths>,
    pub(crate) packed: Option<Packed<Lengths>>,
    pub(crate) documents: Option<Documents<Lengths>>,
    pub(crate) blocks: Option<Blocks<Lengths>>,
    pub(crate) attn_mask: Option<Keep>,
    pub(crate) tree: Option<Keep>,
    pub(crate) key_padding_mask: Option<Keep>,
    pub(crate) globals: Option<Keep>,
    pub(crate) bias: Option<Bias>,
    pub(crate) alibi: Option<Alibi<Bias>>,
    pub(crate) relative: Option<Bias>,
    pub(crate) sink_logits: Option<Bias>,
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
    /// As the method of [`Mask`] says that takes it.
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
        // A shape may be larger than the slice.
        let flat = (0..4)
            .filter(|a| self.shape[*a] != 1)
            .try_fold(0usize, |flat, a| flat.checked_add(index[a].checked_mul(strides[a])?))?;
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
        Mask {
            band: Band::default(),
            lengths: None,
            prefix: None,
            packed: None,
            documents: None,
            blocks: None,
            attn_mask: None,
            tree: None,
            key_padding_mask: None,
            globals: None,
            bias: None,
            alibi: None,
            relative: None,
            sink_logits: None,
        }
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
        self.band.causal = true;
        self
    }

    /// Chooses where the query's own position lies, for everything that speaks of it: the causal rule, `window`,
    /// `pattern`, `globals`, `exclude_self`, `alibi`, `relative`. It follows from the shapes of q and k alone, or
    /// of every packed sequence; [`lengths`](Self::lengths) does not move it. For a cache filled to n
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

    /// Only keys of a regular sparse pattern are seen: dilated, strided, fixed or local blocks. The last one set
    /// counts.
    pub fn pattern(mut self, pattern: Pattern) -> Self {
        self.band.pattern = Some(pattern);
        self
    }

    /// A query does not see the key at its own position (`j ≠ i`).
    pub fn exclude_self(mut self) -> Self {
        self.band.exclude_self = true;
        self
    }

    /// Only the first `lengths[b, h, i]` keys are seen, of the query's own sequence if they are packed. Shape
    /// `[batch, heads, q_len, 1]`, any of the first three may be 1: `[batch, 1, 1, 1]` is one length per
    /// sequence. A length beyond `kv_len` means all keys. On a device the dtype is U32.
    pub fn lengths(mut self, lengths: L) -> Self {
        self.lengths = Some(lengths);
        self
    }

    /// Prefix-LM: the first `prefix[b, h, i]` keys are seen whatever the causal rule, `window` and `pattern` say
    /// (Raffel et al. 2020, "Exploring the limits of transfer learning", 3.2.1). Shaped and counted as
    /// [`lengths`](Self::lengths). On a device the dtype is U32.
    pub fn prefix(mut self, prefix: L) -> Self {
        self.prefix = Some(prefix);
        self
    }

    /// Sequences of different lengths side by side in one batch entry, without padding: sequence `s` has queries
    /// `query_starts[s] .. query_starts[s + 1]` and keys `key_starts[s] .. key_starts[s + 1]` (`cu_seqlens`
    /// elsewhere). A query sees keys of its own sequence only, and stands where `aligned` says within it;
    /// queries before the first sequence or past the last see none. Both `[batch, 1, 1, sequences + 1]`,
    /// ascending, batch may be 1; a start past the end of the tensor is its end. On a device the dtype is U32.
    ///
    /// ```
    /// use wgpu_attention::{HostMask, HostTensor, Mask};
    /// let starts = [0, 5, 12]; // sequences of 5 and of 7 tokens, in tensors of length 12
    /// let starts = HostTensor::new(&starts, [1, 1, 1, 3]);
    /// let mask: HostMask = Mask::causal().packed(starts, starts);
    /// ```
    pub fn packed(mut self, query_starts: L, key_starts: L) -> Self {
        self.packed = Some(Packed { queries: query_starts, keys: key_starts });
        self
    }

    /// Only keys of the query's own document are seen: those with the same number. `queries` is
    /// `[batch, heads, q_len, 1]`, `keys` `[batch, heads, 1, kv_len]`, any but the last length may be 1.
    /// Unlike `packed` it moves no position, and documents need not be contiguous. On a device the dtype is U32.
    pub fn documents(mut self, queries: L, keys: L) -> Self {
        self.documents = Some(Documents { queries, keys });
        self
    }

    /// Whole blocks of pairs that are hidden, or full; see [`Blocks`].
    pub fn blocks(mut self, blocks: Blocks<L>) -> Self {
        self.blocks = Some(blocks);
        self
    }

    /// Only pairs that hold `true` are seen, as in PyTorch's `scaled_dot_product_attention`; the masks of
    /// `nn.MultiheadAttention` say the opposite. Shape `[batch, heads, q_len, kv_len]`, any may be 1.
    pub fn attn_mask(mut self, attn_mask: K) -> Self {
        self.attn_mask = Some(attn_mask);
        self
    }

    /// Tree of drafts, for speculative decoding (Miao et al. 2024, "SpecInfer"): of the queries' own keys, those from
    /// query 0's position on, query `i` sees key `j` only where `tree[b, h, i, j − position of query 0]` holds
    /// `true`; older keys are not asked. Shape `[batch, heads, q_len, q_len]`, batch and heads may be 1. Distances still
    /// follow the order of the rows, not the depth in the tree. Not with packed sequences.
    pub fn tree(mut self, tree: K) -> Self {
        self.tree = Some(tree);
        self
    }

    /// Only keys that hold `true` are seen: a second boolean mask beside [`attn_mask`](Self::attn_mask), usually
    /// `[batch, 1, 1, kv_len]` for padding.
    pub fn key_padding_mask(mut self, key_padding_mask: K) -> Self {
        self.key_padding_mask = Some(key_padding_mask);
        self
    }

    /// Global tokens: keys that hold `true` are seen by every query, and queries that stand at such a key see
    /// every key, whatever `window` and `pattern` say (Beltagy et al. 2020, "Longformer"). The causal rule holds
    /// for them too: with it and a window the first few tokens are StreamingLLM's (Xiao et al. 2023). Shape
    /// `[batch, heads, 1, kv_len]`, any may be 1.
    pub fn globals(mut self, globals: K) -> Self {
        self.globals = Some(globals);
        self
    }

    /// Added to the scaled and softcapped scores; may hold −∞. Shape `[batch, heads, q_len, kv_len]`,
    /// any may be 1. On a device the dtype is F32 or F16.
    pub fn bias(mut self, bias: B) -> Self {
        self.bias = Some(bias);
        self
    }

    /// ALiBi: adds `slope · (j − position)` to the score of key `j`, which falls with the distance behind the query
    /// for positive slopes (Press et al. 2022, "Train short, test long"). Shape `[batch, heads, 1, 1]`, any
    /// may be 1. On a device the dtype is F32 or F16.
    pub fn alibi(mut self, slopes: B) -> Self {
        self.alibi = Some(Alibi { slopes, symmetric: false });
        self
    }

    /// ALiBi for queries that see both sides: adds `−slope · |j − position|`. Shaped as [`alibi`](Self::alibi).
    pub fn alibi_symmetric(mut self, slopes: B) -> Self {
        self.alibi = Some(Alibi { slopes, symmetric: true });
        self
    }

    /// Adds `table[b, h, 0, clamp(j − position, −r, r) + r]`: a learned bias per distance, the outermost for all
    /// that are further (Shaw et al. 2018, "Self-attention with relative position representations", as a
    /// bias). Shape `[batch, heads, 1, 2·r + 1]`, batch and heads may be 1. On a device the dtype is F32 or F16.
    pub fn relative(mut self, table: B) -> Self {
        self.relative = Some(table);
        self
    }

    /// Attention sinks: one more logit per head that takes its share of the softmax and has no value, so that a
    /// query's weights add up to less than 1 (gpt-oss 2025). It counts in lse: weights are
    /// `exp(score − lse)`. Shape `[batch, heads, 1, 1]`, any may be 1. On a device the dtype is F32 or F16.
    pub fn sink_logits(mut self, sink_logits: B) -> Self {
        self.sink_logits = Some(sink_logits);
        self
    }

    /// The same rules with other tensors: each is given with its name, in a fixed order.
    ///
    /// # Errors
    /// The first that a function returns.
    pub fn try_map<L2, K2, B2, E>(
        self,
        mut lengths: impl FnMut(&'static str, L) -> Result<L2, E>,
        mut bools: impl FnMut(&'static str, K) -> Result<K2, E>,
        mut bias: impl FnMut(&'static str, B) -> Result<B2, E>,
    ) -> Result<Mask<L2, K2, B2>, E> {
        Ok(Mask {
            band: self.band,
            lengths: self.lengths.map(|t| lengths("lengths", t)).transpose()?,
            prefix: self.prefix.map(|t| lengths("prefix", t)).transpose()?,
            packed: match self.packed {
                Some(Packed { queries, keys }) => Some(Packed {
                    queries: lengths("query_starts", queries)?,
                    keys: lengths("key_starts", keys)?,
                }),
                None => None,
            },
            documents: match self.documents {
                Some(Documents { queries, keys }) => Some(Documents {
                    queries: lengths("query_documents", queries)?,
                    keys: lengths("key_documents", keys)?,
                }),
                None => None,
            },
            blocks: match self.blocks {
                Some(Blocks { map, size }) => Some(Blocks { map: lengths("blocks", map)?, size }),
                None => None,
            },
            attn_mask: self.attn_mask.map(|t| bools("attn_mask", t)).transpose()?,
            tree: self.tree.map(|t| bools("tree", t)).transpose()?,
            key_padding_mask: self.key_padding_mask.map(|t| bools("key_padding_mask", t)).transpose()?,
            globals: self.globals.map(|t| bools("globals", t)).transpose()?,
            bias: self.bias.map(|t| bias("bias", t)).transpose()?,
            alibi: match self.alibi {
                Some(Alibi { slopes, symmetric }) => {
                    Some(Alibi { slopes: bias("slopes", slopes)?, symmetric })
                }
                None => None,
            },
            relative: self.relative.map(|t| bias("relative", t)).transpose()?,
            sink_logits: self.sink_logits.map(|t| bias("sink_logits", t)).transpose()?,
        })
    }

    /// The same mask by reference.
    pub fn as_ref(&self) -> Mask<&L, &K, &B> {
        Mask {
            band: self.band,
            lengths: self.lengths.as_ref(),
            prefix: self.prefix.as_ref(),
            packed: self.packed.as_ref().map(|p| Packed { queries: &p.queries, keys: &p.keys }),
            documents: self.documents.as_ref().map(|d| Documents { queries: &d.queries, keys: &d.keys }),
            blocks: self.blocks.as_ref().map(|b| Blocks { map: &b.map, size: b.size }),
            attn_mask: self.attn_mask.as_ref(),
            tree: self.tree.as_ref(),
            key_padding_mask: self.key_padding_mask.as_ref(),
            globals: self.globals.as_ref(),
            bias: self.bias.as_ref(),
            alibi: self.alibi.as_ref().map(|a| Alibi { slopes: &a.slopes, symmetric: a.symmetric }),
            relative: self.relative.as_ref(),
            sink_logits: self.sink_logits.as_ref(),
        }
    }

    /// What the tensor `name` of shape `got` must broadcast to.
    fn wanted(name: &str, shape: &Shape, blocks: Option<[usize; 2]>, got: [usize; 4]) -> [usize; 4] {
        let Shape { batch, heads, q_len, kv_len, .. } = *shape;
        match name {
            "lengths" | "prefix" | "query_documents" => [batch, heads, q_len, 1],
            "key_documents" | "globals" => [batch, heads, 1, kv_len],
            "query_starts" | "key_starts" => [batch, 1, 1, got[3]],
            "tree" => [batch, heads, q_len, q_len],
            "slopes" | "sink_logits" => [batch, heads, 1, 1],
            "relative" => [batch, heads, 1, got[3]],
            "blocks" => {
                let [rows, cols] = blocks.unwrap_or([1; 2]);
                [batch, heads, q_len.div_ceil(rows.max(1)), kv_len.div_ceil(cols.max(1))]
            }
            _ => shape.weights(),
        }
    }

    /// What concerns more than one tensor, or more than a broadcast.
    fn check_sizes(&self, shape_of: ShapesOf<L, B>) -> Result<(), Error> {
        let (of_lengths, of_bias) = shape_of;
        if let Some(Packed { queries, keys }) = &self.packed {
            let [queries, keys] = [queries, keys].map(of_lengths);
            if queries[3] < 2 {
                let expected = "at least 2".to_string();
                return Err(Error::Shape {
                    tensor: "query_starts",
                    axis: "sequences + 1",
                    expected,
                    got: queries[3],
                    shape: queries,
                });
            }
            expect("key_starts", keys, 3, queries[3])?;
        }
        if let Some(table) = self.relative.as_ref().map(of_bias).filter(|t| t[3].is_multiple_of(2)) {
            let expected = "2·r + 1, odd".to_string();
            return Err(Error::Shape {
                tensor: "relative",
                axis: "distances",
                expected,
                got: table[3],
                shape: table,
            });
        }
        if self.tree.is_some() && self.packed.is_some() {
            let why = "older keys of a packed sequence are not told from its drafts; use lengths, or a cache";
            return Err(Error::Unsupported { what: "a tree in packed sequences", why });
        }
        if self.blocks.as_ref().is_some_and(|b| b.size.contains(&0)) {
            return Err(Error::ZeroSize { tensor: "blocks", axis: "size" });
        }
        self.band.pattern.map_or(Ok(()), |p| p.check())
    }
}

/// How to ask tensors for their shape.
type ShapesOf<L, B> = (fn(&L) -> [usize; 4], fn(&B) -> [usize; 4]);

impl HostMask<'_> {
    /// Refuses parts that do not broadcast to what their methods say, and patterns and blocks of no size.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Length`], [`Error::ZeroSize`], [`Error::Option`].
    pub fn check(&self, shape: &Shape) -> Result<(), Error> {
        let size = self.blocks.map(|b| b.size);
        self.check_sizes((|t| t.shape, |t| t.shape))?;
        fn fits<T: Copy>(
            shape: &Shape,
            size: Option<[usize; 2]>,
        ) -> impl Fn(&'static str, HostTensor<T>) -> Result<(), Error> {
            move |name, t| t.check(name, HostMask::wanted(name, shape, size, t.shape))
        }
        self.try_map(fits(shape, size), fits(shape, size), fits(shape, size)).map(|_| ())
    }
}

impl<'a> DeviceMask<'a> {
    /// Every tensor of the mask, with its name.
    pub(crate) fn tensors(&self) -> Vec<(&'static str, TensorView<'a>)> {
        let tensors = std::cell::RefCell::new(Vec::new());
        let take = |name, t| {
            tensors.borrow_mut().push((name, t));
            Ok::<(), std::convert::Infallible>(())
        };
        let Ok(_) = self.try_map(take, take, take);
        tensors.into_inner()
    }

    /// Checks shapes, dtypes and memory of every part.
    pub(crate) fn check(&self, shape: &Shape, device: &DeviceFacts) -> Result<(), Error> {
        self.check_sizes((|t| t.shape(), |t| t.shape()))?;
        let fits = |expected: &'static str, right: fn(DType) -> bool| {
            move |name: &'static str, tensor: TensorView<'a>| {
                if !right(tensor.dtype) {
                    return Err(Error::Type { tensor: name, expected: expected.into(), got: tensor.dtype });
                }
                tensor.check(name, Access::Read, device)?;
                let to = Self::wanted(name, shape, self.blocks.map(|b| b.size), tensor.shape());
                expect_broadcast(name, tensor.shape(), to)
            }
        };
        self.try_map(
            fits("U32", |d| d == DType::U32),
            fits("Bool", |d| d == DType::Bool),
            fits("F32 or F16", DType::is_float),
        )
        .map(|_| ())
    }
}
