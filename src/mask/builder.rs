//! The methods that build a mask: the meaning of each rule, and the shapes of its tensors.

use super::{Alignment, Blocks, Id, Mask, Part, Pattern, Settings, slot};

impl<L, K, B, M: Default> Mask<L, K, B, M> {
    fn with<const N: usize>(mut self, id: Id, tensors: [Part<L, K, B>; N]) -> Self {
        self.rules = self.rules.with(id);
        for (n, tensor) in tensors.into_iter().enumerate() {
            self.tensors[slot(id, n)] = Some(tensor);
        }
        self
    }

    /// Builds a causal mask, aligned bottom-right: query `i` sees keys `j ≤ i + kv_len − q_len`.
    ///
    /// PyTorch's `is_causal=True` is aligned top-left instead:
    /// [`causal_top_left`](Self::causal_top_left).
    #[doc(alias = "is_causal")]
    pub fn causal() -> Self {
        Self::none().and_causal()
    }

    /// Builds a causal mask, aligned top-left: query `i` sees keys `j ≤ i`.
    ///
    /// It matches PyTorch's `scaled_dot_product_attention(is_causal=True)` and FlexAttention's
    /// `q_idx >= kv_idx`. FlashAttention (from 2.1 on) matches [`causal`](Self::causal). With as
    /// many keys as queries, both are the same.
    #[doc(alias = "is_causal")]
    pub fn causal_top_left() -> Self {
        Self::causal().aligned(Alignment::TopLeft)
    }

    /// Builds Luong's local-m mask: query `i` sees the keys at most `half_window` from key `i`, as
    /// in a monotonic alignment. It is `none().window(half_window, half_window)`, aligned top-left.
    /// For local-p, around predicted positions, use
    /// [`LocalAttention`](crate::local::LocalAttention).
    ///
    /// Source: Luong et al. 2015, "Effective approaches to attention-based neural machine
    /// translation".
    #[doc(alias = "luong")]
    pub fn local_m(half_window: usize) -> Self {
        Self::none().window(half_window, half_window).aligned(Alignment::TopLeft)
    }

    /// Adds the causal rule.
    pub fn and_causal(mut self) -> Self {
        self.rules = self.rules.with(Id::Causal);
        self
    }

    /// Sets the key position of each query. The causal rule, `window`, `pattern`, `globals`,
    /// `exclude_self`, `alibi`, `relative` and `tree` use it.
    ///
    /// Except for [`Alignment::Offset`], the position follows from the shapes of q and k, or of
    /// each packed sequence. [`lengths`](Self::lengths) does not change it. For a cache filled to n
    /// keys, [`slice`](crate::TensorView::slice) k and v to n, or set
    /// [`query_offsets`](Self::query_offsets).
    ///
    /// The default is bottom-right. PyTorch's `is_causal` and FlexAttention's `q_idx` and `kv_idx`
    /// count queries and keys from 0, which is [`Alignment::TopLeft`].
    pub fn aligned(mut self, alignment: Alignment) -> Self {
        self.settings.alignment = alignment;
        self
    }

    /// Puts query `i` of batch entry `b` at key `query_offsets[b] + i`. This overrides
    /// [`aligned`](Self::aligned).
    ///
    /// The offset is the number of past keys. In ONNX's Attention it is the length of `past_key`,
    /// or `nonpad_kv_seqlen − q_len` if keys and values are in place. In FlashAttention's
    /// `flash_attn_with_kvcache` it is `cache_seqlens`. To hide keys past the end of a sequence,
    /// use the causal rule or [`lengths`](Self::lengths).
    ///
    /// Shape `[batch, 1, 1, 1]`, batch may be 1. An offset beyond 2^29 − 1 counts as that. Packed
    /// sequences and caches define their own positions and exclude this rule. On a device the dtype
    /// is U32.
    ///
    /// ```
    /// use wgpu_attention::{HostTensor, Mask};
    /// use wgpu_attention::mask::HostMask;
    /// // Keys in tensors of a fixed length, of which two sequences have filled 40 and 7 before this step.
    /// let past = [40, 7];
    /// let mask: HostMask = Mask::causal().window(15, 0).query_offsets(HostTensor::new(&past, [2, 1, 1, 1]));
    /// ```
    pub fn query_offsets(self, query_offsets: L) -> Self {
        self.with(Id::QueryOffsets, [Part::Number(query_offsets)])
    }

