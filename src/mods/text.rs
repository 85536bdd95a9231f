//! A mod's text, read and checked alone: what it may say, in errors that quote it.

use std::collections::HashMap;

use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{
    AddressSpace, ArraySize, Block, Expression, Function, Handle, Module, Scalar, ScalarKind, Span,
    Statement, Type, TypeInner,
};

use super::write::{ROUNDS, Refusal, Writer, refuse};
use super::{Captured, Kind, Source};

/// Bytes of a text.
const LONGEST: usize = 1 << 16;
/// Words of a mod's uniforms.
pub(super) const UNIFORM_WORDS: usize = 16;
/// Words of a value, and of the variables of a function.
const MOST_WORDS: usize = 1024;
/// Calls of functions, as if each were written out.
const MOST_CALLS: usize = 1000;

/// The members of `At`: name, type, and what it is of query `q` and key `j`.
pub(super) const AT: [(&str, &str, &str); 11] = [
    ("batch", "u32", "q.b"),
    ("head", "u32", "q.h"),
    ("kv_head", "u32", "q.h / p.mask.group"),
    ("query", "u32", "q.i"),
    ("key", "u32", "j"),
    ("position", "i32", "q.position"),
    ("sequence_start", "u32", "q.origin"),
    ("q_len", "u32", "p.mask.q_len"),
    ("kv_len", "u32", "p.mask.masked_len"),
    ("query_document", "u32", "QUERY_DOCUMENT"),
    ("key_document", "u32", "KEY_DOCUMENT"),
];

impl Kind {
    pub fn function(self) -> &'static str {
        match self {
            Kind::Score => "score_mod",
            Kind::Pairs => "mask_mod",
        }
    }

    /// In front of the names of its text.
    pub fn prefix(self) -> &'static str {
        match self {
            Kind::Score => "sm",
            Kind::Pairs => "mm",
        }
    }

    fn signature(self) -> &'static str {
        match self {
            Kind::Score => "fn score_mod(score: f32, at: At) -> f32",
            Kind::Pairs => "fn mask_mod(at: At) -> bool",
        }
    }
}

/// What the text may call, behind it: lines are its own.
fn prelude(text: &str, captured: &[Captured]) -> String {
    let members: String = AT.iter().map(|(name, ty, _)| format!("    {name}: {ty},\n")).collect();
    let mut prelude = format!("\nstruct At {{\n{members}}}\n");
    for Captured { name, of } in captured {
        let ty = of.wgsl();
        prelude += &format!("fn {name}_at(a: u32, b: u32, c: u32, d: u32) -> {ty} {{ return {ty}(); }}\n");
    }
    prelude += "fn neg_inf() -> f32 { return 0.0; }\n";
    if has_uniforms(text) {
        prelude += "fn uniforms() -> Uniforms { return Uniforms(); }\n";
    }
    prelude
}

/// How deep brackets may be nested: naga goes down the stack with each.
const DEEPEST: usize = 48;
/// How many words and signs a statement may have, likewise.
const LONGEST_STATEMENT: usize = 400;
/// How often a text may say `else`, likewise.
const MOST_ELSES: usize = 100;

/// Where lines end, for WGSL.
const LINE_ENDS: [char; 7] = ['\n', '\u{b}', '\u{c}', '\r', '\u{85}', '\u{2028}', '\u{2029}'];

/// The text with spaces for its comments, byte for byte.
fn without_comments(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    let mut nested = 0usize;
    while let Some(c) = rest.next() {
        let next = rest.peek().copied();
        match (c, next) {
            ('/', Some('*')) | ('*', Some('/')) if c == '/' || nested > 0 => {
                nested = if c == '/' { nested + 1 } else { nested - 1 };
                rest.next();
                kept.push_str("  ");
            }
            ('/', Some('/')) if nested == 0 => {
                kept.push(' ');
                while let Some(c) = rest.next_if(|c| !LINE_ENDS.contains(c)) {
                    kept.extend(std::iter::repeat_n(' ', c.len_utf8()));
                }
            }
            _ if nested > 0 => kept.extend(std::iter::repeat_n(' ', c.len_utf8())),
            _ => kept.push(c),
        }
    }
    kept
}

