//! Unrolls loops of WGSL, so that literals index the arrays in them.
//!
//! An array of a function stays in registers only if every index into it is constant after
//! compilation. Drivers differ in the loops that they unroll. So the text marks the loops that must
//! be unrolled:
//!
//! ```wgsl
//! /* unrolled */ for (var n = 0u; n < SCORES; n++) {
//!     s[n] = vec4<f32>();
//! }
//! ```
//!
//! becomes `{ s[0u] = vec4<f32>(); } { s[1u] = …`. Bounds are expressions of literals, the text's
//! constants and the variables of surrounding unrolled loops. Any other loop stays unchanged, which
//! has the same meaning.

use std::cell::RefCell;
use std::collections::HashMap;

const MARK: &str = "/* unrolled */";

/// Returns `text` with every marked loop unrolled.
pub(crate) fn unrolled(text: &str) -> String {
    if !text.contains(MARK) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() * 2);
    expand(text, &Constants::of(text), &mut out);
    out
}

fn expand(text: &str, constants: &Constants, out: &mut String) {
    let mut rest = text;
    while let Some(at) = rest.find(MARK) {
        out.push_str(&rest[..at]);
        rest = &rest[at + MARK.len()..];
        let Some((header, body, after)) = for_loop(rest) else { continue };
        let Some(header) = Header::parse(header, constants) else { continue };
        if declares(body, header.name) || has_jump(body) {
            continue;
        }
        let mut value = header.from;
        while value < header.to {
            out.push('{');
            expand(&with(body, header.name, value), constants, out);
            out.push_str("}\n");
            value += header.step;
        }
        rest = after;
    }
    out.push_str(rest);
}

/// Splits a loop into the text in its parentheses, the text in its braces, and the rest.
fn for_loop(text: &str) -> Option<(&str, &str, &str)> {
    let text = text.trim_start().strip_prefix("for")?.trim_start();
    let header = enclosed(text, '(', ')')?;
    let text = text[header.len() + 2..].trim_start();
    let body = enclosed(text, '{', '}')?;
    Some((header, body, &text[body.len() + 2..]))
}

/// The text between the bracket at the start of `text` and the matching closing bracket.
fn enclosed(text: &str, open: char, close: char) -> Option<&str> {
    if !text.starts_with(open) {
        return None;
    }
    let mut depth = 0;
    for (at, c) in code(text) {
        if c == open {
            depth += 1;
        } else if c == close {
            depth -= 1;
            if depth == 0 {
                return Some(&text[1..at]);
            }
        }
    }
    None
}

/// The characters outside line comments.
fn code(text: &str) -> impl Iterator<Item = (usize, char)> {
    let mut in_comment = false;
    text.char_indices().filter(move |&(at, c)| {
        in_comment = if in_comment { c != '\n' } else { text[at..].starts_with("//") };
        !in_comment
    })
}

struct Header<'a> {
    name: &'a str,
    from: u32,
    to: u32,
    step: u32,
}

impl<'a> Header<'a> {
    /// `var NAME = FROM; NAME < TO; NAME++` or `…; NAME += STEP`.
    fn parse(text: &'a str, constants: &Constants) -> Option<Self> {
        let mut parts = text.split(';').map(str::trim);
        let (start, condition, next) = (parts.next()?, parts.next()?, parts.next()?);
        let (name, from) = start.strip_prefix("var ")?.split_once('=')?;
        let name = name.trim();
        let to = condition.strip_prefix(name)?.trim_start().strip_prefix('<')?;
        let next = next.strip_prefix(name)?.trim_start();
        let step = match next.strip_prefix("+=") {
            Some(step) => constants.evaluate(step)?,
            None if next == "++" => 1,
            None => return None,
        };
        let header = Header { name, from: constants.evaluate(from)?, to: constants.evaluate(to)?, step };
        (step > 0).then_some(header)
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The words of a text with their positions, without the names of members.
fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        loop {
            let start = at + text[at..].find(is_word)?;
            let length = text[start..].find(|c| !is_word(c)).unwrap_or(text.len() - start);
            at = start + length;
            if !text[..start].ends_with('.') {
                return Some((start, &text[start..at]));
            }
        }
    })
}

/// True if `body` declares another variable called `name`.
fn declares(body: &str, name: &str) -> bool {
    let all: Vec<&str> = words(body).map(|(_, word)| word).collect();
    all.windows(2).any(|pair| ["var", "let"].contains(&pair[0]) && pair[1] == name)
}

