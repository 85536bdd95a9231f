//! Derivatives of a mod's functions, as text next to their values.

use naga::common::wgsl::TryToWgsl as _;
use naga::{BinaryOperator, Block, Expression, Function, Handle, MathFunction, Statement, TypeInner};

use super::write::{Body, By, Refusal, refuse, swizzle};

/// Derivatives in forward mode: each expression that depends on the variable has a derivative next
/// to it. Sources: Wengert 1964, and Griewank and Walther 2008, "Evaluating derivatives",
/// chapter 3.
impl Body<'_> {
    /// Finds the active variables and calls, which may receive an active value.
    pub(super) fn find_active(&mut self) {
        let function = self.function;
        loop {
            let before = self.active.locals.len() + self.active.calls.len();
            // The operands of an expression come before it.
            for (h, _) in function.expressions.iter() {
                if self.depends(h) {
                    self.active.all.insert(h);
                }
            }
            self.mark(&function.body);
            if self.active.locals.len() + self.active.calls.len() == before {
                return;
            }
        }
    }

    fn mark(&mut self, block: &Block) {
        for statement in block.iter() {
            match statement {
                Statement::Store { pointer, value } if self.is_active(*value) => {
                    self.active.locals.extend(self.root(*pointer));
                }
                Statement::Call { function, arguments, result: Some(result) } => {
                    let own = !self.writer.given.contains_key(function);
                    let passes = own && arguments.iter().any(|h| self.is_active(*h));
                    let is_active = passes || self.reads(*function);
                    if is_active && self.writer.has_floats(self.inner(*result)) {
                        self.active.calls.insert(*result);
                    }
                }
                Statement::Block(block) => self.mark(block),
                Statement::If { accept, reject, .. } => {
                    self.mark(accept);
                    self.mark(reject);
                }
                Statement::Switch { cases, .. } => cases.iter().for_each(|case| self.mark(&case.body)),
                Statement::Loop { body, continuing, .. } => {
                    self.mark(body);
                    self.mark(continuing);
                }
                _ => {}
            }
        }
    }

    /// True if the function reads the tensor of the derivative, directly or through calls.
    fn reads(&self, function: Handle<Function>) -> bool {
        match self.dual {
            Some((_, By::Captured(n))) => self.writer.reads(function, n),
            _ => false,
        }
    }

    /// Returns the operation that reads the bits of an active value. It would lose the derivative.
    pub(super) fn bits_of_active(&self, h: Handle<Expression>) -> Option<&'static str> {
        match &self.function.expressions[h] {
            Expression::As { expr, convert: None, .. } if self.is_active(*expr) => Some("`bitcast`"),
            Expression::Math { fun, arg, .. } if self.is_active(*arg) => {
                fun.try_to_wgsl().filter(|name| name.starts_with("pack")).map(|_| "packing")
            }
            _ => None,
        }
    }

    pub(super) fn is_active(&self, h: Handle<Expression>) -> bool {
        self.active.all.contains(&h)
    }

    /// True if an operand makes the expression active.
    fn depends(&self, h: Handle<Expression>) -> bool {
        if !self.writer.has_floats(self.inner(h)) {
            return false;
        }
        match &self.function.expressions[h] {
            Expression::FunctionArgument(_) => true,
            Expression::CallResult(_) => self.active.calls.contains(&h),
            Expression::Load { pointer } => {
                self.root(*pointer).is_some_and(|root| self.active.locals.contains(&root))
            }
            Expression::Compose { components, .. } => components.iter().any(|h| self.is_active(*h)),
            Expression::Splat { value, .. } => self.is_active(*value),
            Expression::Swizzle { vector, .. } => self.is_active(*vector),
            Expression::Access { base, .. } | Expression::AccessIndex { base, .. } => self.is_active(*base),
            Expression::Unary { expr, .. } | Expression::As { expr, .. } => self.is_active(*expr),
            Expression::Binary { left, right, .. } => self.is_active(*left) || self.is_active(*right),
            Expression::Select { accept, reject, .. } => self.is_active(*accept) || self.is_active(*reject),
            Expression::Math { fun, arg, arg1, arg2, .. } => {
                !is_flat(*fun) && [Some(*arg), *arg1, *arg2].into_iter().flatten().any(|h| self.is_active(h))
            }
            _ => false,
        }
    }

    /// Returns the name of an active expression's derivative.
    pub(super) fn derivative(&self, h: Handle<Expression>) -> Option<String> {
        self.is_active(h).then(|| match &self.function.expressions[h] {
            Expression::FunctionArgument(n) => format!("b{n}"),
            _ => format!("t{}", h.index()),
        })
    }

    pub(super) fn derive(&self, h: Handle<Expression>) -> Result<String, Refusal> {
        let zero = |h: Handle<Expression>| format!("{}()", self.ty(h));
        let of = |h: Handle<Expression>| self.derivative(h);
        let or_zero = |h: Handle<Expression>| of(h).unwrap_or_else(|| zero(h));
        let x = |h: Handle<Expression>| self.value(h);
        Ok(match &self.function.expressions[h] {
            Expression::Load { pointer } => self.place(*pointer, "d")?.0,
            Expression::Compose { ty, components } => {
                let kept: Vec<_> = self.kept(*ty, components).into_iter().map(or_zero).collect();
                format!("{}({})", self.writer.ty(*ty), kept.join(", "))
            }
            Expression::Splat { value, .. } => format!("{}({})", self.ty(h), or_zero(*value)),
            Expression::Swizzle { size, vector, pattern } => {
                format!("{}.{}", or_zero(*vector), swizzle(*size, pattern))
            }
            Expression::AccessIndex { base, index } => {
                format!("{}{}", or_zero(*base), self.member(*base, *index))
            }
            Expression::Access { base, index } => {
                format!("{}[{}]", or_zero(*base), self.index(*base, *index)?)
            }
            Expression::Unary { expr, .. } => format!("-({})", or_zero(*expr)),
            Expression::Binary { op, left, right } => {
                let (l, r) = (x(*left)?, x(*right)?);
                let terms = match op {
                    BinaryOperator::Add => [of(*left), of(*right)],
                    BinaryOperator::Subtract => [of(*left), of(*right).map(|d| format!("(-{d})"))],
                    BinaryOperator::Multiply => {
                        [of(*left).map(|d| format!("{d} * {r}")), of(*right).map(|d| format!("{l} * {d}"))]
                    }
                    BinaryOperator::Divide => [
                        of(*left).map(|d| format!("{d} / {r}")),
                        of(*right).map(|d| format!("(-{} * {d} / {r})", x(h).unwrap_or_default())),
                    ],
                    BinaryOperator::Modulo => {
                        [of(*left), of(*right).map(|d| format!("(-trunc({l} / {r}) * {d})"))]
                    }
                    _ => [None, None],
                };
                // The result is a vector if one operand is a scalar.
                format!("{}({})", self.ty(h), sum(terms))
            }
            Expression::Select { condition, accept, reject } => {
                format!("select({}, {}, {})", or_zero(*reject), or_zero(*accept), x(*condition)?)
            }
            Expression::As { expr, convert: Some(_), .. } => format!("{}({})", self.ty(h), or_zero(*expr)),
            Expression::Math { fun, arg, arg1, arg2, .. } => {
                let name = fun.try_to_wgsl().unwrap_or_default();
                let (ty, e) = (self.ty(h), x(h)?);
                let (a, da) = (x(*arg)?, or_zero(*arg));
                let second = || arg1.map_or_else(|| Ok(String::new()), x);
                let third = || arg2.map_or_else(|| Ok(String::new()), x);
                let (b, c) = (second()?, third()?);
                let db = arg1.map(or_zero).unwrap_or_default();
                let dc = arg2.map(or_zero).unwrap_or_default();
                let is_vector = matches!(self.inner(*arg), TypeInner::Vector { .. });
                match fun {
                    MathFunction::Abs => format!("{da} * sign({a})"),
                    MathFunction::Min => format!("select({db}, {da}, {a} <= {b})"),
                    MathFunction::Max => format!("select({db}, {da}, {a} >= {b})"),
                    MathFunction::Clamp => {
                        format!("select(select({da}, {db}, {a} < {b}), {dc}, min({a}, {c}) < {a})")
                    }
                    MathFunction::Saturate => {
                        format!("select({ty}(), {da}, {ty}(0.0) <= {a}) * step({a}, {ty}(1.0))")
                    }
                    MathFunction::Cos => format!("-{da} * sin({a})"),
                    MathFunction::Cosh => format!("{da} * sinh({a})"),
                    MathFunction::Sin => format!("{da} * cos({a})"),
                    MathFunction::Sinh => format!("{da} * cosh({a})"),
                    MathFunction::Tan => format!("{da} * (1.0 + {e} * {e})"),
                    MathFunction::Tanh => format!("{da} * (1.0 - {e} * {e})"),
                    MathFunction::Acos => guarded(&ty, &da, &format!("-{da} * inverseSqrt(1.0 - {a} * {a})")),
                    MathFunction::Asin => guarded(&ty, &da, &format!("{da} * inverseSqrt(1.0 - {a} * {a})")),
                    MathFunction::Atan => format!("{da} / (1.0 + {a} * {a})"),
                    MathFunction::Atan2 => format!("({b} * {da} - {a} * {db}) / ({a} * {a} + {b} * {b})"),
                    MathFunction::Asinh => format!("{da} * inverseSqrt({a} * {a} + 1.0)"),
                    MathFunction::Acosh => guarded(&ty, &da, &format!("{da} * inverseSqrt({a} * {a} - 1.0)")),
                    MathFunction::Atanh => guarded(&ty, &da, &format!("{da} / (1.0 - {a} * {a})")),
                    MathFunction::Radians | MathFunction::Degrees => format!("{name}({da})"),
                    MathFunction::Fract => da,
                    MathFunction::Exp => format!("{da} * {e}"),
                    MathFunction::Exp2 => format!("{da} * {e} * {}", std::f32::consts::LN_2),
                    MathFunction::Log => guarded(&ty, &da, &format!("{da} / {a}")),
                    MathFunction::Log2 => {
                        guarded(&ty, &da, &format!("{da} / ({a} * {})", std::f32::consts::LN_2))
                    }
                    MathFunction::Pow => sum([
                        of(*arg).map(|d| guarded(&ty, &d, &format!("{d} * {b} * pow({a}, {b} - 1.0)"))),
                        arg1.and_then(of).map(|d| guarded(&ty, &e, &format!("{d} * {e} * log({a})"))),
                    ]),
                    MathFunction::Dot => format!("(dot({da}, {b}) + dot({a}, {db}))"),
                    MathFunction::Cross => format!("(cross({da}, {b}) + cross({a}, {db}))"),
                    // At 0 there is no derivative, and the result is 0.
                    MathFunction::Length if is_vector => format!("dot({a}, {da}) / max({e}, 1.2e-38)"),
                    MathFunction::Length => format!("{da} * sign({a})"),
                    MathFunction::Distance if is_vector => {
                        format!("dot({a} - {b}, {da} - {db}) / max({e}, 1.2e-38)")
                    }
                    MathFunction::Distance => format!("({da} - {db}) * sign({a} - {b})"),
                    MathFunction::Normalize => format!("({da} - {e} * dot({e}, {da})) / length({a})"),
                    MathFunction::Fma => format!("({da} * {b} + {a} * {db} + {dc})"),
                    MathFunction::Mix => {
                        format!(
                            "({da} * (1.0 - {c}) + {db} * {c} + ({b} - {a}) * {})",
                            self.widened(h, *arg2, &dc)
                        )
                    }
                    MathFunction::SmoothStep if of(*arg).is_none() && arg1.and_then(of).is_none() => {
                        let u = format!("saturate(({c} - {a}) / ({b} - {a}))");
                        format!("{dc} * 6.0 * {u} * (1.0 - {u}) / ({b} - {a})")
                    }
                    MathFunction::Sqrt => guarded(&ty, &da, &format!("{da} * 0.5 / {e}")),
                    MathFunction::InverseSqrt => guarded(&ty, &da, &format!("-0.5 * {da} * {e} * {e} * {e}")),
                    MathFunction::Ldexp => format!("ldexp({da}, {b})"),
                    MathFunction::QuantizeToF16 => da,
                    _ => return self.refuse_derivative(&format!("`{name}`"), h),
                }
            }
            Expression::As { convert: None, .. } => return self.refuse_derivative("`bitcast`", h),
            _ => return self.refuse_derivative("this", h),
        })
    }

    /// Returns the factor of a mix of vectors as a vector.
    fn widened(&self, h: Handle<Expression>, by: Option<Handle<Expression>>, text: &str) -> String {
        let is_scalar = by.is_some_and(|by| matches!(self.inner(by), TypeInner::Scalar(_)));
        if is_scalar { format!("{}({text})", self.ty(h)) } else { text.to_string() }
    }

    pub(super) fn refuse_derivative<T>(&self, what: &str, h: Handle<Expression>) -> Result<T, Refusal> {
        let hook = match self.dual {
            Some((_, By::Captured(_))) => "",
            _ => "; declare its derivative as `fn score_mod_slope(score: f32, at: At) -> f32`",
        };
        refuse(format!("{what} is not differentiable here{hook}"), self.span(h))
    }
}

/// True if the derivative of the function is 0 wherever it exists.
fn is_flat(fun: MathFunction) -> bool {
    use MathFunction::*;
    matches!(fun, Ceil | Floor | Round | Trunc | Sign | Step)
}

/// Returns the product, or 0 if the factor is 0, so that 0 · ∞ is 0.
fn guarded(ty: &str, factor: &str, product: &str) -> String {
    format!("select({product}, {ty}(), {factor} == {ty}())")
}

fn sum(terms: [Option<String>; 2]) -> String {
    match terms {
        [Some(a), Some(b)] => format!("({a} + {b})"),
        [Some(one), None] | [None, Some(one)] => format!("({one})"),
        [None, None] => "0.0".to_string(),
    }
}
