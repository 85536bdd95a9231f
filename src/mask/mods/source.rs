//! The WGSL that is generated from a score or mask function.

use naga::valid::ModuleInfo;
use naga::{Block, Expression, Function, Handle, Module, ScalarKind, Span, Statement, Type, TypeInner};
use std::collections::HashMap;

use super::lexical::has_uniforms;
use super::text::{AT, UNIFORM_WORDS, each_call, module, with_stack};
use super::write::{By, Given, ROUNDS, Refusal, Writer, refuse};
use super::{Captured, Kind};
use crate::tensor::dtype::Element;

/// The WGSL of a mod, and facts about its text.
#[derive(Debug)]
pub(crate) struct Source {
    pub(super) kind: Kind,
    /// The author's text.
    pub(super) text: String,
    pub(super) captured: Vec<Captured>,
    /// `PREFIX_value`, and the functions that it calls.
    pub value: String,
    /// `PREFIX_slope`, the derivative by the score, or the reason why there is none.
    pub slope: Result<String, String>,
    /// For each captured tensor `PREFIX_slope`, the derivative by a reading of it
    /// (`PREFIX_reading`), or the reason why there is none.
    pub captured_slopes: Vec<Result<String, String>>,
    /// The names of the captured tensors' gradients.
    pub(super) gradients: Vec<String>,
    /// The members of `At` that the text uses.
    pub(super) members: Vec<bool>,
    pub(super) uniform_words: usize,
}

/// Reads and checks a text, and generates its WGSL. An error says what is wrong with the text.
pub(super) fn read(kind: Kind, text: &str, captured: &[Captured]) -> Result<Source, String> {
    with_stack(|| {
        let (module, info) = module(text, captured)?;
        written(kind, &module, &info, captured, text).map_err(|refusal| refusal.quoted(text))
    })
}

