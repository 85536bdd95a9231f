//! A mod's functions as text of ours, from what naga has read of its author's: under names that clash with nothing, with indices
//! that stay inside of arrays and loops that end.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use naga::common::wgsl::TryToWgsl as _;
use naga::proc::TypeResolution;
use naga::valid::{FunctionInfo, ModuleInfo};
use naga::{
    ArraySize, BinaryOperator, Block, Expression, Function, Handle, Literal, LocalVariable, MathFunction,
    Module, RelationalFunction, Scalar, ScalarKind, Span, Statement, SwitchValue, SwizzleComponent, Type,
    TypeInner, UnaryOperator, VectorSize,
};

/// What a mod may not say, and where it says it.
#[derive(Debug)]
pub(super) struct Refusal {
    pub message: String,
    pub span: Span,
}

pub(super) fn refuse<T>(message: impl Into<String>, span: Span) -> Result<T, Refusal> {
    Err(Refusal { message: message.into(), span })
}

/// Rounds that all loops of a mod make together for a pair of query and key; then they end.
pub(super) const ROUNDS: u32 = 4096;

/// What is common to the functions of a mod.
pub(super) struct Writer<'a> {
    pub module: &'a Module,
    pub info: &'a ModuleInfo,
    /// In front of every name.
    pub prefix: &'static str,
    /// The struct `At`, and which of its members the mod uses.
    pub at: Handle<Type>,
    pub members: &'a [(&'static str, bool)],
    /// Functions that the kernel has: accessors of what is captured.
    pub given: HashMap<Handle<Function>, String>,
}

/// Which of a function's values depend on the score.
#[derive(Default)]
struct Active {
    locals: HashSet<Handle<LocalVariable>>,
    calls: HashSet<Handle<Expression>>,
    all: HashSet<Handle<Expression>>,
}

impl Writer<'_> {
    fn scalar(scalar: Scalar) -> &'static str {
        scalar.try_to_wgsl().unwrap_or("f32")
    }

    pub fn ty(&self, ty: Handle<Type>) -> String {
        match &self.module.types[ty].inner {
            TypeInner::Struct { .. } if ty == self.at => format!("{}_At", self.prefix),
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
            // What is checked before has no others.
            _ => String::new(),
        }
    }

    /// Whether values of the type have numbers that a derivative may have.
    fn has_floats(&self, inner: &TypeInner) -> bool {
        match inner {
            TypeInner::Scalar(scalar) | TypeInner::Vector { scalar, .. } => scalar.kind == ScalarKind::Float,
            TypeInner::Array { base, .. } => self.has_floats(&self.module.types[*base].inner),
            TypeInner::Struct { members, .. } => {
                members.iter().any(|m| self.has_floats(&self.module.types[m.ty].inner))
            }
            _ => false,
        }
    }

    /// The structs of a mod.
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
        self.given.get(&handle).cloned().unwrap_or_else(|| format!("{}_f{}", self.prefix, handle.index()))
    }

    /// A function that gives the derivative beside the value, and the struct of both.
    pub fn dual(&self, handle: Handle<Function>) -> String {
        format!("{}_g{}", self.prefix, handle.index())
    }

    fn pair(&self, handle: Handle<Function>) -> String {
        format!("{}_G{}", self.prefix, handle.index())
    }

    /// The text of a function.
    pub fn value(&self, handle: Handle<Function>) -> Result<String, Refusal> {
        Ok(self.write(handle, false)?.0)
    }

    /// The text of a function that gives derivatives too, and of those that it calls.
    pub fn derivative(&self, handle: Handle<Function>) -> Result<String, Refusal> {
        let (mut text, mut called) = self.write(handle, true)?;
        let mut next = 0;
        while let Some(callee) = called.get(next).copied() {
            next += 1;
            let (more, others) = self.write(callee, true)?;
            text += &more;
            for other in others {
                if !called.contains(&other) {
                    called.push(other);
                }
            }
        }
        Ok(text)
    }

    /// The text, and the functions whose derivatives it calls, each once.
    fn write(
        &self,
        handle: Handle<Function>,
        dual: bool,
    ) -> Result<(String, Vec<Handle<Function>>), Refusal> {
        let function = &self.module.functions[handle];
        let mut body = Body {
            writer: self,
            function,
            info: &self.info[handle],
            dual: dual.then_some(handle),
            active: Active::default(),
            written: HashSet::new(),
            text: String::new(),
            depth: 1,
            called: Vec::new(),
        };
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

struct Body<'a> {
    writer: &'a Writer<'a>,
    function: &'a Function,
    info: &'a FunctionInfo,
    dual: Option<Handle<Function>>,
    active: Active,
    /// Expressions that have a name.
    written: HashSet<Handle<Expression>>,
    text: String,
    depth: usize,
    /// Functions whose derivatives it calls.
    called: Vec<Handle<Function>>,
}