    /// Permits at most `left` keys before the query's position, the key at it, and `right` after
    /// it. A window of W tokens that ends with the query's key is `window(W - 1, 0)`. `usize::MAX`
    /// is no bound. With a causal mask or another window, the narrower bounds hold.
    #[doc(alias = "window_size")]
    #[doc(alias = "sliding_window")]
    pub fn window(mut self, left: usize, right: usize) -> Self {
        let Settings { left: l, right: r, .. } = &mut self.settings;
        *l = Some(l.map_or(left, |l| l.min(left)));
        *r = Some(r.map_or(right, |r| r.min(right)));
        self.rules = self.rules.with(Id::Window);
        self
    }

    /// Permits only keys of a regular sparse pattern: dilated, strided, fixed or local blocks. A
    /// later pattern replaces an earlier one.
    pub fn pattern(mut self, pattern: Pattern) -> Self {
        self.settings.pattern = Some(pattern);
        self.rules = self.rules.with(Id::Pattern);
        self
    }

    /// Hides the key at the query's position (`j ≠ i`).
    pub fn exclude_self(mut self) -> Self {
        self.rules = self.rules.with(Id::ExcludeSelf);
        self
    }

    /// Permits only the first `lengths[b, h, i]` keys. With packed sequences they count within the
    /// query's sequence.
    ///
    /// Shape `[batch, heads, q_len, 1]`, any of the first three may be 1. `[batch, 1, 1, 1]` is one
    /// length per sequence. A length beyond `kv_len` means all keys. On a device the dtype is U32.
    #[doc(alias = "nonpad_kv_seqlen")]
    #[doc(alias = "key_padding_mask")]
    pub fn lengths(self, lengths: L) -> Self {
        self.with(Id::Lengths, [Part::Number(lengths)])
    }

    /// Permits the first `prefix[b, h, i]` keys, even if the causal rule, `window` or `pattern`
    /// hides them. This is prefix-LM.
    ///
    /// Shaped and counted as [`lengths`](Self::lengths). On a device the dtype is U32.
    ///
    /// Source: Raffel et al. 2020, "Exploring the limits of transfer learning", 3.2.1.
    pub fn prefix(self, prefix: L) -> Self {
        self.with(Id::Prefix, [Part::Number(prefix)])
    }

    /// Packs sequences of different lengths one after the other in one batch entry, without
    /// padding. Sequence `s` has queries `query_starts[s] .. query_starts[s + 1]` and keys
    /// `key_starts[s] .. key_starts[s + 1]` (`cu_seqlens` in other libraries).
    ///
    /// A query sees only keys of its sequence. [`aligned`](Self::aligned) sets its position within
    /// the sequence. Queries before the first sequence or past the last see no keys.
    ///
    /// Both tensors are `[batch, 1, 1, sequences + 1]` and ascending; batch may be 1. A start past
    /// the end of the tensor counts as its end. On a device the dtype is U32.
    ///
    /// ```
    /// use wgpu_attention::{HostTensor, Mask};
    /// use wgpu_attention::mask::HostMask;
    /// let starts = [0, 5, 12]; // sequences of 5 and of 7 tokens, in tensors of length 12
    /// let starts = HostTensor::new(&starts, [1, 1, 1, 3]);
    /// let mask: HostMask = Mask::causal().packed(starts, starts);
    /// ```
    #[doc(alias = "cu_seqlens_q")]
    #[doc(alias = "cu_seqlens_k")]
    pub fn packed(self, query_starts: L, key_starts: L) -> Self {
        self.with(Id::Packed, [Part::Number(query_starts), Part::Number(key_starts)])
    }