/// Generates the WGSL of a checked module.
///
/// # Errors
/// A part that is missing, or that a mod may not have.
fn written(
    kind: Kind,
    module: &Module,
    info: &ModuleInfo,
    captured: &[Captured],
    source: &str,
) -> Result<Source, Refusal> {
    let prefix = kind.prefix();
    let named =
        |name: &str| module.types.iter().find(|(_, ty)| ty.name.as_deref() == Some(name)).map(|(h, _)| h);
    let Some(at) = named("At") else { return refuse("`At` is missing", Span::default()) };
    let members = members_used(module, info, at);
    let find = |name: &str| {
        module.functions.iter().find(|(_, f)| f.name.as_deref() == Some(name)).map(|(handle, _)| handle)
    };
    let Some(root) = find(kind.function()) else {
        return refuse(format!("the function is missing; declare `{}`", kind.signature()), Span::default());
    };
    check_signature(module, root, kind, kind.signature(), at)?;
    let uniforms = named("Uniforms").filter(|_| has_uniforms(source));
    let mut given = HashMap::new();
    let mut give = |function: &str, name: &str, captured| {
        let name = format!("{prefix}_{name}");
        given.extend(find(function).map(|handle| (handle, Given { name, captured })));
    };
    for (n, Captured { name, .. }) in captured.iter().enumerate() {
        give(&format!("{name}_at"), &format!("captured{n}"), Some(n));
    }
    give("neg_inf", "neg_inf", None);
    if uniforms.is_some() {
        give("uniforms", "uniforms", None);
    }
    let readings = readings(module, &given);
    let at_name = format!("{prefix}_At");
    let writer =
        Writer { module, info, prefix, at, at_name, members: &members, counts_rounds: true, given, readings };

    let mut value = writer.structs();
    let mut uniform_words = 0;
    if let Some(ty) = uniforms {
        let word = |n: u32| format!("mods.{prefix}_words[{}][{}]", n / 4, n % 4);
        let (read, count) = uniform_reader(&writer, ty, "", word)?;
        value += &read;
        uniform_words = count;
    }
    let own = || module.functions.iter().filter(|(handle, _)| !writer.given.contains_key(handle));
    for (handle, _) in own() {
        value += &writer.value(handle)?;
    }
    let has_loops = own().any(|(_, function)| loops(&function.body));
    if has_loops {
        value += &format!("var<private> {prefix}_rounds: u32;\n");
    }
    let start = if has_loops { format!("    {prefix}_rounds = {ROUNDS}u;\n") } else { String::new() };
    let root_name = writer.function(root);
    let (arguments, call, result) = match kind {
        Kind::Score => (format!("score: f32, at: {prefix}_At"), "score, at", "f32"),
        Kind::Pairs => (format!("at: {prefix}_At"), "at", "bool"),
    };
    value += &format!(
        "fn {prefix}_value({arguments}) -> {result} {{\n{start}    return {root_name}({call});\n}}\n"
    );

    let hook = find("score_mod_slope").filter(|_| kind == Kind::Score);
    if let Some(hook) = hook {
        check_signature(module, hook, kind, "fn score_mod_slope(score: f32, at: At) -> f32", at)?;
    }
    let slope_of = |text: String, call: String| {
        format!("{text}fn {prefix}_slope({arguments}) -> f32 {{\n{start}    return {call};\n}}\n")
    };
    let derivative = |by: By| {
        let seed = if by == By::Score { "1.0" } else { "0.0" };
        let call = format!("{}(score, {seed}, at).d", writer.dual(root));
        let text = writer.derivative(root, by).map(|text| slope_of(text, call));
        text.map_err(|refusal| refusal.quoted(source))
    };
    let slope = match (kind, hook) {
        (Kind::Pairs, _) => Err(String::new()),
        (Kind::Score, Some(hook)) => {
            Ok(slope_of(String::new(), format!("{}(score, at)", writer.function(hook))))
        }
        (Kind::Score, None) => derivative(By::Score),
    };
    let of_captured = |(n, one): (usize, &Captured)| match one.of {
        Element::Float => derivative(By::Captured(n)),
        _ => Err(format!("`{}` does not hold floats, so it has no gradient", one.name)),
    };
    let captured_slopes = captured.iter().enumerate().filter(|_| kind == Kind::Score).map(of_captured);
    let captured_slopes = captured_slopes.collect();
    Ok(Source {
        kind,
        text: source.to_string(),
        captured: captured.to_vec(),
        value,
        slope,
        captured_slopes,
        gradients: captured.iter().map(|captured| format!("d_{}", captured.name)).collect(),
        members: members.iter().map(|(_, used)| *used).collect(),
        uniform_words,
    })
}

/// Returns the captured tensors that each function reads, directly or through calls.
fn readings(module: &Module, given: &HashMap<Handle<Function>, Given>) -> HashMap<Handle<Function>, u32> {
    let mut readings: HashMap<Handle<Function>, u32> = HashMap::new();
    // Called functions come before their callers.
    for (handle, function) in module.functions.iter() {
        let own = given.get(&handle).and_then(|given| given.captured).map_or(0, |n| 1 << n);
        let mut bits = own;
        each_call(&function.body, &mut |callee| bits |= readings.get(&callee).copied().unwrap_or(0));
        readings.insert(handle, bits);
    }
    readings
}

/// Returns each member of `At`, with true if the module reads or writes it.
fn members_used(module: &Module, info: &ModuleInfo, at: Handle<Type>) -> Vec<(&'static str, bool)> {
    let mut used = AT.map(|(name, ..)| (name, false));
    for (handle, function) in module.functions.iter() {
        for (_, expression) in function.expressions.iter() {
            let Expression::AccessIndex { base, index } = expression else { continue };
            let ty = &info[handle][*base].ty;
            let of_at = match ty.inner_with(&module.types) {
                TypeInner::Pointer { base, .. } => *base == at,
                inner => ty.handle() == Some(at) || *inner == module.types[at].inner,
            };
            if let Some((_, used)) = used.get_mut(*index as usize).filter(|_| of_at) {
                *used = true;
            }
        }
    }
    // A struct needs a member.
    if used.iter().all(|(_, used)| !used) {
        used[0].1 = true;
    }
    used.to_vec()
}

