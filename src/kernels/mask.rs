//! Masks as WGSL: the parts a call uses, composed into the functions of `mask/query.wgsl`.

use crate::device::DeviceFacts;
use std::fmt::Write as _;

use super::cache::CacheVariant;
use super::shader;
use crate::kernel::{Binding, View, Width, params, shared};
use crate::mask::{Alignment, DeviceMask};
use crate::pattern::{PatternParams, PatternPart};
use crate::problem::Shape;
use crate::storage::LayoutKind;
use crate::tensor::{DType, TensorView, Window, broadcast};

/// Which parts a call's mask has. MaskVariant that are absent leave no trace in the shader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct MaskVariant {
    pub causal: bool,
    pub window: bool,
    pub pattern: bool,
    pub exclude_self: bool,
    pub lengths: bool,
    pub prefix: bool,
    pub packed: bool,
    pub documents: bool,
    pub blocks: bool,
    pub attn_mask: bool,
    pub key_padding_mask: bool,
    pub globals: bool,
    pub bias: Option<DType>,
    pub alibi: Option<DType>,
    pub relative: Option<DType>,
    pub sink_logits: Option<DType>,
    pub softcap: bool,
    pub appended: bool,
    pub tree: bool,
    /// Keys are in a cache, whose lengths count.
    pub cached: bool,
    /// That cache is a ring, whose first tokens stay.
    pub ring: bool,
}

impl MaskVariant {
    pub fn of(mask: &DeviceMask, softcap: bool, appended: bool) -> Self {
        let dtype = |t: Option<TensorView>| t.map(|t| t.dtype);
        MaskVariant {
            causal: mask.band.causal,
            window: mask.band.left.is_some(),
            pattern: mask.band.pattern.is_some(),
            exclude_self: mask.band.exclude_self,
            lengths: mask.lengths.is_some(),
            prefix: mask.prefix.is_some(),
            packed: mask.packed.is_some(),
            documents: mask.documents.is_some(),
            blocks: mask.blocks.is_some(),
            attn_mask: mask.attn_mask.is_some(),
            key_padding_mask: mask.key_padding_mask.is_some(),
            globals: mask.globals.is_some(),
            bias: dtype(mask.bias),
            alibi: dtype(mask.alibi.map(|a| a.slopes)),
            relative: dtype(mask.relative),
            sink_logits: dtype(mask.sink_logits),
            softcap,
            appended,
            tree: mask.tree.is_some(),
            cached: false,
            ring: false,
        }
    }

    /// The same rules for keys in a cache.
    pub fn in_cache(self, cache: &CacheVariant) -> Self {
        MaskVariant { cached: true, ring: cache.layout_kind == LayoutKind::Ring, ..self }
    }

    /// Only what bounds the range of keys: all that the tiled products look at.
    pub fn range_only(self) -> Self {
        MaskVariant {
            causal: self.causal,
            window: self.window && !self.window_by_pairs(),
            lengths: self.lengths,
            prefix: self.prefix,
            packed: self.packed,
            appended: self.appended,
            ..MaskVariant::default()
        }
    }

    /// Only what a block map stands for: which pairs are seen, and whether they have a bias.
    pub fn blocks_only(self) -> Self {
        MaskVariant { alibi: None, relative: None, sink_logits: None, softcap: false, appended: false, ..self }
    }

    /// Whether the window is asked pair by pair, because something lifts it for some keys: what a query sees is
    /// then no interval.
    fn window_by_pairs(&self) -> bool {
        let lifted = self.globals || self.blocks || self.ring || self.prefix;
        lifted && (self.window || self.pattern)
    }

    /// Whether anything depends on single pairs: what only bounds the range of a query's keys does not.
    /// Appended keys lie outside of that range, so with them every pair is asked for.
    pub fn is_per_pair(&self) -> bool {
        self.mods_scores()
            || self.appended
            || self.exclude_self
            || self.pattern
            || self.window_by_pairs()
            || self.documents
            || self.blocks
            || self.attn_mask
            || self.tree
            || self.key_padding_mask
    }

