//! The methods that build a mask: what its rules mean, and the shapes of their tensors.

use super::{Alignment, Blocks, Id, Mask, Part, Pattern, Settings, slot};

impl<L, K, B, M: Default> Mask<L, K, B, M> {
    fn with<const N: usize>(mut self, id: Id, tensors: [Part<L, K, B>; N]) -> Self {
        self.rules = self.rules.with(id);
        for (n, tensor) in tensors.into_iter().enumerate() {
            self.tensors[slot(id, n)] = Some(tensor);
        }
        self
    }

    /// Causal, aligned bottom-right: query `i` sees keys `j ≤ i + kv_len − q_len`.
    ///
    /// `is_causal=True` of PyTorch is aligned top-left instead:
    /// [`causal_top_left`](Self::causal_top_left).
    #[doc(alias = "is_causal")]
    pub fn causal() -> Self {
        Self::none().and_causal()
    }

    /// Causal, aligned top-left: query `i` sees keys `j ≤ i`. PyTorch's
    /// `scaled_dot_product_attention(is_causal=True)` is this one, and FlexAttention's `q_idx >=
    /// kv_idx`; FlashAttention (from 2.1 on) is [`causal`](Self::causal). With as many keys as
    /// queries both are the same.
    #[doc(alias = "is_causal")]
    pub fn causal_top_left() -> Self {
        Self::causal().aligned(Alignment::TopLeft)
    }

    /// Luong's local-m (Luong et al. 2015, "Effective approaches to attention-based neural machine
    /// translation"): query `i` sees the keys at most `half_window` from key `i`, as in a monotonic
    /// alignment. It is `none().window(half_window, half_window)`, aligned top-left. Local-p,
    /// around predicted positions, is [`LocalAttention`](crate::local::LocalAttention).
    #[doc(alias = "luong")]
    pub fn local_m(half_window: usize) -> Self {
        Self::none().window(half_window, half_window).aligned(Alignment::TopLeft)
    }

    /// Adds the causal rule.
    pub fn and_causal(mut self) -> Self {
        self.rules = self.rules.with(Id::Causal);
        self
    }

    /// Chooses where the query's own position lies, for everything that speaks of it: the causal
    /// rule, `window`, `pattern`, `globals`, `exclude_self`, `alibi`, `relative`, `tree`. But for
    /// [`Alignment::Offset`] it follows from the shapes of q and k alone, or of every packed
    /// sequence; [`lengths`](Self::lengths) does not move it. For a cache filled to n keys,
    /// [`slice`](crate::TensorView::slice) k and v to n, or say where the queries
    /// stand: [`query_offsets`](Self::query_offsets).
    ///
    /// The default is bottom-right. PyTorch's `is_causal` and FlexAttention's `q_idx` and `kv_idx`
    /// count queries and keys from 0, which is [`Alignment::TopLeft`].
    pub fn aligned(mut self, alignment: Alignment) -> Self {
        self.settings.alignment = alignment;
        self
    }

    /// Query `i` of batch entry `b` stands at key `query_offsets[b] + i`, whatever
    /// [`aligned`](Self::aligned) says: so many of its keys are past (in ONNX's Attention the
    /// length of `past_key`, or `nonpad_kv_seqlen − q_len` where keys and values are in place;
    /// `cache_seqlens` in FlashAttention's `flash_attn_with_kvcache`). Keys past the end of a
    /// sequence are for the causal rule or [`lengths`](Self::lengths) to hide. Shape `[batch, 1, 1,
    /// 1]`, batch may be 1. An offset beyond 2^29 − 1 counts as that. Not with packed sequences or
    /// a cache, which have positions of their own. On a device the dtype is U32.
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

    /// At most `left` keys before the query's own position and `right` after it are seen, and the
    /// one at it: a window of W tokens that ends with the query's own is `window(W - 1, 0)`.
    /// `usize::MAX` is no bound. With a causal mask or another window, the narrower bounds hold.
    #[doc(alias = "window_size")]
    #[doc(alias = "sliding_window")]
    pub fn window(mut self, left: usize, right: usize) -> Self {
        let Settings { left: l, right: r, .. } = &mut self.settings;
        *l = Some(l.map_or(left, |l| l.min(left)));
        *r = Some(r.map_or(right, |r| r.min(right)));
        self.rules = self.rules.with(Id::Window);
        self
    }