/// True if the block contains a loop.
fn loops(block: &Block) -> bool {
    block.iter().any(|statement| match statement {
        Statement::Loop { .. } => true,
        Statement::Block(block) => loops(block),
        Statement::If { accept, reject, .. } => loops(accept) || loops(reject),
        Statement::Switch { cases, .. } => cases.iter().any(|case| loops(&case.body)),
        _ => false,
    })
}

fn check_signature(
    module: &Module,
    handle: Handle<Function>,
    kind: Kind,
    signature: &str,
    at: Handle<Type>,
) -> Result<(), Refusal> {
    let function = &module.functions[handle];
    let scalar = |ty: Handle<Type>| match module.types[ty].inner {
        TypeInner::Scalar(scalar) => Some(scalar.kind),
        _ => None,
    };
    let arguments: Vec<_> = function.arguments.iter().map(|argument| argument.ty).collect();
    let takes = match (kind, &arguments[..]) {
        (Kind::Score, [score, last]) => scalar(*score) == Some(ScalarKind::Float) && *last == at,
        (Kind::Pairs, [last]) => *last == at,
        _ => false,
    };
    let wanted = if kind == Kind::Score { ScalarKind::Float } else { ScalarKind::Bool };
    if takes && function.result.as_ref().and_then(|result| scalar(result.ty)) == Some(wanted) {
        return Ok(());
    }
    refuse(format!("the signature must be `{signature}`"), module.functions.get_span(handle))
}

/// Returns the text of `PREFIX_uniforms()`, and the number of its words. The function begins with
/// `begin` and reads the struct from the words.
pub(super) fn uniform_reader(
    writer: &Writer,
    ty: Handle<Type>,
    begin: &str,
    word: impl Fn(u32) -> String,
) -> Result<(String, usize), Refusal> {
    let module = writer.module;
    let refusal = "members of `Uniforms` must be f32, i32, u32 or vectors of them";
    let TypeInner::Struct { members, span } = &module.types[ty].inner else {
        return refuse("`Uniforms` must be a struct", module.types.get_span(ty));
    };
    let words = *span as usize / 4;
    if words > UNIFORM_WORDS {
        let message = format!(
            "`Uniforms` has {span} bytes, but at most {} are supported; capture a tensor",
            4 * UNIFORM_WORDS
        );
        return refuse(message, module.types.get_span(ty));
    }
    let prefix = writer.prefix;
    let mut values = Vec::new();
    for member in members {
        let (count, scalar) = match module.types[member.ty].inner {
            TypeInner::Scalar(scalar) => (1, scalar),
            TypeInner::Vector { size, scalar } => (size as u32, scalar),
            _ => return refuse(refusal, module.types.get_span(ty)),
        };
        let name = match scalar.kind {
            ScalarKind::Float => "f32",
            ScalarKind::Sint => "i32",
            ScalarKind::Uint => "u32",
            _ => return refuse(refusal, module.types.get_span(ty)),
        };
        let all: Vec<_> =
            (0..count).map(|n| format!("bitcast<{name}>({})", word(member.offset / 4 + n))).collect();
        values.push(if count == 1 {
            all.join("")
        } else {
            format!("vec{count}<{name}>({})", all.join(", "))
        });
    }
    let ty = writer.ty(ty);
    let values = values.join(", ");
    Ok((format!("fn {prefix}_uniforms() -> {ty} {{\n{begin}    return {ty}({values});\n}}\n"), words))
}

#[cfg(test)]
mod tests {
    use naga::valid::{Capabilities, ValidationFlags, Validator};

    use super::*;
    use crate::mask::mods::text::LONGEST;