    /// Permits only keys of the query's document, which have the same number as the query.
    ///
    /// `queries` is `[batch, heads, q_len, 1]`, `keys` is `[batch, heads, 1, kv_len]`. Any axis
    /// except the last length may be 1. Unlike `packed` it changes no position, and documents need
    /// not be contiguous. On a device the dtype is U32.
    ///
    /// Fused kernels compare a tile of keys with the range of document numbers of a tile of
    /// queries. They skip tiles of keys whose numbers all lie outside of it. So documents should be
    /// contiguous.
    pub fn documents(self, queries: L, keys: L) -> Self {
        self.with(Id::Documents, [Part::Number(queries), Part::Number(keys)])
    }

    /// Hides or permits whole blocks of pairs; see [`Blocks`].
    #[doc(alias = "BlockMask")]
    #[doc(alias = "block_mask")]
    pub fn blocks(mut self, blocks: Blocks<L>) -> Self {
        self.settings.block_size = blocks.size;
        self.with(Id::Blocks, [Part::Number(blocks.map)])
    }

    /// Permits only pairs that hold `true`, as in PyTorch's `scaled_dot_product_attention`. The
    /// masks of `nn.MultiheadAttention` have the opposite meaning.
    ///
    /// Shape `[batch, heads, q_len, kv_len]`, any may be 1. On a device the dtype is Bool, one byte
    /// each. A shader that writes a U32 for each pair needs no conversion: read its tensor in a
    /// [`MaskMod`](crate::mask::MaskMod).
    ///
    /// ```
    /// use wgpu_attention::{Error, Mask, TensorView};
    /// use wgpu_attention::mask::{Captured, DeviceMask, MaskMod};
    ///
    /// // `seen` is U32, [batch or 1, heads or 1, q_len, kv_len]; anything but 0 is a pair that is seen.
    /// fn from_numbers(seen: TensorView<'_>) -> Result<DeviceMask<'_>, Error> {
    ///     let text = "fn mask_mod(at: At) -> bool { return seen_at(at.batch, at.head, at.query, at.key) != 0u; }";
    ///     let read = MaskMod::capturing(text, &[Captured::number("seen")])?;
    ///     Ok(Mask::none().mask_mod(read.with(&[seen])))
    /// }
    /// ```
    pub fn attn_mask(self, attn_mask: K) -> Self {
        self.with(Id::AttnMask, [Part::Bool(attn_mask)])
    }

    /// Restricts drafts to the branches of a tree, for speculative decoding (Miao et al. 2024,
    /// "SpecInfer").
    ///
    /// Draft keys begin at the position of query 0. Query `i` sees draft key `j` only if
    /// `tree[b, h, i, j − position of query 0]` is `true`. The rule does not restrict older keys.
    /// Shape `[batch, heads, q_len, q_len]`, batch and heads may be 1. Distances still follow the
    /// order of the rows, not the depth in the tree. Packed sequences exclude this rule.
    pub fn tree(self, tree: K) -> Self {
        self.with(Id::Tree, [Part::Bool(tree)])
    }

    /// Permits only keys that hold `true`, usually `[batch, 1, 1, kv_len]` for padding.
    ///
    /// **`true` is a key that is seen**, as everywhere here and in PyTorch's SDPA. In
    /// `nn.MultiheadAttention`, `true` in `key_padding_mask` is a key that is *ignored*: invert
    /// that mask.
    ///
    /// Use it as a second boolean mask next to [`attn_mask`](Self::attn_mask). Fused kernels skip
    /// tiles of keys that are all hidden.
    ///
    /// For padding on the left, combine this rule with the causal one. [`lengths`](Self::lengths)
    /// hides only keys at the end. A cache also holds the padding: `kv_len` is its capacity, and
    /// every step has the same mask.
    /// [`EncoderForward::cache`](crate::layers::EncoderForward::cache) describes this mask and the
    /// positions.
    ///
    /// ```
    /// use wgpu_attention::{HostTensor, Mask};
    /// use wgpu_attention::mask::HostMask;
    /// // Two prompts of 4 tokens and of 2, padded on the left to 4; room for 4 more tokens.
    /// let seen: Vec<bool> = [0, 2].iter().flat_map(|padding| (0..8).map(move |key| key >= *padding)).collect();
    /// let mask: HostMask = Mask::causal().key_padding_mask(HostTensor::new(&seen, [2, 1, 1, 8]));
    /// ```
    #[doc(alias = "src_key_padding_mask")]
    pub fn key_padding_mask(self, key_padding_mask: K) -> Self {
        self.with(Id::KeyPaddingMask, [Part::Bool(key_padding_mask)])
    }

