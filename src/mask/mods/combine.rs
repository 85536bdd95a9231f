//! Combined mods: the texts of the parts with distinct names, and a function that calls them.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::source::uniform_reader;
use super::text::{AT, UNIFORM_WORDS, module, with_stack};
use super::write::{Given, Writer};
use super::{Bound, Captured, Interned, Kind, Source, intern};
use crate::tensor::{Error, TensorView};

/// The kind of a combination of mods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Combination {
    And,
    Or,
    Not,
    /// Batch entry n uses the n-th mod. Further entries use the last.
    PerBatch,
    /// Positions count from the start of the query's sequence.
    PerSequence,
    /// Each function applies to the result of the one before.
    Then,
}

/// Combines `mods`. The result captures their tensors in order.
///
/// # Errors
/// More captures or a longer text than a mod may have, or a part that declares its derivative.
pub(super) fn combined<'a>(how: Combination, mods: &[Bound<'a>]) -> Result<Bound<'a>, Error> {
    let parts: Vec<_> = mods.iter().map(|bound| bound.interned).collect();
    let interned = known(how, &parts)?;
    let tensors: Vec<TensorView> =
        mods.iter().flat_map(|bound| bound.tensors()).map(|(_, view)| view).collect();
    let mut bound = Bound::new(interned, &tensors);
    // With this number, the check finds a part that lacks tensors.
    bound.given = mods.iter().map(|bound| bound.given).sum();
    let mut words = mods.iter().flat_map(|bound| bound.words().to_vec());
    bound.words.iter_mut().zip(&mut words).for_each(|(to, word)| *to = word);
    let missing = mods.iter().any(|bound| bound.bytes != 4 * bound.interned.uniform_words());
    bound.bytes = if missing { 0 } else { bytes_of(&parts) };
    Ok(bound)
}

fn bytes_of(parts: &[Interned]) -> usize {
    16 * parts.iter().map(|part| part.uniform_words()).sum::<usize>().div_ceil(4)
}

type Key = (Combination, Vec<Interned>);

fn known(how: Combination, parts: &[Interned]) -> Result<Interned, Error> {
    static KNOWN: OnceLock<Mutex<HashMap<Key, Interned>>> = OnceLock::new();
    let known = || KNOWN.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let key = (how, parts.to_vec());
    if let Some(interned) = known().get(&key) {
        return Ok(*interned);
    }
    let kind = if how == Combination::Then { Kind::Score } else { Kind::Pairs };
    let refused = |message| Error::Mod { function: kind.function(), message };
    if parts.is_empty() {
        return Err(refused("the combination is empty; pass at least one function".to_string()));
    }
    let words: usize = parts.iter().map(|part| part.uniform_words()).sum();
    if words > UNIFORM_WORDS {
        let (got, most) = (4 * words, 4 * UNIFORM_WORDS);
        return Err(refused(format!(
            "the combined `Uniforms` have {got} bytes, but at most {most} are supported; capture a tensor"
        )));
    }
    let sources: Vec<&Source> = parts.iter().map(|part| part.source()).collect();
    let (text, captured) = with_stack(|| text_of(how, &sources)).map_err(refused)?;
    let interned = intern(kind, &text, &captured)?;
    known().insert(key, interned);
    Ok(interned)
}