    /// Whether scores change by softcap or bias.
    fn mods_scores(&self) -> bool {
        self.bias.is_some() || self.mods_full_blocks()
    }

    /// Whether scores change in a block that is full too.
    pub fn mods_full_blocks(&self) -> bool {
        self.softcap || self.alibi.is_some() || self.relative.is_some()
    }

    /// None, each alone, and sets that work together; with q, k, v and out no more than eight buffers.
    pub fn all() -> Vec<Self> {
        let none = MaskVariant::default();
        let f32 = Some(DType::F32);
        let band =
            MaskVariant { causal: true, window: true, pattern: true, exclude_self: true, ..none };
        vec![
            none,
            MaskVariant { causal: true, ..none },
            MaskVariant { window: true, ..none },
            MaskVariant { pattern: true, ..none },
            MaskVariant { exclude_self: true, ..none },
            MaskVariant { lengths: true, ..none },
            MaskVariant { prefix: true, ..none },
            MaskVariant { causal: true, window: true, prefix: true, ..none },
            MaskVariant { packed: true, ..none },
            MaskVariant { documents: true, ..none },
            MaskVariant { blocks: true, ..none },
            MaskVariant { attn_mask: true, ..none },
            MaskVariant { key_padding_mask: true, ..none },
            MaskVariant { causal: true, tree: true, ..none },
            MaskVariant { window: true, globals: true, ..none },
            MaskVariant { bias: f32, ..none },
            MaskVariant { bias: Some(DType::F16), ..none },
            MaskVariant { alibi: f32, ..none },
            MaskVariant { alibi: Some(DType::F16), ..none },
            MaskVariant { relative: f32, ..none },
            MaskVariant { relative: Some(DType::F16), ..none },
            MaskVariant { sink_logits: f32, ..none },
            MaskVariant { sink_logits: Some(DType::F16), ..none },
            MaskVariant { softcap: true, ..none },
            MaskVariant { appended: true, ..none },
            MaskVariant {
                lengths: true,
                prefix: true,
                attn_mask: true,
                bias: f32,
                softcap: true,
                appended: true,
                ..band
            },
            MaskVariant { packed: true, documents: true, appended: true, ..band },
            MaskVariant {
                blocks: true,
                key_padding_mask: true,
                globals: true,
                alibi: f32,
                appended: true,
                ..band
            },
            MaskVariant { blocks: true, bias: f32, relative: f32, sink_logits: f32, softcap: true, ..none },
            MaskVariant { packed: true, prefix: true, lengths: true, causal: true, window: true, ..none },
        ]
    }

    /// The tensors of these parts by name, in binding order.
    fn used(&self) -> impl Iterator<Item = (&'static str, DType)> + use<> {
        let number = |used: bool| used.then_some(DType::U32);
        let bools = |used: bool| used.then_some(DType::Bool);
        let all = [
            ("prefix", number(self.prefix)),
            ("lengths", number(self.lengths)),
            ("query_starts", number(self.packed)),
            ("key_starts", number(self.packed)),
            ("query_documents", number(self.documents)),
            ("key_documents", number(self.documents)),
            ("blocks", number(self.blocks)),
            ("attn_mask", bools(self.attn_mask)),
            ("tree", bools(self.tree)),
            ("key_padding_mask", bools(self.key_padding_mask)),
            ("globals", bools(self.globals)),
            ("bias", self.bias),
            ("slopes", self.alibi),
            ("relative", self.relative),
            ("sink_logits", self.sink_logits),
        ];
        all.into_iter().filter_map(|(name, dtype)| Some((name, dtype?)))
    }

    /// The storage buffers of these parts.
    pub fn bindings(&self) -> Vec<Binding> {
        self.used().map(|(name, dtype)| Binding::read(name, dtype, Width::One)).collect()
    }