    /// Sets global tokens. Every query sees the keys that hold `true`. Queries at such a key see
    /// every key. This overrides `window` and `pattern`, but not the causal rule.
    ///
    /// Shape `[batch, heads, 1, kv_len]`, any may be 1. With the causal rule and a window, the
    /// first few tokens are StreamingLLM's sinks (Xiao et al. 2023).
    ///
    /// Source: Beltagy et al. 2020, "Longformer".
    pub fn globals(self, globals: K) -> Self {
        self.with(Id::Globals, [Part::Bool(globals)])
    }

    /// Adds a bias to the scaled and softcapped scores. −∞ hides the pair, even if its score is NaN
    /// or infinite.
    ///
    /// Shape `[batch, heads, q_len, kv_len]`, any may be 1. On a device the dtype is F32, F16 or
    /// BF16. Use it for a float `attn_mask` of PyTorch. For a boolean one use
    /// [`attn_mask`](Self::attn_mask).
    #[doc(alias = "attn_mask")]
    pub fn bias(self, bias: B) -> Self {
        self.with(Id::Bias, [Part::Float(bias)])
    }

    /// Adds ALiBi: `slope · (j − position)` for key `j`. With positive slopes the score falls with
    /// the distance behind the query (Press et al. 2022, "Train short, test long").
    ///
    /// Shape `[batch, heads, 1, 1]`, any may be 1. On a device the dtype is F32, F16 or BF16.
    pub fn alibi(mut self, slopes: B) -> Self {
        self.settings.symmetric = false;
        self.with(Id::Alibi, [Part::Float(slopes)])
    }

    /// Adds ALiBi for queries that see both sides: `−slope · |j − position|`. Shaped as
    /// [`alibi`](Self::alibi).
    pub fn alibi_symmetric(mut self, slopes: B) -> Self {
        self.settings.symmetric = true;
        self.with(Id::Alibi, [Part::Float(slopes)])
    }

    /// Adds `table[b, h, 0, clamp(j − position, −r, r) + r]`, a learned bias per distance. The
    /// outermost entries are for all larger distances.
    ///
    /// Shape `[batch, heads, 1, 2·r + 1]`, batch and heads may be 1. On a device the dtype is F32,
    /// F16 or BF16.
    ///
    /// Distances are key − query, as for [`alibi`](Self::alibi): the last entry is for later keys.
    /// Reverse tables that count query − key, as in FlexAttention's example (`q_idx - kv_idx`). The
    /// tables of Swin have two dimensions: [`presets::relative_2d`](crate::presets::relative_2d).
    /// The tables of T5 have buckets: [`presets::t5`](crate::presets::t5).
    ///
    /// Source: Shaw et al. 2018, "Self-attention with relative position representations", as a
    /// bias.
    pub fn relative(self, table: B) -> Self {
        self.with(Id::Relative, [Part::Float(table)])
    }

    /// Adds attention sinks: one more logit per head in the softmax, without a value. So a query's
    /// weights add up to less than 1 (gpt-oss 2025). The sink counts in lse: weights are
    /// `exp(score − lse)`.
    ///
    /// Shape `[batch, heads, 1, 1]`, any may be 1. On a device the dtype is F32, F16 or BF16.
    pub fn sink_logits(self, sink_logits: B) -> Self {
        self.with(Id::SinkLogits, [Part::Float(sink_logits)])
    }
}
