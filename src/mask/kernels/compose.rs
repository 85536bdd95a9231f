//! Composes the functions of `mask/query.wgsl` from the rules of a call.

use std::fmt::Write as _;

use super::{MaskParams, MaskVariant};
use crate::kernel::{declaration, shader};
use crate::mask::{Adds, Ask, Id, RULES, Turn};

/// The variable of a score function's derivative.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SlopeBy {
    Score,
    /// The readings of a captured tensor.
    Captured(usize),
}

/// The members of the WGSL `Query` that every mask has. Members of rules follow.
const QUERY: &str = "
struct Query {
    b: u32,
    h: u32,
    i: u32,
    first: u32,          // it sees keys of first .. end only
    end: u32,
    stop: u32,           // end, before keys were appended
    origin: u32,         // first key of its sequence
    position: i32,       // the key at which it stands
    shift: u32,          // positions of its cache that have been overwritten
";

impl MaskVariant {
    /// Returns the WGSL of these rules and of the functions composed of them.
    pub fn wgsl(&self) -> String {
        self.text(None)
    }

    /// Returns the same text with `score_slope(score, q, j)`, the derivative of the score by
    /// `scale · q·k`. Bias and mask do not change it.
    pub fn wgsl_with_slope(&self) -> String {
        self.text(Some(SlopeBy::Score)) + &self.score_slope(true)
    }

    /// Returns the same text with two derivatives. `score_slope` is by the score function's result.
    /// `captured_slope` is the function's derivative by readings of the n-th captured tensor.
    pub fn wgsl_with_captured_slope(&self, n: usize) -> String {
        self.text(Some(SlopeBy::Captured(n))) + &self.score_slope(false) + &self.captured_slope(n)
    }

    fn score_slope(&self, through_mod: bool) -> String {
        let mut f = self.by_key("score_slope(score: f32, q: Query, j: u32) -> f32");
        f.line(true, "var x = score;");
        f.line(true, "var slope = 1.0;");
        if self.score.is_some() {
            f.line(self.appended, "if j < p.mask.masked_len {");
            f.line(through_mod, "slope = sm_slope(x, sm_at(q, j));");
            f.line(true, "x = sm_value(x, sm_at(q, j));");
            f.line(self.appended, "}");
        }
        f.line(self.softcap, "slope *= softcap_slope(x);");
        format!("\n{}", f.end("slope"))
    }

    /// Returns the same text, with a `score_slope` of 0.
    pub fn wgsl_without_slope(&self) -> String {
        self.text(None) + "\nfn score_slope(score: f32, q: Query, j: u32) -> f32 {\n    return 0.0;\n}\n"
    }

    fn text(&self, slope: Option<SlopeBy>) -> String {
        let mut text = format!("{}\n{}{QUERY}", shader!("mask/query"), declaration::<MaskParams>());
        if self.compacts {
            text.push_str("    low: u32,            // first position of a key that it sees\n");
        }
        for row in RULES.iter().filter_map(|rule| rule.row) {
            let _ = writeln!(text, "    {}: {},", row.name, row.ty);
        }
        text.push_str("}\n");
        if self.has(Id::Blocks) {
            let _ = writeln!(text, "const KNOWS_BLOCKS: bool = {};", self.knows_blocks);
        }
        let _ = writeln!(text, "const HIDES_TILES: bool = {};", self.hides_tiles());
        let _ = writeln!(text, "const ANSWERED_BY_KEY: bool = {};", self.answered_by_key());
        let _ = writeln!(
            text,
            "const SEEN_IS_PLAIN: bool = {};",
            self.answered_by_key() && !self.changes_scores()
        );
        let softcap = if self.softcap { shader!("mask/softcap") } else { "" };
        let of_rules = self.rules.iter().map(|id| id.rule().wgsl);
        for source in of_rules.chain([softcap]).filter(|source| !source.is_empty()) {
            let _ = write!(text, "\n{source}");
        }
        text.push_str(&self.shared_wgsl());
        text.push_str(&self.mods_wgsl(slope));
        for function in [self.query_in(), self.mask_mod(), self.bias_of(), self.score_mod()] {
            let _ = write!(text, "\n{function}");
        }
        for function in self.tile_functions() {
            let _ = write!(text, "\n{function}");
        }
        if !self.rules.any(|rule| rule.joins_sum) {
            text.push_str(
                "\nfn with_sink(total: vec2<f32>, b: u32, h: u32) -> vec2<f32> {\n    return total;\n}\n",
            );
        }
        text
    }

