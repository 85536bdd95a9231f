//! Writes a mod's functions as new WGSL, from naga's module of the author's text. Names clash with
//! nothing, indices stay inside arrays, and loops end.

use naga::common::wgsl::TryToWgsl as _;
use naga::proc::TypeResolution;
use naga::valid::{FunctionInfo, ModuleInfo};
use naga::{
    ArraySize, BinaryOperator, Block, Expression, Function, Handle, Literal, LocalVariable, MathFunction,
    Module, RelationalFunction, Scalar, ScalarKind, Span, Statement, SwitchValue, SwizzleComponent, Type,
    TypeInner, UnaryOperator, VectorSize,
};
use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

/// A construct that a mod may not have, and its place in the text.
#[derive(Debug)]
pub(super) struct Refusal {
    pub message: String,
    pub span: Span,
}

pub(super) fn refuse<T>(message: impl Into<String>, span: Span) -> Result<T, Refusal> {
    Err(Refusal { message: message.into(), span })
}

/// The most rounds of all loops of a mod together for a pair of query and key. Then the loops end.
pub(super) const ROUNDS: u32 = 4096;

/// The state that the functions of a mod share.
pub(super) struct Writer<'a> {
    pub module: &'a Module,
    pub info: &'a ModuleInfo,
    /// The prefix of every name.
    pub prefix: &'a str,
    /// The struct `At`, its name, and the members that the mod uses.
    pub at: Handle<Type>,
    pub at_name: String,
    pub members: &'a [(&'static str, bool)],
    /// True if loops count their rounds.
    pub counts_rounds: bool,
    /// The functions that the kernel declares.
    pub given: HashMap<Handle<Function>, Given>,
    /// The captured tensors that each function reads, directly or through calls: a bit for each
    /// tensor.
    pub readings: HashMap<Handle<Function>, u32>,
}

/// A function that the kernel declares.
pub(super) struct Given {
    pub name: String,
    /// The index of the captured tensor, if the function is an accessor.
    pub captured: Option<usize>,
}

