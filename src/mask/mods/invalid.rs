//! Messages of naga's validator for a mod, with names and types of WGSL instead of naga's handles.

use naga::front::Typifier;
use naga::proc::ResolveContext;
use naga::valid::{CallError, ExpressionError, FunctionError, ValidationError};
use naga::{
    BinaryOperator, Expression, Function, Handle, Module, ScalarKind, Span, Type, TypeInner, UnaryOperator,
    VectorSize, WithSpan,
};

/// Returns the smallest of the error's spans in the first `length` bytes. The span of an argument
/// is its declaration, which is not at fault.
pub(super) fn innermost(error: &WithSpan<ValidationError>, module: &Module, length: usize) -> Span {
    let function = match error.as_inner() {
        ValidationError::Function { handle, .. } => Some(&module.functions[*handle]),
        _ => None,
    };
    let is_argument = |span: &Span| {
        function.is_some_and(|function| {
            let mut all = function.expressions.iter();
            all.any(|(handle, expression)| {
                matches!(expression, Expression::FunctionArgument(_))
                    && function.expressions.get_span(handle) == *span
            })
        })
    };
    let size =
        |span: &Span| Some(span.to_range().filter(|range| range.end <= length && !range.is_empty())?.len());
    let spans = error.spans().map(|(span, _)| *span).filter(|span| !is_argument(span));
    let sized = spans.filter_map(|span| Some((size(&span)?, span)));
    sized.min_by_key(|(size, _)| *size).map(|(_, span)| span).unwrap_or_default()
}

/// Returns the message of an error.
pub(super) fn explained(error: &ValidationError, module: &Module, text: &str) -> String {
    let known = match error {
        ValidationError::Function { handle, name, source } => {
            Words { module, function: &module.functions[*handle], name, text }.of(source)
        }
        _ => None,
    };
    known.unwrap_or_else(|| without_handles(&causes(error)))
}

/// Returns the last cause, which is the most exact.
fn causes(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(inner) = last.source() {
        last = inner;
    }
    last.to_string()
}

/// Returns `text` without numbers in brackets.
fn without_handles(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once('[') {
        match behind.split_once(']') {
            Some((number, after)) if number.chars().all(|c| c.is_ascii_digit()) => {
                out += before.trim_end();
                rest = after;
            }
            _ => {
                out += before;
                out.push('[');
                rest = behind;
            }
        }
    }
    out + rest
}

struct Words<'a> {
    module: &'a Module,
    function: &'a Function,
    name: &'a str,
    text: &'a str,
}

impl Words<'_> {
    fn of(&self, error: &FunctionError) -> Option<String> {
        let said = match error {
            FunctionError::Expression { source, .. }
            | FunctionError::InvalidCall { error: CallError::Argument { source, .. }, .. } => {
                return self.of_expression(source);
            }
            FunctionError::InvalidReturnType { expression: None, expected_ty: Some(wanted) } => {
                format!("`{}` must return a value of type {} on every path", self.name, self.of_type(*wanted))
            }
            FunctionError::InvalidReturnType { expression: Some(got), expected_ty } => {
                let got = self.type_of(*got)?;
                match expected_ty {
                    Some(wanted) => {
                        format!("`{}` must return {}, not {got}", self.name, self.of_type(*wanted))
                    }
                    None => format!("`{}` has no return type, but this returns {got}", self.name),
                }
            }
            FunctionError::InvalidIfType(condition) => {
                format!("a condition must be bool, not {}", self.type_of(*condition)?)
            }
            FunctionError::InvalidSwitchType(value) => {
                format!("`switch` takes i32 or u32, not {}", self.type_of(*value)?)
            }
            FunctionError::InvalidCall { function, error } => {
                let called = &self.module.functions[*function];
                let name = called.name.as_deref().unwrap_or_default();
                match error {
                    CallError::ArgumentCount { required, seen } => {
                        format!("`{name}` takes {required} arguments, got {seen}")
                    }
                    CallError::ArgumentType { index, required, seen_expression } => {
                        let (wanted, got) = (self.of_type(*required), self.type_of(*seen_expression)?);
                        format!(
                            "`{name}`: argument {} must be {wanted}, not {got}{}",
                            index + 1,
                            self.advice(&wanted, *seen_expression)
                        )
                    }
                    _ => return None,
                }
            }
            _ => return None,
        };
        Some(said)
    }

    fn of_expression(&self, error: &ExpressionError) -> Option<String> {
        let said = match error {
            ExpressionError::InvalidBinaryOperandTypes { op, lhs_type, rhs_type, rhs_expr, .. } => {
                let [left, right] = [lhs_type, rhs_type].map(|ty| self.of_inner(ty));
                format!(
                    "`{}` is not defined for {left} and {right}{}",
                    binary(*op),
                    self.advice(&left, *rhs_expr)
                )
            }
            ExpressionError::InvalidUnaryOperandType(op, operand) => {
                format!("`{}` is not defined for {}", unary(*op), self.type_of(*operand)?)
            }
            ExpressionError::SelectConditionNotABool { actual } => {
                format!("the condition of `select` must be bool, not {}", self.of_inner(actual))
            }
            ExpressionError::InvalidArgumentType(function, index, argument) => {
                let name = format!("{function:?}").to_lowercase();
                format!("`{name}`: argument {} cannot be {}", index + 1, self.type_of(*argument)?)
            }
            ExpressionError::WrongArgumentCount(function) => {
                format!("`{}` has the wrong number of arguments", format!("{function:?}").to_lowercase())
            }
            ExpressionError::InvalidIndexType(_) => "an index must be i32 or u32".into(),
            _ => return None,
        };
        Some(said)
    }

    /// Returns the conversion of `expression` to `wanted`, if both are scalars of different types.
    fn advice(&self, wanted: &str, expression: Handle<Expression>) -> String {
        let scalars = ["f32", "i32", "u32"];
        let got = self.type_of(expression).unwrap_or_default();
        if wanted == got || !scalars.contains(&wanted) || !scalars.contains(&got.as_str()) {
            return String::new();
        }
        let written =
            self.function.expressions.get_span(expression).to_range().and_then(|range| self.text.get(range));
        let written = written.filter(|text| text.len() <= 40 && !text.contains('\n')).unwrap_or("…");
        format!("; convert one, for example `{wanted}({written})`")
    }

    fn type_of(&self, expression: Handle<Expression>) -> Option<String> {
        let context = ResolveContext::with_locals(
            self.module,
            &self.function.local_variables,
            &self.function.arguments,
        );
        let mut types = Typifier::new();
        types.grow(expression, &self.function.expressions, &context).ok()?;
        Some(self.of_inner(types.get(expression, &self.module.types)))
    }

    fn of_type(&self, ty: Handle<Type>) -> String {
        let ty = &self.module.types[ty];
        ty.name.clone().unwrap_or_else(|| self.of_inner(&ty.inner))
    }

    fn of_inner(&self, inner: &TypeInner) -> String {
        let scalar = |scalar: naga::Scalar| match scalar.kind {
            ScalarKind::Bool => "bool",
            ScalarKind::Float | ScalarKind::AbstractFloat => "f32",
            ScalarKind::Sint | ScalarKind::AbstractInt => "i32",
            ScalarKind::Uint => "u32",
        };
        let size = |size: VectorSize| size as u8;
        match *inner {
            TypeInner::Scalar(of) => scalar(of).into(),
            TypeInner::Vector { size: n, scalar: of } => format!("vec{}<{}>", size(n), scalar(of)),
            TypeInner::Pointer { base, .. } => self.of_type(base),
            TypeInner::ValuePointer { size: None, scalar: of, .. } => scalar(of).into(),
            TypeInner::ValuePointer { size: Some(n), scalar: of, .. } => {
                format!("vec{}<{}>", size(n), scalar(of))
            }
            TypeInner::Struct { .. } => {
                let named = self.module.types.iter().find(|(_, ty)| ty.inner == *inner);
                named.and_then(|(_, ty)| ty.name.clone()).unwrap_or_else(|| "a struct".into())
            }
            TypeInner::Array { .. } => "an array".into(),
            _ => "another type".into(),
        }
    }
}