impl<'a> Body<'a> {
    fn line(&mut self, line: &str) {
        let _ = writeln!(self.text, "{:indent$}{line}", "", indent = 4 * self.depth);
    }

    fn span(&self, h: Handle<Expression>) -> Span {
        self.function.expressions.get_span(h)
    }

    fn inner(&self, h: Handle<Expression>) -> &'a TypeInner {
        self.info[h].ty.inner_with(&self.writer.module.types)
    }

    fn ty(&self, h: Handle<Expression>) -> String {
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
        // By names, as the author's `let` had them: what is made of them is then no constant, which must not overflow.
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
                    if let Some(what) = self.bits_of_score(h) {
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
                let left = format!("{}_rounds", self.writer.prefix);
                self.line("loop {");
                self.line(&format!("    if {left} == 0u {{ break; }}"));
                self.line(&format!("    {left} -= 1u;"));
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
                    (Some(h), Some(handle)) => {
                        let derivative = self.derivative(*h).unwrap_or_else(|| format!("{}()", self.ty(*h)));
                        format!("return {}({}, {derivative});", self.writer.pair(handle), self.value(*h)?)
                    }
                };
                self.line(&line);
            }
            Statement::Store { pointer, value } => {
                let (place, root) = self.place(*pointer, "l")?;
                let stored = self.value(*value)?;
                // Before the value is, on which the derivative's place may depend.
                if self.active.locals.contains(&root) {
                    let (place, _) = self.place(*pointer, "d")?;
                    let derivative =
                        self.derivative(*value).unwrap_or_else(|| format!("{}()", self.ty(*value)));
                    self.line(&format!("{place} = {derivative};"));
                }
                self.line(&format!("{place} = {stored};"));
            }
            Statement::Call { function, arguments, result } => self.call(*function, arguments, *result)?,
            Statement::Kill => return refuse("a mod cannot discard", span),
            Statement::ControlBarrier(_) | Statement::MemoryBarrier(_) => {
                return refuse("a mod cannot have barriers: each pair is on its own", span);
            }
            _ => return refuse("a mod cannot do this: it may only compute from its arguments", span),
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

    /// Where a pointer points, and the variable it begins at; `kind` is l for values, d for derivatives.
    fn place(&self, h: Handle<Expression>, kind: &str) -> Result<(String, Handle<LocalVariable>), Refusal> {
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
            _ => refuse("a mod has no pointers but to its own variables", self.span(h)),
        }
    }

    /// The variable that a pointer begins at.
    fn root(&self, mut h: Handle<Expression>) -> Option<Handle<LocalVariable>> {
        loop {
            match &self.function.expressions[h] {
                Expression::LocalVariable(local) => return Some(*local),
                Expression::AccessIndex { base, .. } | Expression::Access { base, .. } => h = *base,
                _ => return None,
            }
        }
    }

    /// The type behind a pointer, or the type itself.
    fn pointee(&self, h: Handle<Expression>) -> (&'a TypeInner, Option<Handle<Type>>) {
        match (&self.info[h].ty, self.inner(h)) {
            (_, TypeInner::Pointer { base, .. }) => (&self.writer.module.types[*base].inner, Some(*base)),
            (TypeResolution::Handle(ty), inner) => (inner, Some(*ty)),
            (_, inner) => (inner, None),
        }
    }

    fn member(&self, base: Handle<Expression>, index: u32) -> String {
        match self.pointee(base) {
            (_, Some(ty)) if ty == self.writer.at => format!(".{}", self.writer.members[index as usize].0),
            (TypeInner::Struct { .. }, _) => format!(".m{index}"),
            _ => format!("[{index}]"),
        }
    }

    /// An index, within what it is of.
    fn index(&self, base: Handle<Expression>, index: Handle<Expression>) -> Result<String, Refusal> {
        let length = match self.pointee(base).0 {
            TypeInner::Vector { size, .. } | TypeInner::ValuePointer { size: Some(size), .. } => {
                u32::from(*size as u8)
            }
            TypeInner::Array { size: ArraySize::Constant(n), .. } => n.get(),
            _ => return refuse("a mod's arrays have a fixed length", self.span(base)),
        };
        Ok(format!("min(u32({}), {}u)", self.value(index)?, length - 1))
    }

    /// An expression by its name, or written out where it has none.
    fn value(&self, h: Handle<Expression>) -> Result<String, Refusal> {
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
                    return refuse(format!("a mod cannot call {fun:?}"), self.span(h));
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
            _ => return refuse("a mod cannot do this: it may only compute from its arguments", self.span(h)),
        })
    }

    /// Of a struct's members, those that are written: all, but of `At` those that are used.
    fn kept<T: Copy>(&self, ty: Handle<Type>, components: &[T]) -> Vec<T> {
        let is_kept = |n: usize| ty != self.writer.at || self.writer.members[n].1;
        components.iter().enumerate().filter(|(n, _)| is_kept(*n)).map(|(_, h)| *h).collect()
    }

    /// A constant of the mod's, which naga has evaluated.
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
                    "a mod's constants are numbers, vectors, arrays, structs",
                    module.global_expressions.get_span(h),
                );
            }
        })
    }
}

