//! Faults in a shader. Each replacement has the length of the original, because it is written into
//! the test program.

use std::ops::Range;

use crate::site::{self, Kind, Site};

const OPERATORS: [&str; 14] =
    ["&&", "||", "<<", ">>", "<=", ">=", "==", "!=", "->", "+=", "-=", "*=", "++", "--"];

/// Words of names that hold a stride or a length.
const STRIDES: [&str; 8] = ["stride", "_len", "_dim", "width", "columns", "STEP", "VECTORS", "WORKGROUP"];

/// Words of conditions that depend on a mask.
const MASKS: [&str; 6] = ["mask_mod", "hidden", "hides", "seen", "asks_pairs", "is_kept"];

pub fn sites(file: &str, text: &str) -> Vec<Site> {
    let tokens = tokens(text);
    let scan = Scan { file, text, tokens: &tokens };
    site::numbered((0..tokens.len()).flat_map(|n| scan.faults(n)).collect())
}

struct Scan<'a> {
    file: &'a str,
    text: &'a str,
    tokens: &'a [Range<usize>],
}

impl Scan<'_> {
    fn token(&self, n: usize) -> &str {
        self.tokens.get(n).map_or("", |range| &self.text[range.clone()])
    }

    fn site(&self, kind: Kind, range: Range<usize>, after: String) -> Site {
        let after = format!("{after:0$}", range.len());
        assert_eq!(range.len(), after.len(), "{}: {after}", self.file);
        Site::new(self.file, self.text, kind, range, after)
    }

    /// The faults at the n-th token.
    fn faults(&self, n: usize) -> Vec<Site> {
        let (at, token) = (self.tokens[n].clone(), self.token(n));
        let next = self.token(n + 1);
        let one = |kind, after: &str| vec![self.site(kind, at.clone(), after.into())];
        let is_mask = self.file.contains("/mask/");
        match token {
            "workgroupBarrier" => vec![self.site(Kind::Barrier, at.start..at.end + 3, String::new())],
            "min" if next == "(" => one(Kind::Bound, "max"),
            "max" if next == "(" => one(Kind::Bound, "min"),
            "x" if n > 1 && self.token(n - 2) == "strides" => one(Kind::Stride, "y"),
            "y" if n > 1 && self.token(n - 2) == "strides" => one(Kind::Stride, "z"),
            "z" if n > 1 && self.token(n - 2) == "strides" => one(Kind::Stride, "x"),
            "&&" | "||" | "==" | "!=" => {
                let after = ["||", "&&", "!=", "=="]
                    [["&&", "||", "==", "!="].iter().position(|t| *t == token).unwrap_or(0)];
                one(if is_mask { Kind::MaskRule } else { Kind::Operand }, after)
            }
            "if" => self.condition(n, is_mask),
            "<" | ">" if self.is_spaced(&at) => {
                vec![self.site(Kind::Bound, at.start..at.end + 1, format!("{token}="))]
            }
            "<=" | ">=" => one(Kind::Bound, &token[..1]),
            "+" | "-" | "*" | "/" | "%" if self.is_spaced(&at) => self.arithmetic(n),
            _ => self.number(token).map_or(vec![], |after| one(Kind::Constant, &after)),
        }
    }

    /// A condition that is always true, and one that is always false.
    fn condition(&self, n: usize, is_mask: bool) -> Vec<Site> {
        let start = self.tokens[n].end + 1;
        let rest = &self.text[start..];
        let Some(condition) = rest.find(" {").map(|end| &rest[..end]) else { return vec![] };
        if condition.contains('\n') || !(is_mask || MASKS.iter().any(|word| condition.contains(word))) {
            return vec![];
        }
        let range = start..start + condition.len();
        let words = ["true", "false"].into_iter().filter(|word| word.len() <= condition.len());
        words.map(|word| self.site(Kind::MaskRule, range.clone(), word.into())).collect()
    }

    fn arithmetic(&self, n: usize) -> Vec<Site> {
        let token = self.token(n);
        let neighbours = [self.token(n - 1), self.token(n + 1), self.token(n + 3)];
        let has_stride = neighbours.iter().any(|name| STRIDES.iter().any(|word| name.contains(word)));
        let kind = if token == "*" && has_stride { Kind::Stride } else { Kind::Operand };
        let after = match token {
            "-" | "*" => "+",
            "+" => "-",
            "/" => "*",
            _ => "/",
        };
        let mut sites = vec![self.site(kind, self.tokens[n].clone(), after.into())];
        if matches!(token, "-" | "/")
            && let (Some(left), Some(right)) = (self.path_before(n), self.path_after(n))
        {
            let [a, b] = [&left, &right].map(|range| &self.text[range.clone()]);
            let range = left.start..right.end;
            sites.push(self.site(Kind::Operand, range, format!("{b} {token} {a}")));
        }
        sites
    }

    /// The range of `a.b.c` or a number before the n-th token.
    fn path_before(&self, n: usize) -> Option<Range<usize>> {
        let mut first = n - 1;
        while first > 1 && self.token(first - 1) == "." {
            first -= 2;
        }
        let is_plain =
            is_word(self.token(first)) && !["*", "/", "%", "-"].contains(&self.token(first.checked_sub(1)?));
        is_plain.then(|| self.tokens[first].start..self.tokens[n - 1].end)
    }

    /// The range of `a.b.c` or a number after the n-th token.
    fn path_after(&self, n: usize) -> Option<Range<usize>> {
        let mut last = n + 1;
        while self.token(last + 1) == "." {
            last += 2;
        }
        let is_plain =
            is_word(self.token(last)) && !["*", "/", "%", "(", "["].contains(&self.token(last + 1));
        is_plain.then(|| self.tokens[n + 1].start..self.tokens[last].end)
    }

    fn is_spaced(&self, at: &Range<usize>) -> bool {
        self.text[..at.start].ends_with(' ') && self.text[at.end..].starts_with(' ')
    }

    /// Another number of the same length, for `7u` and `7.0`.
    fn number(&self, token: &str) -> Option<String> {
        let digit = token.chars().next()?.to_digit(10)?;
        let rest = &token[1..];
        let after = if digit == 9 { 8 } else { digit + 1 };
        (rest == "u" || rest == ".0").then(|| format!("{after}{rest}"))
    }
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
}

/// The tokens outside comments, attributes and assertions about constants.
fn tokens(text: &str) -> Vec<Range<usize>> {
    let mut tokens = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let code = line.split("//").next().unwrap_or_default();
        if !code.starts_with("const_assert") && !code.starts_with('@') {
            tokens_of_line(code, start, &mut tokens);
        }
        start += line.len();
    }
    tokens
}

fn tokens_of_line(code: &str, start: usize, tokens: &mut Vec<Range<usize>>) {
    let mut at = 0;
    while let Some(c) = code[at..].chars().next() {
        let rest = &code[at..];
        let len = if c.is_ascii_digit() {
            rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '.').unwrap_or(rest.len())
        } else if is_word(rest) {
            rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len())
        } else {
            OPERATORS.iter().find(|op| rest.starts_with(**op)).map_or(c.len_utf8(), |op| op.len())
        };
        if !c.is_whitespace() {
            tokens.push(start + at..start + at + len);
        }
        at += len;
    }
}
