//! WGSL that naga accepts and Tint refuses. Tint is the compiler of Chromium and of Node's WebGPU.
//!
//! The program `scripts/shaders` compiles all kernels with Tint. This check needs no tools.

const BITWISE: [&str; 3] = ["&", "|", "^"];
const LOGICAL: [&str; 2] = ["&&", "||"];
const RELATIONAL: [&str; 6] = ["<", ">", "<=", ">=", "==", "!="];
const SHIFTS: [&str; 2] = ["<<", ">>"];
const ARITHMETIC: [&str; 5] = ["+", "-", "*", "/", "%"];
const ASSIGNMENTS: [&str; 11] = ["=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="];

/// Returns every expression of a text whose operators need parentheses, because WGSL defines no
/// precedence. An operator is a word between blanks: `a >> b`, but not `array<vec2<u32>>` or `-a`.
pub fn refused(text: &str) -> Vec<String> {
    let mut refused = Vec::new();
    let mut finish = |operators: Vec<&str>| {
        if !have_order(&operators) {
            refused.push(format!("`{}` need parentheses", operators.join("`, `")));
        }
    };
    // The operators of an expression, and of the expressions around it.
    let (mut operators, mut around) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let code = line.split_once("//").map_or(line, |(code, _)| code);
        for word in code.split_whitespace() {
            if ASSIGNMENTS.contains(&word) {
                finish(std::mem::take(&mut operators));
            } else if [&BITWISE[..], &LOGICAL, &RELATIONAL, &SHIFTS, &ARITHMETIC].concat().contains(&word) {
                operators.push(word);
                continue;
            }
            for end in word.chars() {
                match end {
                    '(' | '[' => around.push(std::mem::take(&mut operators)),
                    ')' | ']' => {
                        finish(std::mem::replace(&mut operators, around.pop().unwrap_or_default()));
                    }
                    '{' | '}' | ',' | ';' => finish(std::mem::take(&mut operators)),
                    _ => {}
                }
            }
        }
    }
    refused
}

/// True if WGSL's grammar has an expression with these operators and without parentheses.
fn have_order(operators: &[&str]) -> bool {
    let any = |of: &[&str]| operators.iter().any(|operator| of.contains(operator));
    let is_relational = |operator: &&str| RELATIONAL.contains(operator);
    let has_order_in_logic = |part: &[&str]| {
        part.iter().filter(|operator| is_relational(operator)).count() <= 1
            && part
                .split(is_relational)
                .all(|side| side.len() <= 1 || !side.iter().any(|o| SHIFTS.contains(o)))
    };
    if any(&BITWISE) {
        operators.iter().all(|operator| operator == &operators[0])
    } else {
        !(any(&["&&"]) && any(&["||"]))
            && operators.split(|operator| LOGICAL.contains(operator)).all(has_order_in_logic)
    }
}

#[test]
fn mixed_operators_are_found() {
    for text in [
        "let x = a >> n >> 1u;",
        "let x = a + b << 2u;",
        "let x = f(a, b & c | d);",
        "let x = a & b == c;",
        "if a && b || c {",
        "let x = y[a ^ b + 1u];",
        "if a < b == c {",
        "let x = a\n    >> n\n    >> 1u;",
    ] {
        assert_eq!(refused(text).len(), 1, "{text}");
    }
    for text in [
        "let x = (a >> n) >> 1u; // a >> n >> 1u",
        "let x = a >> n == b >> n && c + d * e < f;",
        "x |= a & b & c; y ^= (a | b) ^ c;",
        "var x: array<vec2<u32>> = array<vec2<u32>>(); let y = -a - -b;",
        "for (var n = a >> 1u; n < 1u << 4u; n += 1u) { if n > 3u { x = n; } } if n < 5u && n > 2u {",
    ] {
        assert_eq!(refused(text), Vec::<String>::new(), "{text}");
    }
}