    /// Reads a mod's WGSL again, as a separate module.
    fn reread(source: &Source, slope: bool) -> Result<(), String> {
        let prefix = source.kind.prefix();
        let members: String = AT
            .iter()
            .zip(&source.members)
            .filter(|(_, used)| **used)
            .map(|((name, ty, _), _)| format!("{name}: {ty}, "))
            .collect();
        let words = format!(
            "struct Mods {{ {prefix}_words: array<vec4<u32>, 4> }}\n@group(0) @binding(0) var<uniform> mods: Mods;\n"
        );
        let words = format!("{words}fn {prefix}_neg_inf() -> f32 {{ return 0.0; }}\n");
        let mut text = format!("{words}struct {prefix}_At {{ {members} }}\n{}", source.value);
        if slope {
            text += source.slope.as_ref()?;
        }
        let module = naga::front::wgsl::parse_str(&text).map_err(|e| e.emit_to_string(&text))?;
        let mut validator = Validator::new(ValidationFlags::all(), Capabilities::empty());
        validator.validate(&module).map(|_| ()).map_err(|e| e.emit_to_string(&text))
    }

    fn refusal(kind: Kind, text: &str) -> String {
        match read(kind, text, &[]) {
            Ok(source) => panic!("taken: {text}\n{}", source.value),
            Err(why) => why,
        }
    }

    #[test]
    fn texts_are_refused_with_line_and_caret() {
        let broken = "fn score_mod(score: f32, at: At) -> f32 {\n    return score + nothing;\n}";
        let why = refusal(Kind::Score, broken);
        assert!(why.contains("line 2, column 20"), "{why}");
        assert!(why.ends_with("2 |     return score + nothing;\n  |                    ^^^^^^^"), "{why}");
    }

    #[test]
    fn forbidden_wgsl_is_an_error() {
        let score = "fn score_mod(score: f32, at: At) -> f32 { return score; }";
        let body = |body: &str| format!("fn score_mod(score: f32, at: At) -> f32 {{ {body} return score; }}");
        let cases = [
            ("", "the function is missing; declare `fn score_mod(score: f32, at: At) -> f32`"),
            ("fn score_mod(score: f32) -> f32 { return score; }", "the signature must be `fn score_mod"),
            (
                "fn score_mod(score: f32, at: At) -> bool { return true; }",
                "the signature must be `fn score_mod",
            ),
            (
                "struct At { a: u32 } fn score_mod(score: f32, at: At) -> f32 { return score; }",
                "`At` is predefined",
            ),
            (&format!("var<private> x: f32; {score}"), "private variables are not"),
            (&format!("var<workgroup> x: f32; {score}"), "workgroup memory is not"),
            (
                &format!("@group(0) @binding(1) var<storage, read_write> x: array<f32>; {score}"),
                "bindings are not",
            ),
            (&format!("@group(0) @binding(0) var t: texture_2d<f32>; {score}"), "bindings are not"),
            (&format!("override x: f32 = 1.0; {score}"), "overrides are not"),
            (&format!("@compute @workgroup_size(1) fn main() {{}} {score}"), "entry points such as"),
            (&body("workgroupBarrier();"), "barriers"),
            (&body("let x = mat2x2<f32>();"), "matrices are not"),
            (&body("var x: array<f32, 100000>;"), "at most 1024 numbers"),
            (&format!("fn f(x: ptr<function, f32>) {{ *x = 1.0; }} {score}"), "pointer parameters"),
            (&format!("fn f(x: f32) -> f32 {{ return f(x); }} {score}"), "f"),
            (&format!("enable f16; fn f(x: f16) -> f16 {{ return x; }} {score}"), "only 32-bit numbers"),
            (&body("let x = modf(score).fract;"), "`modf` is not supported"),
            (&body("let x = dpdx(score);"), "this is not supported"),
            ("fn score_mod(score: f32, at: At) -> f32 { return score; /*", "expected statement"),
            ("fn score_mod(score: f32, at: At) -> f32 { return score;", "the text ends too early"),
            (&format!("struct Uniforms {{ x: bool }} {score}"), "Uniforms"),
            (&format!("struct Uniforms {{ x: array<vec4<f32>, 20> }} {score}"), "Uniforms"),
            (&format!("fn uniforms() -> f32 {{ return 1.0; }} {score}"), "uniforms"),
        ];
        for (text, wanted) in cases {
            let why = refusal(Kind::Score, text);
            assert!(why.contains(wanted), "{text}\n{why}");
        }
        let long = format!("{score}{}", " ".repeat(LONGEST));
        assert!(refusal(Kind::Score, &long).contains("at most 65536"));
        // Each function calls the previous one twice.
        let calls: String = (1..30)
            .map(|n| format!("fn f{n}(x: f32) -> f32 {{ return f{}(x) + f{}(x); }}\n", n - 1, n - 1))
            .collect();
        let calls = format!("fn f0(x: f32) -> f32 {{ return x; }}\n{calls}{}", body("let y = f29(score);"));
        assert!(refusal(Kind::Score, &calls).contains("at most 1000 calls"));
    }