    /// The windows of `mask` that [`bindings`](Self::bindings) names.
    pub fn windows<'a>(&self, mask: &DeviceMask<'a>, device: &DeviceFacts) -> Vec<Window<'a>> {
        let tensors = mask.tensors();
        let of = |(name, _)| tensors.iter().find(|(given, _)| *given == name).map(|(_, t)| t.window(device));
        self.used().filter_map(of).collect()
    }

    /// The WGSL of these parts and of the functions composed of them.
    pub fn wgsl(&self) -> String {
        let mut text = shader!("mask/query").to_string();
        let files = [
            (self.pattern, shader!("mask/pattern")),
            (self.prefix, shader!("mask/prefix")),
            (self.lengths, shader!("mask/lengths")),
            (self.packed, shader!("mask/packed")),
            (self.blocks, shader!("mask/blocks")),
            (self.tree, shader!("mask/tree")),
            (self.relative.is_some(), shader!("mask/relative")),
            (self.sink_logits.is_some(), shader!("mask/sink_logits")),
            (self.softcap, shader!("mask/softcap")),
        ];
        for (_, source) in files.iter().filter(|(used, _)| *used) {
            let _ = write!(text, "\n{source}");
        }
        for function in [self.query_in(), self.mask_mod(), self.bias_of(), self.score_mod()] {
            let _ = write!(text, "\n{function}");
        }
        if self.sink_logits.is_none() {
            text.push_str(
                "\nfn with_sink(total: vec2<f32>, b: u32, h: u32) -> vec2<f32> {\n    return total;\n}\n",
            );
        }
        text
    }

    fn query_in(&self) -> String {
        let interval = !self.window_by_pairs();
        let mut f = Function::new("query_in(b: u32, h: u32, i: u32, alone: bool) -> Query");
        f.line(true, "var keys = vec2<i32>(0, i32(p.mask.masked_len));");
        f.line(true, "var position = i32(i) + p.mask.diagonal;");
        f.line(self.cached, "let queries = cached_queries(b, p.mask.q_len);");
        f.line(self.cached, "keys.y = i32(cached_len(b));");
        f.line(
            self.cached,
            "position = i32(i) + select(0, keys.y - i32(queries), p.mask.bottom_right != 0u);",
        );
        // Beyond the queries of a sequence that has fewer.
        f.line(self.cached, "if alone && i >= queries {\n        keys.y = 0;\n    }");
        f.line(self.packed, "let packed = packed_keys(b, i);");
        f.line(self.packed, "keys = packed.xy;");
        f.line(self.packed, "position = packed.z;");
        f.line(true, "var r = keys;");
        f.line(self.causal, "r.y = min(r.y, position + 1);");
        f.line(self.window && interval, "r.y = min(r.y, position + p.mask.right + 1);");
        f.line(self.window && interval, "r.x = max(r.x, position - p.mask.left);");
        let pattern = self.pattern && interval;
        f.line(pattern, "r = pattern_key_range(r, keys.x, position, h);");
        f.line(self.prefix, "r = prefix_key_range(r, keys, b, h, i, alone);");
        f.line(self.lengths, "r = lengths_key_range(r, keys, b, h, i, alone);");
        // Within the sequence, so that bounds do not fall from one sequence to the next.
        f.line(true, "let stop = u32(clamp(r.y, keys.x, keys.y));");
        f.line(true, "let first = min(u32(clamp(r.x, keys.x, keys.y)), stop);");
        f.line(
            true,
            "var q = Query(b, h, i, first, stop, stop, u32(keys.x), position, 0u, 0u, 0u, false, 0.0);",
        );
        f.line(self.prefix, "q.prefix = u32(prefix_end(keys, b, h, i));");
        f.line(
            self.documents,
            "q.document = query_documents_at(view_at(p.mask.query_documents, b, h, i, 0u));",
        );
        // A query that stands at no key of its own sequence is no global token.
        let standing = "q.standing = globals_at(view_at(p.mask.globals, b, h, 0u, u32(position)));";
        f.line(
            self.globals,
            &format!("if position >= keys.x && position < keys.y {{\n        {standing}\n    }}"),
        );
        f.line(self.alibi.is_some(), "q.slope = slopes_at(view_at(p.mask.slopes, b, h, 0u, 0u));");
        f.line(self.appended, "q.first = min(q.first, p.mask.masked_len);");
        f.line(self.appended, "q.end = p.mask.kv_len;");
        f.line(self.cached, "q.shift = cached_shift(b);");
        f.line(self.cached, "q.first = cached_index(q.first, q.shift);");
        f.line(self.cached, "q.end = cached_index(q.end, q.shift);");
        f.end("q")
    }

    /// A function of a query and a key. Of a cache it is given which of the keys left; rules speak of positions.
    fn by_key(&self, signature: &str) -> Function {
        if !self.cached {
            return Function::new(signature);
        }
        let mut f = Function::new(&signature.replace("j: u32", "t: u32"));
        f.line(true, "let j = cached_key(t, q.shift);");
        f
    }

    fn mask_mod(&self) -> String {
        let by_pairs = self.window_by_pairs();
        let mut f = self.by_key("mask_mod(q: Query, j: u32) -> bool");
        // The interval of a query goes on to the keys that were appended.
        f.answer(self.appended, "j >= p.mask.masked_len", true);
        f.answer(self.appended, "j >= q.stop", false);
        f.line(self.blocks, "let block = block_at(q, j);");
        f.answer(self.blocks, "block == HIDDEN", false);
        f.answer(self.blocks, "block == FULL", true);
        f.answer(self.exclude_self, "distance(q, j) == 0", false);
        let document = "key_documents_at(view_at(p.mask.key_documents, q.b, q.h, 0u, j)) != q.document";
        f.answer(self.documents, document, false);
        f.answer(self.attn_mask, "!attn_mask_at(view_at(p.mask.attn_mask, q.b, q.h, q.i, j))", false);
        f.answer(self.tree, "!tree_mask_mod(q, j)", false);
        f.answer(
            self.key_padding_mask,
            "!key_padding_mask_at(view_at(p.mask.key_padding_mask, q.b, q.h, q.i, j))",
            false,
        );
        if by_pairs || self.pattern {
            f.answer(self.prefix, "j < q.prefix", true);
            // The interval reaches as far as the prefix does.
            f.answer(self.prefix && self.causal, "distance(q, j) > 0", false);
            let global = "q.standing || globals_at(view_at(p.mask.globals, q.b, q.h, 0u, j))";
            f.answer(self.globals, global, true);
            f.answer(self.ring, "j < p.cache.sinks", true);
            f.answer(self.window && by_pairs, "distance(q, j) < -p.mask.left", false);
            f.answer(self.window && by_pairs, "distance(q, j) > p.mask.right", false);
            f.answer(self.pattern, "!pattern_mask_mod(q, j)", false);
        }
        f.end("true")
    }

    fn bias_of(&self) -> String {
        let mut f = self.by_key("bias_of(q: Query, j: u32) -> f32");
        let bias = "bias_at(view_at(p.mask.bias, q.b, q.h, q.i, j))";
        f.line(self.bias.is_some() && self.blocks, "if block_at(q, j) == FULL {\n        return 0.0;\n    }");
        f.end(if self.bias.is_some() { bias } else { "0.0" })
    }

    fn score_mod(&self) -> String {
        let mut f = self.by_key("score_mod(score: f32, q: Query, j: u32) -> f32");
        f.line(true, "var x = score;");
        f.line(self.softcap, "x = softcap(x);");
        let tensors = self.bias.is_some() || self.alibi.is_some() || self.relative.is_some();
        f.line(self.appended && tensors, "if j >= p.mask.masked_len {\n        return x;\n    }");
        f.line(self.bias.is_some(), if self.cached { "x += bias_of(q, t);" } else { "x += bias_of(q, j);" });
        f.line(
            self.alibi.is_some(),
            "x += q.slope * f32(select(distance(q, j), -abs(distance(q, j)), p.mask.symmetric != 0u));",
        );
        f.line(self.relative.is_some(), "x += relative_bias(q, j);");
        f.end("x")
    }
}