    fn query_in(&self) -> String {
        let lifts = self.lifts_band();
        let mut f = Function::new("query_in(b: u32, h: u32, i: u32, alone: bool) -> Query");
        f.line(true, "var keys = vec2<i32>(0, i32(p.mask.masked_len));");
        f.line(true, "var position = i32(i) + p.mask.diagonal;");
        f.line(self.cached, "let queries = cached_queries(b, p.mask.q_len);");
        f.line(self.cached, "keys.y = i32(cached_len(b));");
        f.line(
            self.cached,
            "position = i32(i) + select(0, keys.y - i32(queries), p.mask.bottom_right != 0u);",
        );
        // A sequence may have fewer queries. Later queries see no keys.
        f.line(self.cached, "if alone && i >= queries {\n        keys.y = 0;\n    }");
        for id in self.rules.iter() {
            f.line(!id.rule().place.is_empty(), id.rule().place);
        }
        f.line(true, "var r = keys;");
        for bounds in self.rules.iter().map(|id| id.rule().bounds) {
            f.line(!(bounds.wgsl.is_empty() || bounds.lifted && lifts), bounds.wgsl);
        }
        // The bounds stay within the sequence, so that they do not fall from one sequence to the
        // next.
        f.line(true, "let stop = u32(clamp(r.y, keys.x, keys.y));");
        f.line(true, "let first = min(u32(clamp(r.x, keys.x, keys.y)), stop);");
        let mut query = "Query(b, h, i, first, stop, stop, u32(keys.x), position, 0u".to_string();
        if self.compacts {
            query.push_str(", first");
        }
        for row in RULES.iter().filter_map(|rule| rule.row) {
            let _ = write!(query, ", {}", zero(row.ty));
        }
        f.line(true, &format!("var q = {query});"));
        for row in self.rules.iter().filter_map(|id| id.rule().row) {
            f.line(true, row.wgsl);
        }
        f.line(self.appended, "q.first = min(q.first, p.mask.masked_len);");
        f.line(self.appended, "q.end = p.mask.kv_len;");
        f.line(self.cached, "q.shift = cached_shift(b);");
        let by_index = self.cached && !self.compacts;
        f.line(by_index, "q.first = cached_index(q.first, q.shift);");
        f.line(by_index, "q.end = cached_index(q.end, q.shift);");
        // No token has moved back by more than the number of removed tokens.
        f.line(self.compacts, "q.first = max(q.first, q.shift) - q.shift;");
        f.line(self.compacts, "q.end = min(q.end, cached_len(b) - q.shift);");
        f.end("q")
    }

    /// Starts a function of a query and a key. With a cache its argument is `t`, an index among the
    /// keys left. Rules use the position `j`.
    fn by_key(&self, signature: &str) -> Function {
        self.by_key_of(signature, "q.", "q.shift")
    }

    /// Starts the same function. The batch entry and the head are `b` and `h`, after the text `of`.
    /// The text `shift` is the difference between position and index.
    fn by_key_of(&self, signature: &str, of: &str, shift: &str) -> Function {
        if !self.cached {
            return Function::new(signature);
        }
        let mut f = Function::new(&signature.replace("j: u32", "t: u32"));
        let position = match (self.compacts, self.asks_positions()) {
            (false, _) => format!("cached_key(t, {shift})"),
            (true, true) => format!("cached_position({of}b, {of}h / p.group, t)"),
            (true, false) => "t".into(),
        };
        f.line(true, &format!("let j = {position};"));
        f
    }

    /// Returns the conditions of a rule at `turn` that kernels must evaluate.
    fn asks(&self, id: Id, turn: Turn) -> impl Iterator<Item = &'static Ask> {
        let bounds = id.rule().bounds;
        let lifts = self.lifts_band();
        let asked = match turn {
            Turn::Block | Turn::Pair => true,
            // The interval extends to the end of the prefix.
            Turn::Causal => self.asks_band() && self.rules.any(|rule| rule.asks_at(Turn::Prefix)),
            Turn::Prefix | Turn::Global => self.asks_band(),
            Turn::Band => lifts || !bounds.exact,
        };
        id.rule().asks.iter().filter(move |ask| asked && ask.turn == turn)
    }