impl Writer<'_> {
    fn scalar(scalar: Scalar) -> &'static str {
        scalar.try_to_wgsl().unwrap_or("f32")
    }

    pub fn ty(&self, ty: Handle<Type>) -> String {
        match &self.module.types[ty].inner {
            TypeInner::Struct { .. } if ty == self.at => self.at_name.clone(),
            TypeInner::Struct { .. } => format!("{}_t{}", self.prefix, ty.index()),
            inner => self.inner(inner),
        }
    }

    fn inner(&self, inner: &TypeInner) -> String {
        match inner {
            TypeInner::Scalar(scalar) => Self::scalar(*scalar).to_string(),
            TypeInner::Vector { size, scalar } => format!("vec{}<{}>", *size as u8, Self::scalar(*scalar)),
            TypeInner::Array { base, size: ArraySize::Constant(n), .. } => {
                format!("array<{}, {n}>", self.ty(*base))
            }
            // The checks admit no other types.
            _ => String::new(),
        }
    }

    /// True if values of the type contain floats, which may have a derivative.
    pub fn has_floats(&self, inner: &TypeInner) -> bool {
        match inner {
            TypeInner::Scalar(scalar) | TypeInner::Vector { scalar, .. } => scalar.kind == ScalarKind::Float,
            TypeInner::Array { base, .. } => self.has_floats(&self.module.types[*base].inner),
            TypeInner::Struct { members, .. } => {
                members.iter().any(|m| self.has_floats(&self.module.types[m.ty].inner))
            }
            _ => false,
        }
    }

    /// Returns the structs of a mod.
    pub fn structs(&self) -> String {
        let mut text = String::new();
        for (handle, ty) in self.module.types.iter().filter(|(handle, _)| *handle != self.at) {
            let TypeInner::Struct { members, .. } = &ty.inner else { continue };
            let _ = writeln!(text, "struct {} {{", self.ty(handle));
            for (n, member) in members.iter().enumerate() {
                let _ = writeln!(text, "    m{n}: {},", self.ty(member.ty));
            }
            text.push_str("}\n");
        }
        text
    }

    pub fn function(&self, handle: Handle<Function>) -> String {
        let given = self.given.get(&handle).map(|given| given.name.clone());
        given.unwrap_or_else(|| format!("{}_f{}", self.prefix, handle.index()))
    }

    /// True if the function reads the n-th captured tensor, directly or through calls.
    pub fn reads(&self, handle: Handle<Function>, n: usize) -> bool {
        self.readings.get(&handle).is_some_and(|bits| bits & 1 << n != 0)
    }

    /// Returns the name of the function that computes value and derivative. `pair` names their
    /// struct.
    pub fn dual(&self, handle: Handle<Function>) -> String {
        format!("{}_g{}", self.prefix, handle.index())
    }

    fn pair(&self, handle: Handle<Function>) -> String {
        format!("{}_G{}", self.prefix, handle.index())
    }

    /// Returns the text of a function.
    pub fn value(&self, handle: Handle<Function>) -> Result<String, Refusal> {
        Ok(self.write(handle, None)?.0)
    }

    /// Returns the text of a function with derivatives, and of the functions that it calls.
    pub fn derivative(&self, handle: Handle<Function>, by: By) -> Result<String, Refusal> {
        let (mut text, mut called) = self.write(handle, Some(by))?;
        let mut next = 0;
        while let Some(callee) = called.get(next).copied() {
            next += 1;
            let (more, others) = self.write(callee, Some(by))?;
            text += &more;
            for other in others {
                if !called.contains(&other) {
                    called.push(other);
                }
            }
        }
        Ok(text)
    }

    /// Returns the text, and the functions whose derivatives it calls, each once.
    fn write(
        &self,
        handle: Handle<Function>,
        by: Option<By>,
    ) -> Result<(String, Vec<Handle<Function>>), Refusal> {
        let function = &self.module.functions[handle];
        let mut body = Body {
            writer: self,
            function,
            info: &self.info[handle],
            dual: by.map(|by| (handle, by)),
            active: Active::default(),
            written: HashSet::new(),
            text: String::new(),
            depth: 1,
            called: Vec::new(),
        };
        let dual = by.is_some();
        if dual {
            body.find_active();
        }
        body.locals()?;
        body.block(&function.body)?;
        let mut arguments = Vec::new();
        for (n, argument) in function.arguments.iter().enumerate() {
            arguments.push(format!("a{n}: {}", self.ty(argument.ty)));
            if dual && self.has_floats(&self.module.types[argument.ty].inner) {
                arguments.push(format!("b{n}: {}", self.ty(argument.ty)));
            }
        }
        let result = function.result.as_ref().map(|result| self.ty(result.ty)).unwrap_or_default();
        let mut text = String::new();
        let (name, result) = if dual {
            let pair = self.pair(handle);
            let _ = writeln!(text, "struct {pair} {{\n    x: {result},\n    d: {result},\n}}");
            (self.dual(handle), pair)
        } else {
            (self.function(handle), result)
        };
        let arrow = if result.is_empty() { String::new() } else { format!(" -> {result}") };
        let _ = writeln!(text, "fn {name}({}){arrow} {{\n{}}}", arguments.join(", "), body.text);
        Ok((text, body.called))
    }
}

/// The variable of a derivative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Score,
    /// A reading of the n-th captured tensor. The kernel selects the reading.
    Captured(usize),
}

/// The values of a function that depend on the variable of its derivative.
#[derive(Default)]
pub(super) struct Active {
    pub locals: HashSet<Handle<LocalVariable>>,
    pub calls: HashSet<Handle<Expression>>,
    pub all: HashSet<Handle<Expression>>,
}

pub(super) struct Body<'a> {
    pub writer: &'a Writer<'a>,
    pub function: &'a Function,
    info: &'a FunctionInfo,
    /// The function and the variable, if this is a derivative.
    pub dual: Option<(Handle<Function>, By)>,
    pub active: Active,
    /// The expressions that have a name.
    written: HashSet<Handle<Expression>>,
    text: String,
    depth: usize,
    /// The functions whose derivatives it calls.
    called: Vec<Handle<Function>>,
}

impl<'a> Body<'a> {
    fn line(&mut self, line: &str) {
        let _ = writeln!(self.text, "{:indent$}{line}", "", indent = 4 * self.depth);
    }

