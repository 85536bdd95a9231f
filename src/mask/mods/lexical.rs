//! Checks of a text as characters, before naga reads it.

use naga::Span;

use super::write::{Refusal, refuse};

/// The deepest nesting of brackets: naga recurses for each bracket.
const DEEPEST: usize = 48;
/// The most words and signs of a statement, for the same reason.
const LONGEST_STATEMENT: usize = 400;
/// The most occurrences of `else` in a text, for the same reason.
const MOST_ELSES: usize = 100;

/// The line ends of WGSL.
const LINE_ENDS: [char; 7] = ['\n', '\u{b}', '\u{c}', '\r', '\u{85}', '\u{2028}', '\u{2029}'];

/// Returns the text with spaces in place of its comments, byte for byte.
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

/// Checks that naga's recursion fits its stack.
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
            // A type argument or a comparison.
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
            (depth + angles > DEEPEST, "nested too deep; assign parts to variables"),
            (words > LONGEST_STATEMENT, "the statement is too long; split it or capture a tensor"),
            (elses > MOST_ELSES, "too many `else` branches; use `switch`, an array or a captured tensor"),
        ];
        if let Some((_, why)) = refused.into_iter().find(|(holds, _)| *holds) {
            return refuse(why, span);
        }
    }
    Ok(())
}

/// True if the text declares `Uniforms`.
pub(super) fn has_uniforms(text: &str) -> bool {
    let text = without_comments(text);
    let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
    words.clone().zip(words.skip(1)).any(|pair| pair == ("struct", "Uniforms"))
}

#[cfg(test)]
mod tests {
    use super::without_comments;

    #[test]
    fn comments_become_spaces() {
        for (text, [before, after], spaces) in [
            ("a // é\nb", ["a", "\nb"], 6),
            ("a /* b /* c */ d */ e", ["a", "e"], 19),
            ("a / b * /**/ c", ["a / b *", "c"], 6),
            ("// /*\na */", ["", "\na */"], 5),
        ] {
            assert_eq!(without_comments(text), format!("{before}{}{after}", " ".repeat(spaces)));
        }
    }
}