/// Refuses what naga might find no stack for.
fn check_depth(text: &str) -> Result<(), Refusal> {
    let (mut depth, mut angles, mut words, mut elses) = (0usize, 0usize, 0usize, 0usize);
    let mut rest = text.char_indices().peekable();
    while let Some((at, c)) = rest.next() {
        let span = Span::new(at as u32, (at + c.len_utf8()) as u32);
        match c {
            '{' | '}' | ';' => {
                (angles, words) = (0, 0);
                depth = if c == '{' { depth + 1 } else { depth.saturating_sub(usize::from(c == '}')) };
            }
            '(' | '[' => (depth, words) = (depth + 1, words + 1),
            ')' | ']' => (depth, words) = (depth.saturating_sub(1), words + 1),
            // Of types, or less and greater.
            '<' => (angles, words) = (angles + 1, words + 1),
            '>' => (angles, words) = (angles.saturating_sub(1), words + 1),
            c if c.is_whitespace() => {}
            c if c.is_alphanumeric() || c == '_' => {
                words += 1;
                let mut word = String::from(c);
                while let Some((_, c)) = rest.next_if(|(_, c)| c.is_alphanumeric() || "_.".contains(*c)) {
                    word.push(c);
                }
                elses += usize::from(word == "else");
            }
            _ => words += 1,
        }
        let refused = [
            (depth + angles > DEEPEST, "nested too deep; name parts of it"),
            (words > LONGEST_STATEMENT, "too long a statement; name parts of it, or take a tensor"),
            (elses > MOST_ELSES, "too many branches; take a switch, an array or a tensor"),
        ];
        if let Some((_, why)) = refused.into_iter().find(|(holds, _)| *holds) {
            return refuse(why, span);
        }
    }
    Ok(())
}

/// Whether the text declares `Uniforms`.
fn has_uniforms(text: &str) -> bool {
    let text = without_comments(text);
    let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
    words.clone().zip(words.skip(1)).any(|pair| pair == ("struct", "Uniforms"))
}

/// The line and column of `span` in `text`, and the line with carets under it.
fn quoted(message: &str, span: Span, text: &str) -> String {
    let Some(range) = span.to_range().filter(|range| range.start <= text.len()) else {
        return message.to_string();
    };
    let start = (0..=range.start).rfind(|n| text.is_char_boundary(*n)).unwrap_or(0);
    let line_start = text[..start].rfind('\n').map_or(0, |n| n + 1);
    let line = text[line_start..].lines().next().unwrap_or_default();
    let number = text[..start].matches('\n').count() + 1;
    let column = text[line_start..start].chars().count();
    let end = (range.end.min(line_start + line.len())..=text.len()).find(|n| text.is_char_boundary(*n));
    let width = text.get(start..end.unwrap_or(start)).map_or(0, |t| t.chars().count()).max(1);
    let gutter = " ".repeat(number.to_string().len());
    let carets = format!("{}{}", " ".repeat(column), "^".repeat(width));
    format!(
        "{message}\n{gutter}--> line {number}, column {}\n{gutter} |\n{number} | {line}\n{gutter} | {carets}",
        column + 1
    )
}

/// The stack that [`read`] has, whoever calls: 2 MiB are too few for 60 nested blocks where naga is not optimised.
#[cfg(not(target_arch = "wasm32"))]
const STACK: usize = 1 << 26;

/// What kernels have of a mod, or what is wrong with its text.
pub(super) fn read(kind: Kind, text: &str, captured: &[Captured]) -> Result<Source, String> {
    #[cfg(not(target_arch = "wasm32"))]
    {
        let thread = std::thread::Builder::new().stack_size(STACK);
        std::thread::scope(|scope| {
            let reader = thread.spawn_scoped(scope, || read_here(kind, text, captured));
            let read = reader.map_err(|e| format!("there is no thread to read it: {e}"))?;
            // Where naga fails on a text, that is refused.
            read.join().unwrap_or_else(|_| Err("naga cannot read it".to_string()))
        })
    }
    #[cfg(target_arch = "wasm32")]
    read_here(kind, text, captured)
}