    pub(super) fn span(&self, h: Handle<Expression>) -> Span {
        self.function.expressions.get_span(h)
    }

    pub(super) fn inner(&self, h: Handle<Expression>) -> &'a TypeInner {
        self.info[h].ty.inner_with(&self.writer.module.types)
    }

    pub(super) fn ty(&self, h: Handle<Expression>) -> String {
        match &self.info[h].ty {
            TypeResolution::Handle(ty) => self.writer.ty(*ty),
            TypeResolution::Value(inner) => self.writer.inner(inner),
        }
    }

    fn is_pointer(&self, h: Handle<Expression>) -> bool {
        matches!(self.inner(h), TypeInner::Pointer { .. } | TypeInner::ValuePointer { .. })
    }

    fn locals(&mut self) -> Result<(), Refusal> {
        let function = self.function;
        // Literals have names, as the author's `let` had. So expressions of them are no constants,
        // in which overflow is an error.
        for (h, expression) in function.expressions.iter() {
            use Expression::{Constant, Literal, ZeroValue};
            if matches!(expression, Literal(_) | Constant(_) | ZeroValue(_)) {
                let value = self.compute(h)?;
                self.line(&format!("let e{} = {value};", h.index()));
                self.written.insert(h);
            }
        }
        for (handle, local) in function.local_variables.iter() {
            let ty = self.writer.ty(local.ty);
            let first = match local.init {
                Some(value) => self.value(value)?,
                None => format!("{ty}()"),
            };
            self.line(&format!("var l{} = {first};", handle.index()));
            if self.active.locals.contains(&handle) {
                self.line(&format!("var d{} = {ty}();", handle.index()));
            }
        }
        Ok(())
    }

    fn block(&mut self, block: &Block) -> Result<(), Refusal> {
        for (statement, span) in block.span_iter() {
            self.statement(statement, *span)?;
        }
        Ok(())
    }

    fn nested(&mut self, block: &Block) -> Result<(), Refusal> {
        self.depth += 1;
        let done = self.block(block);
        self.depth -= 1;
        done
    }

    fn statement(&mut self, statement: &Statement, span: Span) -> Result<(), Refusal> {
        match statement {
            Statement::Emit(range) => {
                for h in range.clone() {
                    if self.is_pointer(h) {
                        continue;
                    }
                    let value = self.compute(h)?;
                    self.line(&format!("let e{} = {value};", h.index()));
                    self.written.insert(h);
                    if let Some(what) = self.bits_of_active(h) {
                        return self.refuse_derivative(what, h);
                    }
                    if self.is_active(h) {
                        let derivative = self.derive(h)?;
                        self.line(&format!("let t{} = {derivative};", h.index()));
                    }
                }
            }
            Statement::Block(block) => {
                self.line("{");
                self.nested(block)?;
                self.line("}");
            }
            Statement::If { condition, accept, reject } => {
                let condition = self.value(*condition)?;
                self.line(&format!("if {condition} {{"));
                self.nested(accept)?;
                if !reject.is_empty() {
                    self.line("} else {");
                    self.nested(reject)?;
                }
                self.line("}");
            }
            Statement::Switch { selector, cases } => {
                let selector = self.value(*selector)?;
                self.line(&format!("switch {selector} {{"));
                let mut labels = Vec::new();
                for case in cases {
                    labels.push(match case.value {
                        SwitchValue::I32(n) => literal(Literal::I32(n)),
                        SwitchValue::U32(n) => literal(Literal::U32(n)),
                        SwitchValue::Default => "default".to_string(),
                    });
                    if case.fall_through {
                        continue;
                    }
                    let line = format!("    case {}: {{", labels.join(", "));
                    labels.clear();
                    self.line(&line);
                    self.depth += 1;
                    self.nested(&case.body)?;
                    self.depth -= 1;
                    self.line("    }");
                }
                self.line("}");
            }
            Statement::Loop { body, continuing, break_if } => {
                self.line("loop {");
                if self.writer.counts_rounds {
                    let left = format!("{}_rounds", self.writer.prefix);
                    self.line(&format!("    if {left} == 0u {{ break; }}"));
                    self.line(&format!("    {left} -= 1u;"));
                }
                self.nested(body)?;
                if !continuing.is_empty() || break_if.is_some() {
                    self.depth += 1;
                    self.line("continuing {");
                    self.nested(continuing)?;
                    if let Some(condition) = break_if {
                        let condition = self.value(*condition)?;
                        self.line(&format!("    break if {condition};"));
                    }
                    self.line("}");
                    self.depth -= 1;
                }
                self.line("}");
            }
            Statement::Break => self.line("break;"),
            Statement::Continue => self.line("continue;"),
            Statement::Return { value } => {
                let line = match (value, self.dual) {
                    (None, _) => "return;".to_string(),
                    (Some(h), None) => format!("return {};", self.value(*h)?),
                    (Some(h), Some((handle, _))) => {
                        let derivative = self.derivative(*h).unwrap_or_else(|| format!("{}()", self.ty(*h)));
                        format!("return {}({}, {derivative});", self.writer.pair(handle), self.value(*h)?)
                    }
                };
                self.line(&line);
            }
            Statement::Store { pointer, value } => {
                let (place, root) = self.place(*pointer, "l")?;
                let stored = self.value(*value)?;
                // The derivative is stored before the value, because its place may depend on the
                // value.
                if self.active.locals.contains(&root) {
                    let (place, _) = self.place(*pointer, "d")?;
                    let derivative =
                        self.derivative(*value).unwrap_or_else(|| format!("{}()", self.ty(*value)));
                    self.line(&format!("{place} = {derivative};"));
                }
                self.line(&format!("{place} = {stored};"));
            }
            Statement::Call { function, arguments, result } => self.call(*function, arguments, *result)?,
            Statement::Kill => return refuse("`discard` is not supported", span),
            Statement::ControlBarrier(_) | Statement::MemoryBarrier(_) => {
                return refuse("barriers are not supported, because pairs are computed independently", span);
            }
            _ => {
                return refuse("this is not supported; a function may only compute from its arguments", span);
            }
        }
        Ok(())
    }

    fn call(
        &mut self,
        function: Handle<Function>,
        arguments: &[Handle<Expression>],
        result: Option<Handle<Expression>>,
    ) -> Result<(), Refusal> {
        let writer = self.writer;
        let active = result.is_some_and(|h| self.active.calls.contains(&h));
        let mut given = Vec::new();
        for h in arguments {
            given.push(self.value(*h)?);
            if active && writer.has_floats(self.inner(*h)) {
                given.push(self.derivative(*h).unwrap_or_else(|| format!("{}()", self.ty(*h))));
            }
        }
        let given = given.join(", ");
        match result {
            None => self.line(&format!("{}({given});", writer.function(function))),
            Some(h) if active && writer.given.contains_key(&function) => {
                let (n, prefix) = (h.index(), writer.prefix);
                self.line(&format!("let e{n} = {}({given});", writer.function(function)));
                self.line(&format!("let t{n} = {prefix}_reading({given});"));
            }
            Some(h) if active => {
                if !self.called.contains(&function) {
                    self.called.push(function);
                }
                let n = h.index();
                self.line(&format!("let c{n} = {}({given});", writer.dual(function)));
                self.line(&format!("let e{n} = c{n}.x;"));
                self.line(&format!("let t{n} = c{n}.d;"));
            }
            Some(h) => self.line(&format!("let e{} = {}({given});", h.index(), writer.function(function))),
        }
        self.written.extend(result);
        Ok(())
    }

    /// Returns the place of a pointer, and the variable at which it begins. `kind` is l for values,
    /// d for derivatives.
    pub(super) fn place(
        &self,
        h: Handle<Expression>,
        kind: &str,
    ) -> Result<(String, Handle<LocalVariable>), Refusal> {
        match &self.function.expressions[h] {
            Expression::LocalVariable(local) => Ok((format!("{kind}{}", local.index()), *local)),
            Expression::AccessIndex { base, index } => {
                let (place, root) = self.place(*base, kind)?;
                Ok((format!("{place}{}", self.member(*base, *index)), root))
            }
            Expression::Access { base, index } => {
                let (place, root) = self.place(*base, kind)?;
                Ok((format!("{place}[{}]", self.index(*base, *index)?), root))
            }
            _ => refuse("pointers may only point to local variables", self.span(h)),
        }
    }

    /// Returns the variable at which a pointer begins.
    pub(super) fn root(&self, mut h: Handle<Expression>) -> Option<Handle<LocalVariable>> {
        loop {
            match &self.function.expressions[h] {
                Expression::LocalVariable(local) => return Some(*local),
                Expression::AccessIndex { base, .. } | Expression::Access { base, .. } => h = *base,
                _ => return None,
            }
        }
    }

    /// Returns the type behind a pointer, or the type itself.
    fn pointee(&self, h: Handle<Expression>) -> (&'a TypeInner, Option<Handle<Type>>) {
        match (&self.info[h].ty, self.inner(h)) {
            (_, TypeInner::Pointer { base, .. }) => (&self.writer.module.types[*base].inner, Some(*base)),
            (TypeResolution::Handle(ty), inner) => (inner, Some(*ty)),
            (_, inner) => (inner, None),
        }
    }

    pub(super) fn member(&self, base: Handle<Expression>, index: u32) -> String {
        match self.pointee(base) {
            (_, Some(ty)) if ty == self.writer.at => format!(".{}", self.writer.members[index as usize].0),
            (TypeInner::Struct { .. }, _) => format!(".m{index}"),
            _ => format!("[{index}]"),
        }
    }

    /// Returns an index, clamped to the length of `base`.
    pub(super) fn index(
        &self,
        base: Handle<Expression>,
        index: Handle<Expression>,
    ) -> Result<String, Refusal> {
        let length = match self.pointee(base).0 {
            TypeInner::Vector { size, .. } | TypeInner::ValuePointer { size: Some(size), .. } => {
                u32::from(*size as u8)
            }
            TypeInner::Array { size: ArraySize::Constant(n), .. } => n.get(),
            _ => return refuse("arrays must have a fixed length", self.span(base)),
        };
        Ok(format!("min(u32({}), {}u)", self.value(index)?, length - 1))
    }

    /// Returns the name of an expression, or its text if it has no name.
    pub(super) fn value(&self, h: Handle<Expression>) -> Result<String, Refusal> {
        if self.written.contains(&h) { Ok(format!("e{}", h.index())) } else { self.compute(h) }
    }

    fn values(&self, all: &[Handle<Expression>]) -> Result<String, Refusal> {
        Ok(all.iter().map(|h| self.value(*h)).collect::<Result<Vec<_>, _>>()?.join(", "))
    }

    fn compute(&self, h: Handle<Expression>) -> Result<String, Refusal> {
        Ok(match &self.function.expressions[h] {
            Expression::Literal(value) => literal(*value),
            Expression::Constant(constant) => self.constant(self.writer.module.constants[*constant].init)?,
            Expression::ZeroValue(ty) => format!("{}()", self.writer.ty(*ty)),
            Expression::Compose { ty, components } => {
                let kept = self.kept(*ty, components);
                format!("{}({})", self.writer.ty(*ty), self.values(&kept)?)
            }
            Expression::Splat { value, .. } => format!("{}({})", self.ty(h), self.value(*value)?),
            Expression::Swizzle { size, vector, pattern } => {
                format!("{}.{}", self.value(*vector)?, swizzle(*size, pattern))
            }
            Expression::AccessIndex { base, index } => {
                format!("{}{}", self.value(*base)?, self.member(*base, *index))
            }
            Expression::Access { base, index } => {
                format!("{}[{}]", self.value(*base)?, self.index(*base, *index)?)
            }
            Expression::FunctionArgument(n) => format!("a{n}"),
            Expression::Load { pointer } => self.place(*pointer, "l")?.0,
            Expression::Unary { op, expr } => format!("({}({}))", unary(*op), self.value(*expr)?),
            Expression::Binary { op, left, right } => {
                format!("({} {} {})", self.value(*left)?, binary(*op), self.value(*right)?)
            }
            Expression::Select { condition, accept, reject } => {
                format!("select({})", self.values(&[*reject, *accept, *condition])?)
            }
            Expression::Relational { fun: RelationalFunction::All, argument } => {
                format!("all({})", self.value(*argument)?)
            }
            Expression::Relational { fun: RelationalFunction::Any, argument } => {
                format!("any({})", self.value(*argument)?)
            }
            Expression::Math { fun, arg, arg1, arg2, arg3 } => {
                let Some(name) = fun.try_to_wgsl().filter(|_| !gives_structs(*fun)) else {
                    return refuse(
                        format!("`{}` is not supported", format!("{fun:?}").to_lowercase()),
                        self.span(h),
                    );
                };
                let arguments: Vec<_> = [Some(*arg), *arg1, *arg2, *arg3].into_iter().flatten().collect();
                format!("{name}({})", self.values(&arguments)?)
            }
            Expression::As { expr, convert: Some(_), .. } => {
                format!("{}({})", self.ty(h), self.value(*expr)?)
            }
            Expression::As { expr, convert: None, .. } => {
                format!("bitcast<{}>({})", self.ty(h), self.value(*expr)?)
            }
            _ => {
                return refuse(
                    "this is not supported; a function may only compute from its arguments",
                    self.span(h),
                );
            }
        })
    }

    /// Returns the members of a struct that the text has. `At` has only the used members.
    pub(super) fn kept<T: Copy>(&self, ty: Handle<Type>, components: &[T]) -> Vec<T> {
        let is_kept = |n: usize| ty != self.writer.at || self.writer.members[n].1;
        components.iter().enumerate().filter(|(n, _)| is_kept(*n)).map(|(_, h)| *h).collect()
    }

    /// Returns a constant of the mod, which naga has evaluated.
    fn constant(&self, h: Handle<Expression>) -> Result<String, Refusal> {
        let module = self.writer.module;
        Ok(match &module.global_expressions[h] {
            Expression::Literal(value) => literal(*value),
            Expression::Constant(constant) => self.constant(module.constants[*constant].init)?,
            Expression::ZeroValue(ty) => format!("{}()", self.writer.ty(*ty)),
            Expression::Compose { ty, components } => {
                let all = self.kept(*ty, components);
                let all = all.iter().map(|h| self.constant(*h)).collect::<Result<Vec<_>, _>>()?;
                format!("{}({})", self.writer.ty(*ty), all.join(", "))
            }
            Expression::Splat { size, value } => format!("vec{}({})", *size as u8, self.constant(*value)?),
            _ => {
                return refuse(
                    "constants must be numbers, vectors, arrays or structs",
                    module.global_expressions.get_span(h),
                );
            }
        })
    }
}