/// Derivatives, forward: each expression that depends on the score has one beside it (Wengert 1964; Griewank and Walther 2008,
/// "Evaluating derivatives", chapter 3).
impl Body<'_> {
    /// Which variables and calls depend on the score: those that are ever given something that does.
    fn find_active(&mut self) {
        let function = self.function;
        loop {
            let before = self.active.locals.len() + self.active.calls.len();
            // What an expression is made of comes before it.
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
                    if own
                        && self.writer.has_floats(self.inner(*result))
                        && arguments.iter().any(|h| self.is_active(*h))
                    {
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

    /// What reads the bits of something that depends on the score, whose derivative would be lost.
    fn bits_of_score(&self, h: Handle<Expression>) -> Option<&'static str> {
        match &self.function.expressions[h] {
            Expression::As { expr, convert: None, .. } if self.is_active(*expr) => Some("`bitcast`"),
            Expression::Math { fun, arg, .. } if self.is_active(*arg) => {
                fun.try_to_wgsl().filter(|name| name.starts_with("pack")).map(|_| "packing")
            }
            _ => None,
        }
    }

    fn is_active(&self, h: Handle<Expression>) -> bool {
        self.active.all.contains(&h)
    }

    /// Whether an expression depends on the score, by what it is made of.
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

    /// The derivative of what depends on the score, by its name.
    fn derivative(&self, h: Handle<Expression>) -> Option<String> {
        self.is_active(h).then(|| match &self.function.expressions[h] {
            Expression::FunctionArgument(n) => format!("b{n}"),
            _ => format!("t{}", h.index()),
        })
    }

    fn derive(&self, h: Handle<Expression>) -> Result<String, Refusal> {
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
                // A vector, where one of both is a number.
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
                    // At 0, where there is none, 0.
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

    /// The number by which vectors are mixed, as a vector.
    fn widened(&self, h: Handle<Expression>, by: Option<Handle<Expression>>, text: &str) -> String {
        let is_scalar = by.is_some_and(|by| matches!(self.inner(by), TypeInner::Scalar(_)));
        if is_scalar { format!("{}({text})", self.ty(h)) } else { text.to_string() }
    }

    fn refuse_derivative<T>(&self, what: &str, h: Handle<Expression>) -> Result<T, Refusal> {
        let hook = "write `fn score_mod_slope(score: f32, at: At) -> f32` for the derivative by score";
        refuse(format!("{what} is not differentiable here; {hook}"), self.span(h))
    }
}

/// Whether the function gives a struct that only naga can name.
fn gives_structs(fun: MathFunction) -> bool {
    matches!(fun, MathFunction::Modf | MathFunction::Frexp)
}

/// Whether its derivative is 0 wherever it has one.
fn is_flat(fun: MathFunction) -> bool {
    use MathFunction::*;
    matches!(fun, Ceil | Floor | Round | Trunc | Sign | Step)
}

/// What is 0 where a factor is, and not 0 · ∞.
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

fn literal(value: Literal) -> String {
    match value {
        Literal::F32(x) if x.is_sign_negative() => format!("({x:?}f)"),
        Literal::F32(x) => format!("{x:?}f"),
        Literal::U32(n) => format!("{n}u"),
        Literal::I32(n) => format!("i32({n})"),
        Literal::Bool(b) => b.to_string(),
        Literal::AbstractInt(n) => format!("({n})"),
        Literal::AbstractFloat(x) => format!("({x:?})"),
        // What is checked before has no others.
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

fn swizzle(size: VectorSize, pattern: &[SwizzleComponent; 4]) -> String {
    pattern[..size as usize].iter().map(|c| ["x", "y", "z", "w"][*c as usize]).collect()
}