/// A WGSL function, line by line.
struct Function(String);

impl Function {
    fn new(signature: &str) -> Self {
        Function(format!("fn {signature} {{\n"))
    }

    fn line(&mut self, used: bool, line: &str) {
        if used {
            let _ = writeln!(self.0, "    {line}");
        }
    }

    fn answer(&mut self, used: bool, condition: &str, answer: bool) {
        self.line(used, &format!("if {condition} {{\n        return {answer};\n    }}"));
    }

    fn end(mut self, result: &str) -> String {
        let _ = writeln!(self.0, "    return {result};\n}}");
        self.0
    }
}

params! {
    /// The WGSL `MaskParams`.
    pub(crate) struct MaskParams {
        prefix: View,
        lengths: View,
        query_starts: View,
        key_starts: View,
        query_documents: View,
        key_documents: View,
        blocks: View,
        attn_mask: View,
        tree: View,
        key_padding_mask: View,
        globals: View,
        bias: View,
        slopes: View,
        relative: View,
        sink_logits: View,
        pattern: [u32; 4],
        block: [u32; 2],
        diagonal: i32,
        left: i32,
        right: i32,
        reach: i32,
        masked_len: u32,
        q_len: u32,
        kv_len: u32,
        sequences: u32,
        bottom_right: u32,
        symmetric: u32,
        softcap: f32,
        neg_inf: f32,
        pad: [u32; 2],
    }
}
shared! { MaskParams = "MaskParams" }