/// True if the function returns a struct that only naga can name.
fn gives_structs(fun: MathFunction) -> bool {
    matches!(fun, MathFunction::Modf | MathFunction::Frexp)
}

fn literal(value: Literal) -> String {
    match value {
        Literal::F32(x) if x.is_sign_negative() => format!("({x:?}f)"),
        Literal::F32(x) => format!("{x:?}f"),
        Literal::U32(n) => format!("{n}u"),
        Literal::I32(n) => format!("i32({n})"),
        Literal::Bool(b) => b.to_string(),
        Literal::AbstractInt(n) => format!("({n})"),
        Literal::AbstractFloat(x) => format!("({x:?})"),
        // The checks admit no other literals.
        _ => String::new(),
    }
}

fn unary(op: UnaryOperator) -> &'static str {
    match op {
        UnaryOperator::Negate => "-",
        UnaryOperator::LogicalNot => "!",
        UnaryOperator::BitwiseNot => "~",
    }
}

fn binary(op: BinaryOperator) -> &'static str {
    use BinaryOperator::*;
    match op {
        Add => "+",
        Subtract => "-",
        Multiply => "*",
        Divide => "/",
        Modulo => "%",
        Equal => "==",
        NotEqual => "!=",
        Less => "<",
        LessEqual => "<=",
        Greater => ">",
        GreaterEqual => ">=",
        And => "&",
        ExclusiveOr => "^",
        InclusiveOr => "|",
        LogicalAnd => "&&",
        LogicalOr => "||",
        ShiftLeft => "<<",
        ShiftRight => ">>",
    }
}

pub(super) fn swizzle(size: VectorSize, pattern: &[SwizzleComponent; 4]) -> String {
    pattern[..size as usize].iter().map(|c| ["x", "y", "z", "w"][*c as usize]).collect()
}
