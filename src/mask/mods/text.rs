//! Reads and checks a mod's text alone. Errors quote the text.

use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{
    AddressSpace, ArraySize, Block, Function, Handle, Module, Scalar, ScalarKind, Span, Statement, Type,
    TypeInner,
};
use std::collections::HashMap;

use super::lexical::{check_depth, has_uniforms, without_comments};
use super::write::{Refusal, refuse};
use super::{Captured, Kind, invalid};

/// The most bytes of a text.
pub(super) const LONGEST: usize = 1 << 16;
/// The most words of a mod's uniforms.
pub(super) const UNIFORM_WORDS: usize = 16;
/// The most words of a value, and of the variables of a function.
const MOST_WORDS: usize = 1024;
/// The most calls of functions, counted as if each call were inlined.
const MOST_CALLS: usize = 1000;

/// The members of `At`: name, type, and the WGSL expression for query `q` and key `j`.
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

    /// The prefix of the names in its text.
    pub fn prefix(self) -> &'static str {
        match self {
            Kind::Score => "sm",
            Kind::Pairs => "mm",
        }
    }

    pub(super) fn signature(self) -> &'static str {
        match self {
            Kind::Score => "fn score_mod(score: f32, at: At) -> f32",
            Kind::Pairs => "fn mask_mod(at: At) -> bool",
        }
    }
}

/// Returns the declarations that the text may use. They follow the text, so that its line numbers
/// stay.
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

impl Refusal {
    pub fn quoted(&self, text: &str) -> String {
        quoted(&self.message, self.span, text)
    }
}

/// Returns the message, the line and column of `span` in `text`, and the line with carets under it.
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

/// The stack of the thread in [`with_stack`]. In 2 MiB, naga without optimisation overflows at 60
/// nested blocks.
#[cfg(not(target_arch = "wasm32"))]
const STACK: usize = 1 << 26;

/// Runs `f` on a thread with enough stack for naga.
pub(super) fn with_stack<T: Send>(f: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    #[cfg(not(target_arch = "wasm32"))]
    {
        let thread = std::thread::Builder::new().stack_size(STACK);
        std::thread::scope(|scope| {
            let reader = thread.spawn_scoped(scope, f);
            let read = reader.map_err(|e| format!("cannot start a thread to parse the function: {e}"))?;
            // If naga panics on a text, the text is invalid.
            read.join().unwrap_or_else(|_| Err("naga cannot parse the function".to_string()))
        })
    }
    #[cfg(target_arch = "wasm32")]
    f()
}

/// Parses and checks a text with naga.
pub(super) fn module(text: &str, captured: &[Captured]) -> Result<(Module, ModuleInfo), String> {
    if text.len() > LONGEST {
        return Err(format!("the text has {} bytes, but at most {LONGEST} are supported", text.len()));
    }
    let said = |refusal: Refusal| refusal.quoted(text);
    check_depth(&without_comments(text)).map_err(said)?;
    let whole = format!("{text}{}", prelude(text, captured));
    let module = naga::front::wgsl::parse_str(&whole).map_err(|error| {
        let span = error.labels().next().map(|(span, _)| span).unwrap_or_default();
        let of_ours = span.to_range().is_some_and(|range| range.start >= text.len());
        let name = span.to_range().and_then(|range| whole.get(range)).unwrap_or_default();
        if of_ours && error.message().contains("redefinition") {
            return format!("`{name}` is predefined; use another name");
        }
        // The error may reach into the declarations after the text.
        let message = error.message().lines().next().unwrap_or_default();
        if of_ours {
            return format!("the text ends too early: {message}");
        }
        let notes = error.labels().map(|(_, label)| label).chain(error.notes());
        let notes: Vec<_> = notes.filter(|note| !note.is_empty() && !message.contains(note)).collect();
        let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) };
        quoted(&format!("{message}{notes}"), span, text)
    })?;
    check(&module, text.len()).map_err(said)?;
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::empty());
    let info = validator.validate(&module).map_err(|error| {
        let span = invalid::innermost(&error, &module, text.len());
        let message = invalid::explained(error.as_inner(), &module, text);
        quoted(&message, span, text)
    })?;
    Ok((module, info))
}