/// True if `body` may leave the loop or an iteration. A jump in an inner loop counts too, to be
/// safe.
fn has_jump(body: &str) -> bool {
    words(body).any(|(_, word)| ["break", "continue"].contains(&word))
}

/// Returns `body` without comments, with `value` instead of `name`.
fn with(body: &str, name: &str, value: u32) -> String {
    let bare: String = code(body).map(|(_, c)| c).collect();
    let mut out = String::with_capacity(bare.len());
    let mut from = 0;
    for (at, word) in words(&bare) {
        if word == name {
            out.push_str(&bare[from..at]);
            out.push_str(&format!("{value}u"));
            from = at + word.len();
        }
    }
    out.push_str(&bare[from..]);
    out
}

/// The constants that a text declares, evaluated on demand.
struct Constants<'a> {
    declared: HashMap<&'a str, &'a str>,
    values: RefCell<HashMap<&'a str, Option<u32>>>,
}

impl<'a> Constants<'a> {
    fn of(text: &'a str) -> Self {
        let mut declared = HashMap::new();
        for start in text.match_indices("const ").map(|(at, _)| at) {
            // Module constants start at the beginning of a line.
            if start > 0 && !text[..start].ends_with('\n') {
                continue;
            }
            let declaration = text[start + 6..].split(';').next().unwrap_or_default();
            if let Some((name, value)) = declaration.split_once('=') {
                let name = name.split(':').next().unwrap_or_default().trim();
                declared.insert(name, value.trim());
            }
        }
        Constants { declared, values: RefCell::default() }
    }

    fn named(&self, name: &str) -> Option<u32> {
        let (name, text) = self.declared.get_key_value(name)?;
        if let Some(value) = self.values.borrow().get(name) {
            return *value;
        }
        // A constant that depends on itself has no value.
        self.values.borrow_mut().insert(name, None);
        let value = self.evaluate(text);
        self.values.borrow_mut().insert(name, value);
        value
    }

    /// Evaluates an expression of unsigned numbers and bools, where a bool is 1 or 0. Returns
    /// `None` for any other expression.
    fn evaluate(&self, text: &str) -> Option<u32> {
        let mut parser = Parser { rest: text, constants: self };
        let value = parser.binary(0)?;
        parser.rest.trim_start().is_empty().then_some(value)
    }
}

struct Parser<'t, 'c, 'd> {
    rest: &'t str,
    constants: &'c Constants<'d>,
}

/// Operators by precedence, the weakest first. Where one operator is a prefix of another in the
/// same level, the longest comes first.
const OPERATORS: [&[&str]; 10] = [
    &["||"],
    &["&&"],
    &["|"],
    &["^"],
    &["&"],
    &["==", "!="],
    &["<=", ">=", "<", ">"],
    &["<<", ">>"],
    &["+", "-"],
    &["*", "/", "%"],
];