fn binary(op: BinaryOperator) -> &'static str {
    match op {
        BinaryOperator::Add => "+",
        BinaryOperator::Subtract => "-",
        BinaryOperator::Multiply => "*",
        BinaryOperator::Divide => "/",
        BinaryOperator::Modulo => "%",
        BinaryOperator::Equal => "==",
        BinaryOperator::NotEqual => "!=",
        BinaryOperator::Less => "<",
        BinaryOperator::LessEqual => "<=",
        BinaryOperator::Greater => ">",
        BinaryOperator::GreaterEqual => ">=",
        BinaryOperator::And => "&",
        BinaryOperator::ExclusiveOr => "^",
        BinaryOperator::InclusiveOr => "|",
        BinaryOperator::LogicalAnd => "&&",
        BinaryOperator::LogicalOr => "||",
        BinaryOperator::ShiftLeft => "<<",
        BinaryOperator::ShiftRight => ">>",
    }
}

fn unary(op: UnaryOperator) -> &'static str {
    match op {
        UnaryOperator::Negate => "-",
        UnaryOperator::LogicalNot => "!",
        UnaryOperator::BitwiseNot => "~",
    }
}

#[cfg(test)]
mod tests {
    use crate::mask::ScoreMod;

    /// Returns the error message of a mod with this body.
    fn said(body: &str) -> String {
        let text = format!(
            "fn own(x: f32, n: u32) -> f32 {{ return x; }}\nfn score_mod(score: f32, at: At) -> f32 {{\n    {body}\n}}"
        );
        ScoreMod::new(&text).map(|_| String::new()).unwrap_or_else(|error| error.to_string())
    }

    #[test]
    fn faults_are_said_in_words_of_the_text() {
        let cases = [
            (
                "return score + f32(at.query - i32(at.key));",
                "`-` is not defined for u32 and i32; convert one, for example `u32(i32(at.key))`",
            ),
            (
                "let d = score * at.key; return d;",
                "`*` is not defined for f32 and u32; convert one, for example `f32(at.key)`",
            ),
            ("return own(score);", "`own` takes 2 arguments, got 1"),
            (
                "return own(score, score);",
                "`own`: argument 2 must be u32, not f32; convert one, for example `u32(score)`",
            ),
            ("return at.key;", "`score_mod` must return f32, not u32"),
            ("if at.key > 3u { return score; }", "`score_mod` must return a value of type f32 on every path"),
            ("if at.key { return score; } return 0.0;", "a condition must be bool, not u32"),
            ("var x = 1u; x = score; return f32(x);", "cannot convert elements of `f32` to `u32`"),
            (
                "return select(1u, score, at.key > 3u);",
                "reject value of type `u32`; accept value of type `f32`",
            ),
            ("return -at.key;", "`-` is not defined for u32"),
        ];
        for (body, words) in cases {
            let said = said(body);
            println!("{body}\n{said}\n");
            assert!(said.contains(words), "{body}: no {words:?} in {said}");
            let handle = said.split('[').skip(1).any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
            assert!(!handle, "{said}");
            // The span is not the whole function, which begins in line 2.
            assert!(said.contains("--> line 3,") || words.contains("every path"), "{said}");
        }
    }
}
