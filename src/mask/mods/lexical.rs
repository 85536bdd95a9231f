//! A text as characters, before naga has seen it.

use naga::Span;

use super::write::{Refusal, refuse};

/// How deep brackets may be nested: naga goes down the stack with each.
const DEEPEST: usize = 48;
/// How many words and signs a statement may have, likewise.
const LONGEST_STATEMENT: usize = 400;
/// How often a text may say `else`, likewise.
const MOST_ELSES: usize = 100;

/// Where lines end, for WGSL.
const LINE_ENDS: [char; 7] = ['\n', '\u{b}', '\u{c}', '\r', '\u{85}', '\u{2028}', '\u{2029}'];

/// The text with spaces for its comments, byte for byte.
pub(super) fn without_comments(text: &str) -> String {
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
pub(super) fn check_depth(text: &str) -> Result<(), Refusal> {
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
pub(super) fn has_uniforms(text: &str) -> bool {
    let text = without_comments(text);
    let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
    words.clone().zip(words.skip(1)).any(|pair| pair == ("struct", "Uniforms"))
}