    /// A chain of doublings. The derivative must not write an expression twice.
    #[test]
    fn derivatives_of_long_chains_are_as_long() {
        let steps: String = (1..200).map(|n| format!("let x{n} = x{} * x{};\n", n - 1, n - 1)).collect();
        let text = format!("fn score_mod(x0: f32, at: At) -> f32 {{ {steps} return x199; }}");
        let source = read(Kind::Score, &text, &[]).expect("it is read");
        let slope = source.slope.as_ref().expect("a derivative");
        assert!(slope.len() < 40_000, "{}", slope.len());
        assert_eq!(reread(&source, true), Ok(()));
    }

    /// A chain of doublings as an index, and named literals that would be invalid as constants.
    #[test]
    fn named_values_are_written_once() {
        let steps: String = (1..40).map(|n| format!("let x{n} = x{} + x{};\n", n - 1, n - 1)).collect();
        let chain =
            format!("let x0 = at.key; {steps} var a = array<f32, 4>(); a[x39] = score; return a[x39 & 3u];");
        let texts = [
            chain.as_str(),
            "let zero = 0.0; return select(score, -1.0 / zero, at.key > 5u);",
            "let seed = 2654435769u; return score + f32(seed << 5u);",
            "let big = 3e38; return score + big * 10.0;",
            "let m = -1.0; return score + sqrt(m);",
            "return atan2(score, 1e30) + mix(-3e38, 3e38, score) + smoothstep(-3e38, 3e38, score);",
            "return select(score, neg_inf(), at.key > 5u);",
            "// struct Uniforms is not here\n return score;",
        ];
        for body in texts {
            let text = format!("fn score_mod(score: f32, at: At) -> f32 {{ {body} }}");
            let source = read(Kind::Score, &text, &[]).unwrap_or_else(|e| panic!("{e}"));
            assert!(source.slope.is_ok(), "{:?}", source.slope);
            assert_eq!(reread(&source, true), Ok(()));
        }
        // WGSL has further line ends.
        let long = format!(
            "fn score_mod(score: f32, at: At) -> f32 {{ return //\r{}score; }}",
            "score+".repeat(8000)
        );
        assert!(refusal(Kind::Score, &long).contains("the statement is too long"));
    }

    #[test]
    fn missing_derivatives_give_the_reason() {
        let bits = "fn score_mod(score: f32, at: At) -> f32 { return bitcast<f32>(bitcast<u32>(score)); }";
        let source = read(Kind::Score, bits, &[]).expect("it is read");
        let why = source.slope.as_ref().expect_err("no derivative");
        assert!(why.contains("`bitcast` is not differentiable"), "{why}");
        let text = "fn score_mod(score: f32, at: At) -> f32 {\n    return reflect(vec2<f32>(score), vec2<f32>(1.0, 0.0)).x;\n}";
        let source = read(Kind::Score, text, &[]).expect("it is read");
        let why = source.slope.as_ref().expect_err("no derivative");
        assert!(why.contains("`reflect` is not differentiable") && why.contains("line 2"), "{why}");
        assert_eq!(reread(&source, false), Ok(()));
    }