impl MaskParams {
    /// `appended` of the `kv_len` keys stand outside of the mask.
    pub fn new(
        mask: &DeviceMask,
        shape: &Shape,
        appended: usize,
        softcap: Option<f32>,
        device: &DeviceFacts,
    ) -> Self {
        let view = |t: Option<TensorView>| {
            t.map_or(View::default(), |t| View::from(broadcast(t.window(device).layout)))
        };
        let masked_len = shape.kv_len - appended;
        // A bound beyond every key bounds nothing; the sum of two lengths fits where both tensors did.
        let reach = |bound: Option<usize>| bound.unwrap_or(usize::MAX).min(shape.q_len + masked_len) as i32;
        let last = |t: Option<TensorView>| t.map_or(1, |t| t.shape()[3]);
        MaskParams {
            lengths: view(mask.lengths),
            prefix: view(mask.prefix),
            query_starts: view(mask.packed.map(|p| p.queries)),
            key_starts: view(mask.packed.map(|p| p.keys)),
            query_documents: view(mask.documents.map(|d| d.queries)),
            key_documents: view(mask.documents.map(|d| d.keys)),
            blocks: view(mask.blocks.map(|b| b.map)),
            attn_mask: view(mask.attn_mask),
            tree: view(mask.tree),
            key_padding_mask: view(mask.key_padding_mask),
            globals: view(mask.globals),
            bias: view(mask.bias),
            slopes: view(mask.alibi.map(|a| a.slopes)),
            relative: view(mask.relative),
            sink_logits: view(mask.sink_logits),
            pattern: mask.band.pattern.map_or([1, 0, 0, 0], |p| pattern(p.params())),
            // A block larger than the problem is one block.
            block: mask.blocks.map_or([1; 2], |b| b.size.map(|n| u32::try_from(n).unwrap_or(u32::MAX))),
            diagonal: mask.band.alignment.diagonal(shape.q_len, masked_len) as i32,
            left: reach(mask.band.left),
            right: reach(mask.band.right),
            reach: (last(mask.relative) / 2) as i32,
            masked_len: masked_len as u32,
            q_len: shape.q_len as u32,
            kv_len: shape.kv_len as u32,
            sequences: last(mask.packed.map(|p| p.queries)).saturating_sub(1) as u32,
            bottom_right: u32::from(mask.band.alignment == Alignment::BottomRight),
            symmetric: u32::from(mask.alibi.is_some_and(|a| a.symmetric)),
            softcap: softcap.unwrap_or(0.0),
            neg_inf: f32::NEG_INFINITY,
            pad: [0; 2],
        }
    }
}

/// `MaskParams::pattern`.
fn pattern(p: PatternParams) -> [u32; 4] {
    let part = match p.part {
        PatternPart::Near => 0,
        PatternPart::Far => 1,
        PatternPart::Both => 2,
        PatternPart::ByHead => 3,
    };
    let reach = p.reach.map_or(u32::MAX, |n| n as u32);
    [p.stride as u32, reach, p.summary.map_or(0, |n| n as u32), part]
}