/// Returns the text of a combination, and its captured tensors.
fn text_of(how: Combination, parts: &[&Source]) -> Result<(String, Vec<Captured>), String> {
    let (mut text, mut captured) = (String::new(), Vec::new());
    let (mut roots, mut words) = (Vec::new(), 0);
    for (n, part) in parts.iter().enumerate() {
        let prefix = format!("p{n}");
        let before = captured.len();
        for one in &part.captured {
            captured.push(Captured { name: unlike(&captured, &one.name), ..one.clone() });
        }
        let (own, root) = renamed(part, &prefix, &captured[before..], words)?;
        text += &own;
        roots.push(root);
        words += part.uniform_words;
    }
    if words > 0 {
        let members: String = (0..words.div_ceil(4)).map(|n| format!("    w{n}: vec4<u32>,\n")).collect();
        text += &format!("struct Uniforms {{\n{members}}}\n");
    }
    let asked = |with: &str| -> Vec<String> { roots.iter().map(|root| format!("{root}({with})")).collect() };
    let body = match how {
        Combination::And => format!("    return {};\n", asked("at").join(" && ")),
        Combination::Or => format!("    return {};\n", asked("at").join(" || ")),
        Combination::Not => format!("    return !{};\n", asked("at").concat()),
        Combination::PerBatch => {
            let asked = asked("at");
            let cases = asked.iter().enumerate().map(|(n, ask)| {
                let default = if n + 1 == asked.len() { ", default" } else { "" };
                format!("        case {n}u{default}: {{ return {ask}; }}\n")
            });
            format!("    switch at.batch {{\n{}    }}\n", cases.collect::<String>())
        }
        Combination::PerSequence => format!(
            "    var own = at;\n    \
                 own.position -= i32(at.sequence_start);\n    \
                 own.query = u32(max(own.position, 0));\n    \
                 own.key -= at.sequence_start;\n    \
                 own.sequence_start = 0u;\n    \
                 return {};\n",
            asked("own").concat()
        ),
        Combination::Then => {
            let steps = roots.iter().map(|root| format!("    x = {root}(x, at);\n"));
            format!("    var x = score;\n{}    return x;\n", steps.collect::<String>())
        }
    };
    let kind = if how == Combination::Then { Kind::Score } else { Kind::Pairs };
    text += &format!("{} {{\n{body}}}\n", kind.signature());
    Ok((text, captured))
}

/// Returns the name, or a longer one if it is taken.
fn unlike(taken: &[Captured], name: &str) -> String {
    let mut name = name.to_string();
    while taken.iter().any(|other| other.name == name) {
        name.push_str("_2");
    }
    name
}

/// Returns a mod's text with `prefix` before its names, and the name of its function. The text
/// reads its uniforms from word `first` on.
fn renamed(
    part: &Source,
    prefix: &str,
    captured: &[Captured],
    first: usize,
) -> Result<(String, String), String> {
    let (module, info) = module(&part.text, &part.captured)?;
    let quoted = |refusal: super::write::Refusal| refusal.quoted(&part.text);
    let find = |name: &str| {
        module.functions.iter().find(|(_, f)| f.name.as_deref() == Some(name)).map(|(handle, _)| handle)
    };
    if part.kind == Kind::Score && find("score_mod_slope").is_some() {
        return Err("a function with `score_mod_slope` cannot be combined; write one function".to_string());
    }
    let named =
        |name: &str| module.types.iter().find(|(_, ty)| ty.name.as_deref() == Some(name)).map(|(h, _)| h);
    let (Some(at), Some(root)) = (named("At"), find(part.kind.function())) else {
        return Err("`At` or the function is missing".to_string());
    };
    let mut given = HashMap::new();
    let mut give = |function: &str, name: String| {
        given.extend(find(function).map(|handle| (handle, Given { name, captured: None })));
    };
    for (one, renamed) in part.captured.iter().zip(captured) {
        give(&format!("{}_at", one.name), format!("{}_at", renamed.name));
    }
    give("neg_inf", "neg_inf".to_string());
    let uniforms = named("Uniforms").filter(|_| part.uniform_words > 0);
    if uniforms.is_some() {
        give("uniforms", format!("{prefix}_uniforms"));
    }
    let members = AT.map(|(name, ..)| (name, true));
    let writer = Writer {
        module: &module,
        info: &info,
        prefix,
        at,
        at_name: "At".to_string(),
        members: &members,
        counts_rounds: false,
        given,
        readings: HashMap::new(),
    };
    let mut text = writer.structs();
    if let Some(ty) = uniforms {
        let word = |n: u32| format!("all.w{}[{}]", (first + n as usize) / 4, (first + n as usize) % 4);
        text += &uniform_reader(&writer, ty, "    let all = uniforms();\n", word).map_err(quoted)?.0;
    }
    for (handle, _) in module.functions.iter().filter(|(handle, _)| !writer.given.contains_key(handle)) {
        text += &writer.value(handle).map_err(quoted)?;
    }
    let root = writer.function(root);
    Ok((text, root))
}