    /// True if kernels evaluate window or pattern pair by pair.
    fn asks_band(&self) -> bool {
        let lifts = self.lifts_band();
        self.rules.any(|rule| rule.bounds.lifted && (lifts || !rule.bounds.exact))
    }

    fn mask_mod(&self) -> String {
        let mut f = self.by_key("mask_mod(q: Query, j: u32) -> bool");
        // The interval of a query extends over the appended keys.
        f.return_if(self.appended, "j >= p.mask.masked_len", "true");
        f.return_if(self.appended, "j >= q.stop", "false");
        // The interval of indices is wider than the interval of positions.
        f.return_if(self.asks_positions(), "j < q.low || j >= q.stop", "false");
        for turn in [Turn::Block, Turn::Pair, Turn::Prefix, Turn::Causal, Turn::Global, Turn::Band] {
            // In a ring, every query sees the first tokens, like global ones.
            f.return_if(turn == Turn::Band && self.ring && self.asks_band(), "j < p.cache.sinks", "true");
            for id in self.rules.iter() {
                for (n, ask) in self.asks(id, turn).enumerate() {
                    f.line(n == 0 && !id.rule().before.is_empty(), id.rule().before);
                    f.return_if(true, ask.wgsl, if ask.sees { "true" } else { "false" });
                }
            }
            let asked = turn == Turn::Pair && self.pairs.is_some();
            f.return_if(asked, "!mm_value(mm_at(q, j))", "false");
        }
        f.end("true")
    }

    /// Returns the terms that rules add to scores, in full blocks or outside of them.
    fn adds(&self, in_full_blocks: bool) -> impl Iterator<Item = Adds> {
        let adds = self.rules.iter().filter_map(|id| id.rule().adds);
        adds.filter(move |adds| adds.in_full_blocks == in_full_blocks)
    }

    /// True if kernels skip tiles that tensors of these rules hide. With a map of blocks they do
    /// not: the map selects the blocks to skip. In full blocks these tensors have no effect.
    fn hides_tiles(&self) -> bool {
        !self.has(Id::Blocks) && self.rules.any(|rule| !rule.hides.is_empty() || rule.numbers.is_some())
    }

    /// True if the query's interval and the tensors that `tile_functions` reads decide every pair.
    fn answered_by_key(&self) -> bool {
        let by_key = |id: Id| !id.rule().hides.is_empty() || id.rule().numbers.is_some();
        let asks = |id: Id, turn: Turn| self.asks(id, turn).next().is_some();
        let others = [Turn::Block, Turn::Prefix, Turn::Causal, Turn::Global, Turn::Band];
        let open = |id: Id| asks(id, Turn::Pair) && !by_key(id) || others.iter().any(|turn| asks(id, *turn));
        self.pairs.is_none() && !self.asks_positions() && !self.rules.iter().any(open)
    }

    /// Returns the names of the tensors that hide pairs, and the rules' `hides`.
    fn hiding(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let used = self.rules.iter().filter(|_| self.hides_tiles()).map(Id::rule);
        used.filter(|rule| !rule.hides.is_empty()).map(|rule| (rule.tensors[0].name, rule.hides))
    }