impl Parser<'_, '_, '_> {
    fn takes(&mut self, token: &str) -> bool {
        let found = self.rest.trim_start().strip_prefix(token);
        self.rest = found.unwrap_or(self.rest);
        found.is_some()
    }

    /// Parses an operator of `level`. A longer operator with the same start does not match.
    fn operator(&mut self, level: usize) -> Option<&'static str> {
        let rest = self.rest.trim_start();
        let longest = OPERATORS
            .iter()
            .copied()
            .flatten()
            .filter(|op| rest.starts_with(**op))
            .max_by_key(|op| op.len())?;
        OPERATORS[level].contains(longest).then(|| {
            self.rest = &rest[longest.len()..];
            *longest
        })
    }

    fn binary(&mut self, level: usize) -> Option<u32> {
        if level == OPERATORS.len() {
            return self.unary();
        }
        let mut a = self.binary(level + 1)?;
        while let Some(operator) = self.operator(level) {
            let b = self.binary(level + 1)?;
            a = match operator {
                "||" => u32::from(a != 0 || b != 0),
                "&&" => u32::from(a != 0 && b != 0),
                "|" => a | b,
                "^" => a ^ b,
                "&" => a & b,
                "==" => u32::from(a == b),
                "!=" => u32::from(a != b),
                "<=" => u32::from(a <= b),
                ">=" => u32::from(a >= b),
                "<" => u32::from(a < b),
                ">" => u32::from(a > b),
                "<<" => a.checked_shl(b)?,
                ">>" => a.checked_shr(b)?,
                "+" => a.checked_add(b)?,
                "-" => a.checked_sub(b)?,
                "*" => a.checked_mul(b)?,
                "/" => a.checked_div(b)?,
                _ => a.checked_rem(b)?,
            };
        }
        Some(a)
    }

    fn unary(&mut self) -> Option<u32> {
        if self.takes("!") {
            return Some(u32::from(self.unary()? == 0));
        }
        if self.takes("~") {
            return Some(!self.unary()?);
        }
        if self.takes("(") {
            let value = self.binary(0)?;
            return self.takes(")").then_some(value);
        }
        let text = self.rest.trim_start();
        let end = text.find(|c| !is_word(c)).unwrap_or(text.len());
        let (word, rest) = text.split_at(end);
        self.rest = rest;
        if let Some(digits) =
            word.strip_suffix('u').or(Some(word)).filter(|w| w.starts_with(|c: char| c.is_ascii_digit()))
        {
            return digits.parse().ok();
        }
        match word {
            "true" => Some(1),
            "false" => Some(0),
            "select" => self.arguments::<3>().map(|[no, yes, which]| if which != 0 { yes } else { no }),
            "min" => self.arguments::<2>().map(|[a, b]| a.min(b)),
            "max" => self.arguments::<2>().map(|[a, b]| a.max(b)),
            _ => self.constants.named(word),
        }
    }

    fn arguments<const N: usize>(&mut self) -> Option<[u32; N]> {
        let mut values = [0; N];
        for (n, value) in values.iter_mut().enumerate() {
            if !self.takes(if n == 0 { "(" } else { "," }) {
                return None;
            }
            *value = self.binary(0)?;
        }
        self.takes(")").then_some(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bare(text: &str) -> String {
        unrolled(text).split_whitespace().collect()
    }

    #[test]
    fn a_loop_is_written_out() {
        let text = "const N: u32 = 2u;\n/* unrolled */ for (var n = 0u; n < N; n++) { a[n] = b.n + xn; // n\n}\nrest";
        assert_eq!(bare(text), "constN:u32=2u;{a[0u]=b.n+xn;}{a[1u]=b.n+xn;}rest");
    }

    #[test]
    fn inner_bounds_may_need_outer_variables() {
        let text = "/* unrolled */ for (var i = 1u; i < 4u; i += 2u) { /* unrolled */ for (var j = 0u; j < min(i, 2u); j++) { f(i, j); } }";
        assert_eq!(bare(text), "{{f(1u,0u);}}{{f(3u,0u);}{f(3u,1u);}}");
    }

    #[test]
    fn a_loop_without_turns_is_nothing() {
        assert_eq!(bare("a; /* unrolled */ for (var i = 0u; i < 0u; i++) { f(i); } b;"), "a;b;");
    }

    #[test]
    fn other_loops_are_not_unrolled() {
        for text in [
            "for (var i = 0u; i < p.n; i++) { f(i); }",
            "for (var i = 0u; i < 2u; i++) { let i = 1u; }",
            "for (var i = 0u; i < 2u; i++) { if x { break; } }",
            "for (var i = 0u; i < 2u; i += 0u) { f(i); }",
            "while x { f(); }",
        ] {
            let bare: String = text.split_whitespace().collect();
            assert_eq!(self::bare(&format!("{MARK} {text}")), bare);
        }
    }

    #[test]
    fn expressions() {
        let text = "const A: u32 = B * 2u;\nconst B: u32 = select(3u, 7u, C);\nconst C: bool = 1u < 2u && !(1u == 2u);\n\
                    const LOOP: u32 = LOOP + 1u;\nconst F: f32 = 1.5;\n";
        let constants = Constants::of(text);
        for (expression, value) in [
            ("A", Some(14)),
            ("(A + 1u) / 4u % 2u", Some(1)),
            ("1u << 3u | 1u", Some(9)),
            ("max(2u, min(A, 5u)) - 1u", Some(4)),
            ("7u >= 7u", Some(1)),
            ("~0u >> 31u", Some(1)),
            ("0u - 1u", None),
            ("1u / 0u", None),
            ("LOOP", None),
            ("F", None),
            ("lane", None),
            ("A A", None),
        ] {
            assert_eq!(constants.evaluate(expression), value, "{expression}");
        }
    }
}