    /// Only keys of a regular sparse pattern are seen: dilated, strided, fixed or local blocks. The
    /// last one set counts.
    pub fn pattern(mut self, pattern: Pattern) -> Self {
        self.settings.pattern = Some(pattern);
        self.rules = self.rules.with(Id::Pattern);
        self
    }

    /// A query does not see the key at its own position (`j ≠ i`).
    pub fn exclude_self(mut self) -> Self {
        self.rules = self.rules.with(Id::ExcludeSelf);
        self
    }

    /// Only the first `lengths[b, h, i]` keys are seen, of the query's own sequence if they are
    /// packed. Shape `[batch, heads, q_len, 1]`, any of the first three may be 1: `[batch, 1, 1,
    /// 1]` is one length per sequence. A length beyond `kv_len` means all keys. On a device the
    /// dtype is U32.
    #[doc(alias = "nonpad_kv_seqlen")]
    #[doc(alias = "key_padding_mask")]
    pub fn lengths(self, lengths: L) -> Self {
        self.with(Id::Lengths, [Part::Number(lengths)])
    }

    /// Prefix-LM: the first `prefix[b, h, i]` keys are seen whatever the causal rule, `window` and
    /// `pattern` say (Raffel et al. 2020, "Exploring the limits of transfer learning", 3.2.1).
    /// Shaped and counted as
    /// [`lengths`](Self::lengths). On a device the dtype is U32.
    pub fn prefix(self, prefix: L) -> Self {
        self.with(Id::Prefix, [Part::Number(prefix)])
    }

    /// Sequences of different lengths side by side in one batch entry, without padding: sequence
    /// `s` has queries `query_starts[s] .. query_starts[s + 1]` and keys `key_starts[s] ..
    /// key_starts[s + 1]` (`cu_seqlens` elsewhere). A query sees keys of its own sequence only, and
    /// stands where `aligned` says within it; queries before the first sequence or past the last
    /// see none. Both `[batch, 1, 1, sequences + 1]`, ascending, batch may be 1; a start past the
    /// end of the tensor is its end. On a device the dtype is U32.
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

    /// Only keys of the query's own document are seen: those with the same number. `queries` is
    /// `[batch, heads, q_len, 1]`, `keys` `[batch, heads, 1, kv_len]`, any but the last length may
    /// be 1. Unlike `packed` it moves no position, and documents need not be contiguous. On a
    /// device the dtype is U32.
    ///
    /// Fused kernels skip tiles of keys whose numbers all lie outside of the least and the largest
    /// number of a tile of queries. So documents should lie side by side.
    pub fn documents(self, queries: L, keys: L) -> Self {
        self.with(Id::Documents, [Part::Number(queries), Part::Number(keys)])
    }

    /// Whole blocks of pairs that are hidden, or full; see [`Blocks`].
    #[doc(alias = "BlockMask")]
    #[doc(alias = "block_mask")]
    pub fn blocks(mut self, blocks: Blocks<L>) -> Self {
        self.settings.block_size = blocks.size;
        self.with(Id::Blocks, [Part::Number(blocks.map)])
    }

    /// Only pairs that hold `true` are seen, as in PyTorch's `scaled_dot_product_attention`; the
    /// masks of `nn.MultiheadAttention` say the opposite. Shape `[batch, heads, q_len, kv_len]`,
    /// any may be 1.
    ///
    /// On a device the dtype is Bool, one byte each. A shader that writes a U32 for each pair needs
    /// no conversion: read its tensor in a [`MaskMod`](crate::mask::MaskMod).
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

    /// Tree of drafts, for speculative decoding (Miao et al. 2024, "SpecInfer"): of the queries'
    /// own keys, those from query 0's position on, query `i` sees key `j` only where `tree[b, h, i,
    /// j − position of query 0]` holds `true`; older keys are not asked. Shape `[batch, heads,
    /// q_len, q_len]`, batch and heads may be 1. Distances still follow the order of the rows, not
    /// the depth in the tree. Not with packed sequences.
    pub fn tree(self, tree: K) -> Self {
        self.with(Id::Tree, [Part::Bool(tree)])
    }