    /// Returns the functions with which kernels find hidden tiles (`mask/query.wgsl`).
    fn tile_functions(&self) -> [String; 5] {
        let numbers = self.rules.iter().filter(|_| self.hides_tiles()).find_map(|id| id.rule().numbers);
        let [of_query, of_key] = numbers.unwrap_or(["0u"; 2]);
        let query = Function::new("document_of_query(b: u32, h: u32, i: u32) -> u32");
        let by_key = |signature: &str| self.by_key_of(signature, "", "cached_shift(b)");
        let mut key = by_key("documents_of_key(b: u32, h: u32, j: u32) -> vec2<u32>");
        key.line(self.hiding().next().is_some(), "let i = 0u;");
        key.return_if(self.appended, "j >= p.mask.masked_len", "vec2<u32>(0u, 0xffffffffu)");
        // The text has no branches, because kernels call it for many keys.
        let mut hidden = Vec::new();
        for (name, hides) in self.hiding() {
            hidden.push(format!("((p.mask.{name}.strides.z == 0u) & ({hides}))"));
        }
        let of_key = match hidden.is_empty() {
            true => format!("vec2<u32>({of_key})"),
            false => {
                format!("select(vec2<u32>({of_key}), vec2<u32>(0xffffffffu, 0u), {})", hidden.join(" | "))
            }
        };
        let mut pair = by_key("pair_hidden(b: u32, h: u32, i: u32, j: u32) -> bool");
        pair.return_if(self.appended, "j >= p.mask.masked_len", "false");
        for (name, hides) in self.hiding() {
            pair.return_if(true, &format!("p.mask.{name}.strides.z != 0u && {hides}"), "true");
        }
        let any = |axis: &str| {
            let of_key = numbers.map(|_| "key_documents");
            let names = self.hiding().map(|(name, _)| name).chain(of_key.filter(|_| axis == "y"));
            let differ: Vec<_> = names.map(|name| format!("p.mask.{name}.strides.{axis} != 0u")).collect();
            if differ.is_empty() { "false".to_string() } else { differ.join(" || ") }
        };
        [
            query.end(of_query),
            key.end(&of_key),
            pair.end("false"),
            Function::new("hides_by_head() -> bool").end(&any("y")),
            Function::new("hides_by_query() -> bool").end(&any("z")),
        ]
    }

    fn bias_of(&self) -> String {
        let mut f = self.by_key("bias_of(q: Query, j: u32) -> f32");
        let terms: Vec<_> = self.adds(false).map(|adds| adds.wgsl).collect();
        f.return_if(!terms.is_empty() && self.has(Id::Blocks), "block_at(q, j) == FULL", "0.0");
        f.end(if terms.is_empty() { "0.0".to_string() } else { terms.join(" + ") }.as_str())
    }

    fn score_mod(&self) -> String {
        let mut f = self.by_key("score_mod(score: f32, q: Query, j: u32) -> f32");
        f.line(true, "var x = score;");
        let guarded = "if j < p.mask.masked_len {\n        x = sm_value(x, sm_at(q, j));\n    }";
        f.line(self.score.is_some() && self.appended, guarded);
        f.line(self.score.is_some() && !self.appended, "x = sm_value(x, sm_at(q, j));");
        f.line(self.softcap, "x = softcap(x);");
        let adds = self.rules.any(|rule| rule.adds.is_some());
        f.return_if(self.appended && adds, "j >= p.mask.masked_len", "x");
        let has_bias = self.adds(false).next().is_some();
        f.line(has_bias, if self.cached { "let bias = bias_of(q, t);" } else { "let bias = bias_of(q, j);" });
        // −∞ hides the pair for every score: NaN + −∞ would be NaN.
        f.line(has_bias, "x = select(x + bias, p.mask.neg_inf, bias == p.mask.neg_inf);");
        for adds in self.adds(true) {
            f.line(true, &format!("x += {};", adds.wgsl));
        }
        f.end("x")
    }
}

/// Returns the value of a member of `Query` if its rule is absent.
fn zero(ty: &str) -> &'static str {
    match ty {
        "bool" => "false",
        "f32" => "0.0",
        _ => "0u",
    }
}

/// A WGSL function, line by line. Lines after a conditional return are in its `else`. FXC takes a
/// result as uninitialised if a statement follows a branch that returns.
struct Function {
    text: String,
    /// The number of open blocks.
    depth: usize,
}

impl Function {
    fn new(signature: &str) -> Self {
        Function { text: format!("fn {signature} {{\n"), depth: 1 }
    }

    fn line(&mut self, used: bool, line: &str) {
        if used {
            let _ = writeln!(self.text, "{}{line}", "    ".repeat(self.depth));
        }
    }

    fn return_if(&mut self, used: bool, condition: &str, result: &str) {
        if used {
            self.line(true, &format!("if {condition} {{"));
            self.line(true, &format!("    return {result};"));
            self.line(true, "} else {");
            self.depth += 1;
        }
    }

    fn end(mut self, result: &str) -> String {
        self.line(true, &format!("return {result};"));
        while self.depth > 0 {
            self.depth -= 1;
            self.line(true, "}");
        }
        self.text
    }
}