/// Checks for constructs that naga accepts and a mod may not have.
fn check(module: &Module, length: usize) -> Result<(), Refusal> {
    if let Some((handle, variable)) = module.global_variables.iter().next() {
        let what = match variable.space {
            AddressSpace::WorkGroup => "workgroup memory is not supported",
            AddressSpace::Private => "private variables are not supported; use variables inside functions",
            _ => "bindings are not supported; capture tensors with `Captured`",
        };
        return refuse(what, module.global_variables.get_span(handle));
    }
    if let Some((handle, _)) = module.overrides.iter().next() {
        return refuse(
            "overrides are not supported; use `const` or a member of `Uniforms`",
            module.overrides.get_span(handle),
        );
    }
    if let Some(entry) = module.entry_points.first() {
        return refuse(format!("entry points such as `{}` are not supported", entry.name), Span::default());
    }
    for (handle, ty) in module.types.iter() {
        let span = module.types.get_span(handle);
        match &ty.inner {
            TypeInner::Scalar(scalar) | TypeInner::Vector { scalar, .. } if is_plain(*scalar) => {}
            TypeInner::Struct { .. } => {}
            TypeInner::Array { size: ArraySize::Constant(_), .. } => {}
            TypeInner::Pointer { .. } => return refuse("pointer parameters are not supported", span),
            TypeInner::Matrix { .. } => return refuse("matrices are not supported; use vectors", span),
            TypeInner::Array { .. } => return refuse("arrays must have a fixed length", span),
            _ => {
                return refuse(
                    "only 32-bit numbers, bools, and vectors, arrays and structs of them are supported",
                    span,
                );
            }
        }
        if words(module, handle) > MOST_WORDS {
            return refuse(format!("a value may have at most {MOST_WORDS} numbers"), span);
        }
    }
    let mut calls: HashMap<Handle<Function>, usize> = HashMap::new();
    for (handle, function) in module.functions.iter() {
        let span = module.functions.get_span(handle);
        let sum: usize = function.local_variables.iter().map(|(_, local)| words(module, local.ty)).sum();
        if sum > MOST_WORDS {
            return refuse(
                format!("the variables of a function may have at most {MOST_WORDS} numbers"),
                span,
            );
        }
        // Called functions come before their callers. Naga reports recursion.
        let mut all = 1usize;
        each_call(&function.body, &mut |callee| {
            all = all.saturating_add(calls.get(&callee).copied().unwrap_or(1))
        });
        if all > MOST_CALLS {
            return refuse(
                format!(
                    "a function may make at most {MOST_CALLS} calls, including those of called functions"
                ),
                span,
            );
        }
        calls.insert(handle, all);
        let taken = function.name.as_deref() == Some("uniforms");
        if taken && span.to_range().is_some_and(|range| range.start < length) {
            return refuse("`uniforms` is predefined; rename the function", span);
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

/// Returns the number of words of a value of the type.
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

/// Calls `called` for each call in a block.
pub(super) fn each_call(block: &Block, called: &mut impl FnMut(Handle<Function>)) {
    for statement in block.iter() {
        match statement {
            Statement::Call { function, .. } => called(*function),
            Statement::Block(block) => each_call(block, called),
            Statement::If { accept, reject, .. } => {
                each_call(accept, called);
                each_call(reject, called);
            }
            Statement::Switch { cases, .. } => cases.iter().for_each(|case| each_call(&case.body, called)),
            Statement::Loop { body, continuing, .. } => {
                each_call(body, called);
                each_call(continuing, called);
            }
            _ => {}
        }
    }
}