    /// Texts with nesting in proportion to their length: naga and this module recurse for it.
    #[test]
    fn depth_is_bounded() {
        for n in [20, 47, 190, 8000] {
            bounded(n);
        }
    }

    fn bounded(n: usize) {
        let nested =
            |open: &str, inner: &str, close: &str| format!("{}{inner}{}", open.repeat(n), close.repeat(n));
        let of = |x: &str| format!("fn score_mod(score: f32, at: At) -> f32 {{ return {x}; }}");
        let statement = |x: &str| format!("fn score_mod(score: f32, at: At) -> f32 {{ {x} return score; }}");
        let texts = [
            of(&nested("(", "score", ")")),
            of(&nested("-", "score", "")),
            of(&nested("score+", "score", "")),
            of(&nested("score*", "score", "")),
            of(&nested("abs(", "score", ")")),
            of(&format!("select(score, 1.0, {})", nested("true&&", "true", ""))),
            of(&nested("vec2(", "score", ")")),
            statement(&nested("{", "", "}")),
            statement(&nested("if true {", "", "}")),
            statement(&nested("if true {} else ", "{}", "")),
            statement(&nested("loop {", "", "}")),
            statement(&nested("switch 1 { default {", "", "}}")),
            statement(&format!("var x: {};", nested("array<", "f32", ",2>"))),
        ];
        for text in texts {
            match read(Kind::Score, &text, &[]) {
                Ok(source) => assert_eq!(reread(&source, source.slope.is_ok()), Ok(())),
                Err(why) => assert!(!why.is_empty()),
            }
        }
    }

    /// Valid texts, cut up and recombined. Reading them must not panic, and accepted texts must be
    /// valid WGSL.
    #[test]
    fn hostile_texts() {
        let seeds = [
            "struct Uniforms { a: f32, b: vec3<u32> } const N = 4; fn f(x: f32) -> vec2<f32> { return vec2(x, 1.0); }",
            "fn score_mod(score: f32, at: At) -> f32 { var s = array<f32, 4>(); for (var n = 0; n < N; n++) { s[n] += f(score).x; }",
            "if at.key > at.query && score < 3.0 { return -s[at.head % 4u]; } else { s[1] = uniforms().a; }",
            "switch at.head { case 1u, 2u: { return s[0]; } default: {} } while score > 0.0 { break; } loop { continuing { break if true; } }",
            "let v = vec4<f32>(score); return v.wzyx[at.key] + select(s[2], sqrt(score), at.position < 3); }",
        ];
        // xorshift64
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut below = |n: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % n as u64) as usize
        };
        let words: Vec<&str> =
            seeds.iter().flat_map(|seed| seed.split_inclusive([' ', '(', ')', ';', '.', ','])).collect();
        let odd = [
            "@compute ",
            "var<workgroup> ",
            "ptr<function, f32>",
            "&",
            "*",
            "/*",
            "*/",
            "0x",
            "1e99",
            "\u{1f980}",
            "\0",
            "override ",
            "discard; ",
            "mat4x4<f32>",
            "atomic<u32>",
            "workgroupBarrier(); ",
            "uniforms()",
            "score_mod",
            "return ",
            "{",
            "}",
        ];
        let mut taken = 0;
        for _ in 0..600 {
            let mut text: Vec<&str> = words.clone();
            for _ in 0..below(4) {
                let at = below(text.len());
                match below(5) {
                    0 => drop(text.remove(at)),
                    1 => text.insert(at, words[below(words.len())]),
                    2 => text.insert(at, odd[below(odd.len())]),
                    3 => text[at] = words[below(words.len())],
                    _ => text.truncate(at.max(1)),
                }
            }
            if let Ok(source) = read(Kind::Score, &text.concat(), &[]) {
                taken += 1;
                assert_eq!(reread(&source, source.slope.is_ok()), Ok(()), "{}", text.concat());
            }
        }
        assert!((50..550).contains(&taken), "{taken}");
    }
}
