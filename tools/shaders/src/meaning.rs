//! The meaning of a kernel as a text. It does not change if names, padding members or branches that
//! are never taken change.
//!
//! naga writes the module as WGSL again. Values replace constants. Branches that are never taken
//! are removed, and then functions that nothing calls. The declaration of `Params` is removed
//! (`tests/laws/contract.rs` compares its layout with the host's). The other declarations are
//! sorted, and names are renumbered.

use std::collections::HashMap;

use naga::back::wgsl::{WriterFlags, write_string};
use naga::compact::{KeepUnused, compact};
use support::wgsl::{parse, validate};

/// Returns the text of a kernel's meaning.
///
/// # Errors
/// naga refuses the kernel.
pub fn meaning(text: &str) -> Result<String, String> {
    let mut module = parse(text)?;
    compact(&mut module, KeepUnused::No);
    let info = validate(&module, text)?;
    let written = write_string(&module, &info, WriterFlags::empty()).map_err(|e| e.to_string())?;
    Ok(reduced(&written))
}

fn reduced(written: &str) -> String {
    let items = items(written);
    let constants: HashMap<&str, &str> = items.iter().filter_map(|item| constant(item)).collect();
    let kept = items.iter().filter(|item| constant(item).is_none() && !item.starts_with("struct Params "));
    let mut kept: Vec<String> = kept.map(|item| reached(&with_values(item, &constants))).collect();
    loop {
        let before = kept.len();
        kept = called(&kept);
        if kept.len() == before {
            break;
        }
    }
    let mut kept: Vec<_> = kept.iter().map(|item| renumbered(item)).collect();
    kept.sort_unstable();
    kept.join("\n")
}

/// naga numbers the names that several things share in the order of the module. This function
/// numbers them in the order of the declaration.
fn renumbered(item: &str) -> String {
    let mut seen: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut text = String::new();
    for piece in pieces(item) {
        let stem = piece.trim_end_matches(|c: char| c.is_ascii_digit());
        let stem = if stem.len() < piece.len() { stem.strip_suffix('_') } else { Some(piece) };
        match stem.filter(|stem| stem.starts_with(|c: char| c.is_ascii_alphabetic())) {
            None => text.push_str(piece),
            Some(stem) => {
                let names = seen.entry(stem).or_default();
                let nth = names.iter().position(|name| *name == piece).unwrap_or_else(|| {
                    names.push(piece);
                    names.len() - 1
                });
                text.push_str(&format!("{stem}#{nth}"));
            }
        }
    }
    text
}

/// Returns the declarations. Each begins in the first column, as does the brace that ends it.
fn items(text: &str) -> Vec<String> {
    let mut items: Vec<String> = Vec::new();
    let mut goes_on = false;
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        // The attributes of an entry point are on separate lines.
        let begins = !line.starts_with([' ', '}']) && !goes_on;
        match items.last_mut() {
            Some(last) if !begins => *last += &format!("\n{line}"),
            _ => items.push(line.to_string()),
        }
        goes_on = line.starts_with('@') && !line.ends_with(';');
    }
    items
}

/// `const NAME: TYPE = VALUE;`
fn constant(item: &str) -> Option<(&str, &str)> {
    let (name, rest) = item.strip_prefix("const ")?.split_once(':')?;
    Some((name, rest.split_once("= ")?.1.trim_end_matches(';')))
}

fn is_of_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the words of a text and the texts between them.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let first = rest.chars().next()?;
        let end = rest.find(|c| is_of_word(c) != is_of_word(first)).unwrap_or(rest.len());
        let (piece, after) = rest.split_at(end);
        rest = after;
        Some(piece)
    })
}

fn with_values(item: &str, constants: &HashMap<&str, &str>) -> String {
    pieces(item).map(|piece| constants.get(piece).copied().unwrap_or(piece)).collect()
}

/// Removes the branches of `if true` and `if false` that are not taken. The other branches keep
/// their braces.
fn reached(item: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    // The indentation of a branch that is removed, and true if its `else` branch stays.
    let mut out: Option<(usize, bool)> = None;
    // The indentations of the `if true` branches around the line.
    let mut taken: Vec<usize> = Vec::new();
    for line in item.lines() {
        let code = line.trim_start();
        let depth = line.len() - code.len();
        if let Some((at, otherwise)) = out {
            if depth == at && code.starts_with('}') {
                out = None;
                if code == "} else {" && otherwise {
                    kept.push("{");
                } else if code == "} else {" {
                    out = Some((at, false));
                }
            }
            continue;
        }
        let ends_taken = code.starts_with('}') && taken.last() == Some(&depth);
        if ends_taken {
            taken.pop();
        }
        match code {
            "if false {" => out = Some((depth, true)),
            "if true {" => {
                taken.push(depth);
                kept.push("{");
            }
            "} else {" if ends_taken => {
                out = Some((depth, false));
                kept.push("}");
            }
            _ => kept.push(line),
        }
    }
    kept.join("\n")
}

/// Removes functions that no other item names.
fn called(items: &[String]) -> Vec<String> {
    let name = |item: &str| {
        let rest = item.strip_prefix("fn ")?;
        Some(rest[..rest.find('(')?].to_string())
    };
    let named = |name: &str, by: usize| {
        items.iter().enumerate().any(|(n, item)| n != by && pieces(item).any(|piece| piece == name))
    };
    let is_kept = |n: usize, item: &str| name(item).is_none_or(|name| named(&name, n));
    items.iter().enumerate().filter(|(n, item)| is_kept(*n, item)).map(|(_, item)| item.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "
        const HAS_X: bool = false;
        struct Params { a: u32, pad: u32 }
        @group(0) @binding(0) var<uniform> p: Params;
        @group(0) @binding(1) var<storage, read_write> out: array<u32>;
        fn x_at() -> u32 { return 0u; }
        @compute @workgroup_size(1)
        fn main() { if HAS_X { out[1] = x_at(); } out[0] = p.a; }";

    #[test]
    fn names_padding_and_what_is_not_reached_are_left_out() {
        let else_of_true = OLD.replace("if HAS_X {", "if !HAS_X { out[2] = 2u; } else {");
        assert_eq!(meaning(&else_of_true), meaning(&else_of_true.replace("return 0u", "return 7u")));
        let new = format!("fn o(x: u32) -> u32 {{ return x; }}{OLD}")
            .replace("HAS_X", "WITH_X")
            .replace(", pad: u32", "")
            .replace("return 0u", "return 7u");
        assert_eq!(meaning(OLD), meaning(&new));
    }

    #[test]
    fn changes_are_seen() {
        let changes =
            [("= p.a", "= p.a + 1u"), ("false", "true"), ("binding(1)", "binding(2)"), ("p.a", "p.pad")];
        for (from, to) in changes {
            assert_ne!(meaning(OLD), meaning(&OLD.replace(from, to)), "{from}");
        }
    }
}