    /// **`true` is a key that is seen**, as everywhere here and in PyTorch's SDPA; in `nn.MultiheadAttention`'s
    /// `key_padding_mask` `true` is a key that is *ignored*: invert that one.
    ///
    /// Only keys that hold `true` are seen: a second boolean mask beside
    /// [`attn_mask`](Self::attn_mask), usually `[batch, 1, 1, kv_len]` for padding. Fused kernels
    /// skip tiles of keys that are all hidden.
    ///
    /// Padding on the left needs this rule beside the causal one, because
    /// [`lengths`](Self::lengths) hides keys at the end only. With a cache, which also holds the
    /// padding, `kv_len` is its capacity and every step has the same mask:
    /// [`EncoderForward::cache`](crate::layers::EncoderForward::cache) describes it with the positions.
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

    /// Global tokens: keys that hold `true` are seen by every query, and queries that stand at such
    /// a key see every key, whatever `window` and `pattern` say (Beltagy et al. 2020,
    /// "Longformer"). The causal rule holds for them too: with it and a window the first few tokens
    /// are StreamingLLM's (Xiao et al. 2023). Shape `[batch, heads, 1, kv_len]`, any may be 1.
    pub fn globals(self, globals: K) -> Self {
        self.with(Id::Globals, [Part::Bool(globals)])
    }

    /// Added to the scaled and softcapped scores. Shape `[batch, heads, q_len, kv_len]`, any may
    /// be 1. On a device the dtype is F32, F16 or BF16. −∞ hides the pair, even if its score is NaN
    /// or infinite.
    ///
    /// A float `attn_mask` of PyTorch is this one; a boolean one is [`attn_mask`](Self::attn_mask).
    #[doc(alias = "attn_mask")]
    pub fn bias(self, bias: B) -> Self {
        self.with(Id::Bias, [Part::Float(bias)])
    }

    /// ALiBi: adds `slope · (j − position)` to the score of key `j`, which falls with the distance
    /// behind the query for positive slopes (Press et al. 2022, "Train short, test long"). Shape
    /// `[batch, heads, 1, 1]`, any may be 1. On a device the dtype is F32, F16 or BF16.
    pub fn alibi(mut self, slopes: B) -> Self {
        self.settings.symmetric = false;
        self.with(Id::Alibi, [Part::Float(slopes)])
    }

    /// ALiBi for queries that see both sides: adds `−slope · |j − position|`. Shaped as
    /// [`alibi`](Self::alibi).
    pub fn alibi_symmetric(mut self, slopes: B) -> Self {
        self.settings.symmetric = true;
        self.with(Id::Alibi, [Part::Float(slopes)])
    }

    /// Adds `table[b, h, 0, clamp(j − position, −r, r) + r]`: a learned bias per distance, the
    /// outermost for all that are further (Shaw et al. 2018, "Self-attention with relative position
    /// representations", as a bias). Shape `[batch, heads, 1, 2·r + 1]`, batch and heads may be 1.
    /// On a device the dtype is F32, F16 or BF16.
    ///
    /// Distances are key − query, as for [`alibi`](Self::alibi): the last entry is of later keys.
    /// Reverse tables that count query − key, as FlexAttention's example (`q_idx - kv_idx`) does.
    /// The tables of Swin have two dimensions and those of T5 have
    /// buckets: [`presets::relative_2d`](crate::presets::relative_2d),
    /// [`presets::t5`](crate::presets::t5).
    pub fn relative(self, table: B) -> Self {
        self.with(Id::Relative, [Part::Float(table)])
    }

    /// Attention sinks: one more logit per head that takes its share of the softmax and has no
    /// value, so that a query's weights add up to less than 1 (gpt-oss 2025). It counts in lse:
    /// weights are `exp(score − lse)`. Shape `[batch, heads, 1, 1]`, any may be 1. On a device the
    /// dtype is F32, F16 or BF16.
    pub fn sink_logits(self, sink_logits: B) -> Self {
        self.with(Id::SinkLogits, [Part::Float(sink_logits)])
    }
}