fn read_here(kind: Kind, text: &str, captured: &[Captured]) -> Result<Source, String> {
    if text.len() > LONGEST {
        return Err(format!("a text of {} bytes; at most {LONGEST} are taken", text.len()));
    }
    let said = |refusal: Refusal| quoted(&refusal.message, refusal.span, text);
    check_depth(&without_comments(text)).map_err(said)?;
    let whole = format!("{text}{}", prelude(text, captured));
    let module = naga::front::wgsl::parse_str(&whole).map_err(|error| {
        let span = error.labels().next().map(|(span, _)| span).unwrap_or_default();
        let of_ours = span.to_range().is_some_and(|range| range.start >= text.len());
        let name = span.to_range().and_then(|range| whole.get(range)).unwrap_or_default();
        if of_ours && error.message().contains("redefinition") {
            return format!("`{name}` is given to a mod: declare something of another name");
        }
        // What it found may reach into what is behind the text.
        let message = error.message().lines().next().unwrap_or_default();
        if of_ours {
            return format!("the text ends early: {message}");
        }
        let notes = error.labels().map(|(_, label)| label).chain(error.notes());
        let notes: Vec<_> = notes.filter(|note| !note.is_empty() && !message.contains(note)).collect();
        let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) };
        quoted(&format!("{message}{notes}"), span, text)
    })?;
    check(&module, text.len()).map_err(said)?;
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::empty());
    let info = validator.validate(&module).map_err(|error| {
        let span = error.spans().next().map(|(span, _)| *span).unwrap_or_default();
        let mut message = error.as_inner().to_string();
        let mut cause = std::error::Error::source(error.as_inner());
        while let Some(inner) = cause {
            message = format!("{message}: {inner}");
            cause = inner.source();
        }
        quoted(&message, span, text)
    })?;
    written(kind, &module, &info, captured, text).map_err(said)
}

/// What naga takes and a mod may not have.
fn check(module: &Module, length: usize) -> Result<(), Refusal> {
    if let Some((handle, variable)) = module.global_variables.iter().next() {
        let what = match variable.space {
            AddressSpace::WorkGroup => "workgroup memory",
            AddressSpace::Private => "private variables; a function may have variables of its own",
            _ => "bindings; what it captures is given with `Captured`",
        };
        return refuse(format!("a mod has no {what}"), module.global_variables.get_span(handle));
    }
    if let Some((handle, _)) = module.overrides.iter().next() {
        return refuse(
            "a mod has no overrides; write a const, or a member of Uniforms",
            module.overrides.get_span(handle),
        );
    }
    if let Some(entry) = module.entry_points.first() {
        return refuse(format!("a mod has no entry points, such as `{}`", entry.name), Span::default());
    }
    for (handle, ty) in module.types.iter() {
        let span = module.types.get_span(handle);
        match &ty.inner {
            TypeInner::Scalar(scalar) | TypeInner::Vector { scalar, .. } if is_plain(*scalar) => {}
            TypeInner::Struct { .. } => {}
            TypeInner::Array { size: ArraySize::Constant(_), .. } => {}
            TypeInner::Pointer { .. } => return refuse("a mod's functions take no pointers", span),
            TypeInner::Matrix { .. } => return refuse("a mod has no matrices; take vectors", span),
            TypeInner::Array { .. } => return refuse("a mod's arrays have a fixed length", span),
            _ => {
                return refuse(
                    "a mod has numbers of 32 bits, bools, vectors, arrays and structs of them",
                    span,
                );
            }
        }
        if words(module, handle) > MOST_WORDS {
            return refuse(format!("a value of a mod has at most {MOST_WORDS} numbers"), span);
        }
    }
    let mut calls: HashMap<Handle<Function>, usize> = HashMap::new();
    for (handle, function) in module.functions.iter() {
        let span = module.functions.get_span(handle);
        let sum: usize = function.local_variables.iter().map(|(_, local)| words(module, local.ty)).sum();
        if sum > MOST_WORDS {
            return refuse(
                format!("the variables of a mod's function have at most {MOST_WORDS} numbers"),
                span,
            );
        }
        // What is called comes before; recursion is refused by naga.
        let mut all = 1usize;
        count_calls(&function.body, &mut |callee| {
            all = all.saturating_add(calls.get(&callee).copied().unwrap_or(1))
        });
        if all > MOST_CALLS {
            return refuse(
                format!("a mod makes at most {MOST_CALLS} calls, those of what it calls with them"),
                span,
            );
        }
        calls.insert(handle, all);
        let taken = function.name.as_deref() == Some("uniforms");
        if taken && span.to_range().is_some_and(|range| range.start < length) {
            return refuse("`uniforms` is given to a mod: name the function otherwise", span);
        }
    }
    Ok(())
}

fn is_plain(scalar: Scalar) -> bool {
    match scalar.kind {
        ScalarKind::Float | ScalarKind::Sint | ScalarKind::Uint => scalar.width == 4,
        ScalarKind::Bool => true,
        _ => false,
    }
}

/// How many numbers a value of the type has.
fn words(module: &Module, ty: Handle<Type>) -> usize {
    match &module.types[ty].inner {
        TypeInner::Vector { size, .. } => *size as usize,
        TypeInner::Array { base, size: ArraySize::Constant(n), .. } => {
            words(module, *base).saturating_mul(n.get() as usize)
        }
        TypeInner::Struct { members, .. } => {
            members.iter().fold(0, |sum: usize, m| sum.saturating_add(words(module, m.ty)))
        }
        _ => 1,
    }
}

fn count_calls(block: &Block, called: &mut impl FnMut(Handle<Function>)) {
    for statement in block.iter() {
        match statement {
            Statement::Call { function, .. } => called(*function),
            Statement::Block(block) => count_calls(block, called),
            Statement::If { accept, reject, .. } => {
                count_calls(accept, called);
                count_calls(reject, called);
            }
            Statement::Switch { cases, .. } => cases.iter().for_each(|case| count_calls(&case.body, called)),
            Statement::Loop { body, continuing, .. } => {
                count_calls(body, called);
                count_calls(continuing, called);
            }
            _ => {}
        }
    }
}

/// Whether anything of the block loops.
fn loops(block: &Block) -> bool {
    block.iter().any(|statement| match statement {
        Statement::Loop { .. } => true,
        Statement::Block(block) => loops(block),
        Statement::If { accept, reject, .. } => loops(accept) || loops(reject),
        Statement::Switch { cases, .. } => cases.iter().any(|case| loops(&case.body)),
        _ => false,
    })
}

/// The members of `At` that anything reads or writes.
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
    // A struct has a member.
    if used.iter().all(|(_, used)| !used) {
        used[0].1 = true;
    }
    used.to_vec()
}

fn written(
    kind: Kind,
    module: &Module,
    info: &ModuleInfo,
    captured: &[Captured],
    text: &str,
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
        return refuse(format!("the function is missing: `{}`", kind.signature()), Span::default());
    };
    check_signature(module, root, kind, kind.signature(), at)?;
    let mut given = HashMap::new();
    for (n, Captured { name, .. }) in captured.iter().enumerate() {
        given.extend(find(&format!("{name}_at")).map(|handle| (handle, format!("{prefix}_captured{n}"))));
    }
    given.extend(find("neg_inf").map(|handle| (handle, format!("{prefix}_neg_inf"))));
    let uniforms = named("Uniforms").filter(|_| has_uniforms(text));
    given.extend(find("uniforms").filter(|_| uniforms.is_some()).map(|h| (h, format!("{prefix}_uniforms"))));

    let writer = Writer { module, info, prefix, at, members: &members, given };
    let mut value = writer.structs();
    let mut words = 0;
    if let Some(ty) = uniforms {
        let (read, count) = uniform_reader(&writer, ty)?;
        value += &read;
        words = count;
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
    let (arguments, call) = match kind {
        Kind::Score => (format!("score: f32, at: {prefix}_At"), "score, at"),
        Kind::Pairs => (format!("at: {prefix}_At"), "at"),
    };
    let result = if kind == Kind::Score { "f32" } else { "bool" };
    value += &format!(
        "fn {prefix}_value({arguments}) -> {result} {{\n{start}    return {root_name}({call});\n}}\n"
    );
    let slope = match kind {
        Kind::Pairs => Err(String::new()),
        Kind::Score => {
            let hook = find("score_mod_slope");
            if let Some(hook) = hook {
                let signature = "fn score_mod_slope(score: f32, at: At) -> f32";
                check_signature(module, hook, kind, signature, at)?;
            }
            let call = match hook {
                Some(hook) => Ok((String::new(), format!("{}(score, at)", writer.function(hook)))),
                None => writer
                    .derivative(root)
                    .map(|text| (text, format!("{}(score, 1.0, at).d", writer.dual(root)))),
            };
            call.map(|(text, call)| {
                format!("{text}fn {prefix}_slope(score: f32, at: {prefix}_At) -> f32 {{\n{start}    return {call};\n}}\n")
            })
            .map_err(|refusal| quoted(&refusal.message, refusal.span, text))
        }
    };
    Ok(Source {
        kind,
        captured: captured.to_vec(),
        value,
        slope,
        members: members.iter().map(|(_, used)| *used).collect(),
        uniform_words: words,
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
    refuse(format!("it must be `{signature}`"), module.functions.get_span(handle))
}

/// `uniforms()`, which reads the struct from the words of the call, and how many they are.
fn uniform_reader(writer: &Writer, ty: Handle<Type>) -> Result<(String, usize), Refusal> {
    let module = writer.module;
    let refusal = "the members of Uniforms are f32, i32, u32 and vectors of them";
    let TypeInner::Struct { members, span } = &module.types[ty].inner else {
        return refuse("Uniforms is a struct", module.types.get_span(ty));
    };
    let words = *span as usize / 4;
    if words > UNIFORM_WORDS {
        let message =
            format!("Uniforms has {span} bytes, at most {} are taken; capture a tensor", 4 * UNIFORM_WORDS);
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
        let word = |n: u32| {
            let at = member.offset / 4 + n;
            format!("bitcast<{name}>(mods.{prefix}_words[{}][{}])", at / 4, at % 4)
        };
        let all: Vec<_> = (0..count).map(word).collect();
        values.push(if count == 1 {
            all.join("")
        } else {
            format!("vec{count}<{name}>({})", all.join(", "))
        });
    }
    let ty = writer.ty(ty);
    Ok((format!("fn {prefix}_uniforms() -> {ty} {{\n    return {ty}({});\n}}\n", values.join(", ")), words))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mod's text in a module of its own, read again.
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
    fn what_a_mod_may_not_say() {
        let score = "fn score_mod(score: f32, at: At) -> f32 { return score; }";
        let body = |body: &str| format!("fn score_mod(score: f32, at: At) -> f32 {{ {body} return score; }}");
        let cases = [
            ("", "the function is missing: `fn score_mod(score: f32, at: At) -> f32`"),
            ("fn score_mod(score: f32) -> f32 { return score; }", "it must be `fn score_mod"),
            ("fn score_mod(score: f32, at: At) -> bool { return true; }", "it must be `fn score_mod"),
            (
                "struct At { a: u32 } fn score_mod(score: f32, at: At) -> f32 { return score; }",
                "`At` is given to a mod",
            ),
            (&format!("var<private> x: f32; {score}"), "no private variables"),
            (&format!("var<workgroup> x: f32; {score}"), "no workgroup memory"),
            (
                &format!("@group(0) @binding(1) var<storage, read_write> x: array<f32>; {score}"),
                "no bindings",
            ),
            (&format!("@group(0) @binding(0) var t: texture_2d<f32>; {score}"), "no bindings"),
            (&format!("override x: f32 = 1.0; {score}"), "no overrides"),
            (&format!("@compute @workgroup_size(1) fn main() {{}} {score}"), "no entry points"),
            (&body("workgroupBarrier();"), "barriers"),
            (&body("let x = mat2x2<f32>();"), "no matrices"),
            (&body("var x: array<f32, 100000>;"), "at most 1024 numbers"),
            (&format!("fn f(x: ptr<function, f32>) {{ *x = 1.0; }} {score}"), "no pointers"),
            (&format!("fn f(x: f32) -> f32 {{ return f(x); }} {score}"), "f"),
            (&format!("enable f16; fn f(x: f16) -> f16 {{ return x; }} {score}"), "numbers of 32 bits"),
            (&body("let x = modf(score).fract;"), "a mod cannot call Modf"),
            (&body("let x = dpdx(score);"), "a mod cannot do this"),
            ("fn score_mod(score: f32, at: At) -> f32 { return score; /*", "expected statement"),
            ("fn score_mod(score: f32, at: At) -> f32 { return score;", "the text ends early"),
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
        // Each calls the last twice.
        let calls: String = (1..30)
            .map(|n| format!("fn f{n}(x: f32) -> f32 {{ return f{}(x) + f{}(x); }}\n", n - 1, n - 1))
            .collect();
        let calls = format!("fn f0(x: f32) -> f32 {{ return x; }}\n{calls}{}", body("let y = f29(score);"));
        assert!(refusal(Kind::Score, &calls).contains("at most 1000 calls"));
    }

    /// Doubled again and again, which is not written out again and again.
    #[test]
    fn derivatives_of_long_chains_are_as_long() {
        let steps: String = (1..200).map(|n| format!("let x{n} = x{} * x{};\n", n - 1, n - 1)).collect();
        let text = format!("fn score_mod(x0: f32, at: At) -> f32 {{ {steps} return x199; }}");
        let source = read(Kind::Score, &text, &[]).expect("it is read");
        let slope = source.slope.as_ref().expect("a derivative");
        assert!(slope.len() < 40_000, "{}", slope.len());
        assert_eq!(reread(&source, true), Ok(()));
    }

    /// An index that is made of itself again and again, and named literals that would be no constants.
    #[test]
    fn what_is_named_is_written_once() {
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
        // A line ends where WGSL says.
        let long = format!(
            "fn score_mod(score: f32, at: At) -> f32 {{ return //\r{}score; }}",
            "score+".repeat(8000)
        );
        assert!(refusal(Kind::Score, &long).contains("too long a statement"));
    }

    #[test]
    fn what_has_no_derivative_says_why() {
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

    /// Nested as deep as a text is long: naga and what is here go down with it.
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

    /// Texts that are right, cut up and put together otherwise: read without a panic, and what is taken is WGSL.
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
