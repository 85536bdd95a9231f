//! Properties of a kernel that Apple's compiler or GPUs are reported to get wrong. No Mac is
//! needed: the checks read naga's module, from which naga writes the MSL. They do not compile MSL.

use std::collections::HashSet;

use naga::valid::{FunctionInfo, GlobalUse, ModuleInfo};
use naga::{
    AddressSpace, BinaryOperator, Block, CooperativeSize, Expression, Function, Handle, Module, ScalarKind,
    Statement, TypeInner,
};

use crate::verdict::Verdict;

/// The most threadgroup memory of Apple's GPUs, in bytes.
const MOST_MEMORY: u32 = 32 << 10;

/// Threadgroup arguments of a kernel: naga writes one for each workgroup variable (wgpu 9465).
const MOST_VARIABLES: usize = 31;

/// Checks the entry point of `module` and every function that it calls. `planned` is the host's
/// number of bytes of workgroup memory. The host compares it with the device's limit before it
/// compiles a kernel.
pub fn check(module: &Module, info: &ModuleInfo, planned: u32) -> Verdict {
    // The host never gives this kernel to a Metal device.
    if planned > MOST_MEMORY || has_large_fragments(module) {
        return Verdict::Unsuited;
    }
    let mut walk =
        Walk { module, info, called: HashSet::new(), faults: Vec::new(), uniform_loads: HashSet::new() };
    walk.workgroup_memory(planned);
    let entry = &module.entry_points[0];
    let scope =
        Scope { name: None, function: &entry.function, info: info.get_entry_point(0), in_switch: false };
    walk.block(&entry.function.body, scope);
    walk.faults.sort();
    walk.faults.dedup();
    match walk.uniform_loads.len() as u64 {
        _ if !walk.faults.is_empty() => Verdict::Rejected(walk.faults.join("; ")),
        0 => Verdict::Accepted,
        loads => Verdict::UniformLoads(loads),
    }
}

/// Metal's matrix units have only fragments of 8 × 8.
fn has_large_fragments(module: &Module) -> bool {
    let entries = module.entry_points.iter().map(|entry| &entry.function);
    let mut functions = module.functions.iter().map(|(_, function)| function).chain(entries);
    functions.any(|function| {
        function.expressions.iter().any(|(_, expression)| {
            matches!(expression, Expression::CooperativeLoad { columns, .. } if *columns != CooperativeSize::Eight)
        })
    })
}

struct Walk<'a> {
    module: &'a Module,
    info: &'a ModuleInfo,
    /// Functions that were visited; true if a `switch` calls them.
    called: HashSet<(Handle<Function>, bool)>,
    faults: Vec<String>,
    /// Results of `workgroupUniformLoad`, with their functions.
    uniform_loads: HashSet<(Option<Handle<Function>>, Handle<Expression>)>,
}

/// The place of a statement.
#[derive(Clone, Copy)]
struct Scope<'a> {
    /// None for the entry point.
    name: Option<Handle<Function>>,
    function: &'a Function,
    info: &'a FunctionInfo,
    /// True if a `switch` is around the statement, in this function or in a caller.
    in_switch: bool,
}

impl<'a> Walk<'a> {
    /// Sums the workgroup variables as wgpu's Metal backend does: each is rounded up to 16 bytes.
    fn workgroup_memory(&mut self, planned: u32) {
        let entry = self.info.get_entry_point(0);
        let is_used = |handle| entry[handle] != GlobalUse::empty();
        let variables: Vec<u32> = (self.module.global_variables.iter())
            .filter(|(handle, variable)| variable.space == AddressSpace::WorkGroup && is_used(*handle))
            .map(|(_, variable)| self.module.types[variable.ty].inner.size(self.module.to_ctx()))
            .collect();
        let bytes: u32 = variables.iter().map(|size| size.next_multiple_of(16)).sum();
        if bytes > planned {
            self.faults.push(format!(
                "{bytes} bytes of workgroup memory, but the host compares {planned} with the limit"
            ));
        }
        if variables.len() > MOST_VARIABLES {
            self.faults
                .push(format!("{} workgroup variables, but Metal has {MOST_VARIABLES}", variables.len()));
        }
    }

    fn block(&mut self, block: &'a Block, scope: Scope<'a>) {
        for statement in block {
            match statement {
                Statement::Block(inner) => self.block(inner, scope),
                Statement::If { accept, reject, .. } => {
                    self.block(accept, scope);
                    self.block(reject, scope);
                }
                Statement::Loop { body, continuing, .. } => {
                    self.block(body, scope);
                    self.block(continuing, scope);
                }
                Statement::Switch { cases, .. } => {
                    cases.iter().for_each(|case| self.block(&case.body, Scope { in_switch: true, ..scope }));
                }
                Statement::Call { function, .. } if self.called.insert((*function, scope.in_switch)) => {
                    let (called, info) = (&self.module.functions[*function], &self.info[*function]);
                    let scope = Scope { name: Some(*function), function: called, info, ..scope };
                    self.block(&called.body, scope);
                }
                Statement::SubgroupCollectiveOperation { argument, .. } => {
                    self.subgroup_operation(scope);
                    self.reduction(*argument, scope);
                }
                Statement::SubgroupBallot { .. }
                | Statement::SubgroupGather { .. }
                | Statement::CooperativeStore { .. } => self.subgroup_operation(scope),
                Statement::ControlBarrier(barrier) if barrier.contains(naga::Barrier::SUB_GROUP) => {
                    self.subgroup_operation(scope);
                }
                Statement::WorkGroupUniformLoad { result, .. } => {
                    self.uniform_loads.insert((scope.name, *result));
                }
                Statement::Store { pointer, .. } => self.store(*pointer, scope),
                Statement::Emit(range) => range.clone().for_each(|handle| self.expression(handle, scope)),
                _ => {}
            }
        }
    }

    fn expression(&mut self, handle: Handle<Expression>, scope: Scope<'a>) {
        match scope.function.expressions[handle] {
            Expression::CooperativeLoad { .. } | Expression::CooperativeMultiplyAdd { .. } => {
                self.subgroup_operation(scope);
            }
            Expression::Binary { op, .. } => {
                use BinaryOperator::*;
                if matches!(op, Add | Subtract | Multiply | Divide | Modulo) && self.is_half(handle, scope) {
                    self.fault(scope, "arithmetic in f16");
                }
            }
            Expression::Math { .. } if self.is_half(handle, scope) => self.fault(scope, "arithmetic in f16"),
            _ => {}
        }
    }

    /// The crate's sums are f32: f16 is for storage and for operands of matrix units.
    fn is_half(&self, handle: Handle<Expression>, scope: Scope<'a>) -> bool {
        let scalar = self.type_of(handle, scope).scalar();
        scalar.is_some_and(|scalar| scalar.kind == ScalarKind::Float && scalar.width == 2)
    }

    /// The compiler for the A14 gives every invocation the value of the first one in a `switch`
    /// (wgpu 10135).
    fn subgroup_operation(&mut self, scope: Scope<'a>) {
        if scope.in_switch {
            self.fault(scope, "a subgroup operation in a `switch`");
        }
    }

    /// Metal's `simd_sum` refuses a struct of floats (cubecl 909). Other projects compile MSL's
    /// vectors, also as operands of shuffles. No kernel needs a reduction of a vector.
    fn reduction(&mut self, argument: Handle<Expression>, scope: Scope<'a>) {
        if !matches!(self.type_of(argument, scope), TypeInner::Scalar(_)) {
            self.fault(scope, "a subgroup reduction of a vector");
        }
    }

    /// On an M2 such a store was lost unless it was to the first component.
    fn store(&mut self, pointer: Handle<Expression>, scope: Scope<'a>) {
        let Expression::Access { base, .. } = scope.function.expressions[pointer] else { return };
        let space = match *self.type_of(base, scope) {
            TypeInner::Pointer { base, space } => {
                matches!(self.module.types[base].inner, TypeInner::Vector { .. }).then_some(space)
            }
            TypeInner::ValuePointer { size: Some(_), space, .. } => Some(space),
            _ => None,
        };
        if space == Some(AddressSpace::WorkGroup) {
            self.fault(scope, "a store to a computed component of a vector in workgroup memory");
        }
    }

    fn type_of(&self, handle: Handle<Expression>, scope: Scope<'a>) -> &'a TypeInner {
        scope.info[handle].ty.inner_with(&self.module.types)
    }

    fn fault(&mut self, scope: Scope<'a>, what: &str) {
        self.faults.push(format!("{}: {what}", scope.function.name.as_deref().unwrap_or("main")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::wgsl;

    /// Checks an entry point with the statements of `body`, after the declarations of `head`.
    fn checked(planned: u32, head: &str, body: &str) -> Verdict {
        let text = format!(
            "{head}\n@group(0) @binding(0) var<storage, read_write> out: array<vec4<f32>>;\n\
             @compute @workgroup_size(64) fn main(@builtin(local_invocation_index) n: u32) {{ {body} }}"
        );
        let module = wgsl::parse(&text).unwrap();
        let info = wgsl::validate(&module, &text).unwrap();
        check(&module, &info, planned)
    }

    fn accepted(head: &str, body: &str) {
        assert_eq!(checked(0, head, body), Verdict::Accepted);
    }

    fn rejected(head: &str, body: &str, why: &str) {
        assert_eq!(checked(0, head, body), Verdict::Rejected(why.into()));
    }

    #[test]
    fn switch_with_subgroups_is_rejected() {
        let why = "a subgroup operation in a `switch`";
        let cases = |statement: &str| format!("switch n {{ case 1u: {{ {statement} }} default: {{}} }}");
        for operation in ["subgroupAdd(1.0)", "subgroupShuffleXor(1.0, 1u)", "f32(subgroupBallot(n == 1u).x)"]
        {
            let statement = format!("out[n].x = {operation};");
            rejected("", &cases(&statement), &format!("main: {why}"));
            rejected("", &cases(&format!("if n > 0u {{ {statement} }}")), &format!("main: {why}"));
            accepted("", &format!("{} {statement}", cases("out[n].x = 1.0;")));
        }
        let called = "fn f() -> f32 { return g(); } fn g() -> f32 { return subgroupBroadcastFirst(1.0); }";
        rejected(called, &format!("out[n].x = f(); {}", cases("out[n].y = f();")), &format!("g: {why}"));
        accepted(called, "if n == 1u { out[n].x = f(); }");
        // A function that the entry point does not call is accepted.
        accepted(&format!("fn f(n: u32) {{ {} }}", cases("out[n].x = subgroupAdd(1.0);")), "out[n].x = 1.0;");
    }

    #[test]
    fn vector_reduction_is_rejected() {
        rejected("", "out[n] = subgroupAdd(out[n]);", "main: a subgroup reduction of a vector");
        rejected("", "out[n] = subgroupExclusiveAdd(out[n]);", "main: a subgroup reduction of a vector");
        accepted("", "out[n].x = subgroupAdd(out[n].x);");
        accepted("", "out[n] = subgroupShuffleXor(out[n], 1u);");
    }

    #[test]
    fn workgroup_memory_matches_the_plan() {
        let verdict = |planned, floats: u32| {
            let head = format!(
                "var<workgroup> a: array<f32, {floats}>; var<workgroup> b: f32; var<workgroup> c: u32;"
            );
            checked(planned, &head, "a[n] = 1.0; b = 2.0;")
        };
        assert_eq!(verdict(32768, 8188), Verdict::Accepted);
        let why = "32768 bytes of workgroup memory, but the host compares 32756 with the limit";
        assert_eq!(verdict(32756, 8188), Verdict::Rejected(why.into()));
        assert_eq!(verdict(32784, 8189), Verdict::Unsuited);
    }

    #[test]
    fn large_fragments_are_not_for_metal() {
        let verdict = |side: u32| {
            let head = "enable f16;\nenable wgpu_cooperative_matrix;\n@group(0) @binding(1) var<storage> a: array<f16>;\n\
                 @group(0) @binding(2) var<storage, read_write> c: array<f32>;\n";
            let load = |role: &str, of: &str, x: &str| {
                format!("coopLoad<coop_mat{side}x{side}<{of}, {role}>>(&{x}[0], {side}u)")
            };
            let (a, b, c) = (load("A", "f16", "a"), load("B", "f16", "a"), load("C", "f32", "c"));
            checked(0, head, &format!("coopStore(coopMultiplyAdd({a}, {b}, {c}), &c[0], {side}u);"))
        };
        assert_eq!(verdict(8), Verdict::Accepted);
        assert_eq!(verdict(16), Verdict::Unsuited);
    }

    #[test]
    fn many_workgroup_variables_are_rejected() {
        let verdict = |count: u32| {
            let head: String = (0..count).map(|n| format!("var<workgroup> v{n}: u32;")).collect();
            let body: String = (0..count).map(|n| format!("v{n} = n;")).collect();
            checked(16 * count, &head, &body)
        };
        assert_eq!(verdict(31), Verdict::Accepted);
        assert_eq!(verdict(32), Verdict::Rejected("32 workgroup variables, but Metal has 31".into()));
    }

    #[test]
    fn f16_arithmetic_is_rejected() {
        let head = "enable f16;\n@group(0) @binding(1) var<storage> halves: array<vec4<f16>>;";
        let why = "main: arithmetic in f16";
        rejected(head, "out[n] = vec4<f32>(halves[n] + halves[0]);", why);
        rejected(head, "out[n].x = f32(dot(halves[n], halves[0]));", why);
        accepted(head, "out[n] = vec4<f32>(halves[n]) + vec4<f32>(halves[0]);");
    }

    #[test]
    fn computed_component_store_is_rejected() {
        let head = "var<workgroup> a: array<vec4<f32>, 4>;";
        let why = "main: a store to a computed component of a vector in workgroup memory";
        assert_eq!(checked(64, head, "a[n][n] = 1.0;"), Verdict::Rejected(why.into()));
        let through = "let at = &a[n]; (*at)[n] = 1.0;";
        assert_eq!(checked(64, head, through), Verdict::Rejected(why.into()));
        assert_eq!(checked(64, head, "a[n][2] = 1.0; out[n].x = a[n][n];"), Verdict::Accepted);
    }

    #[test]
    fn uniform_loads_are_counted() {
        let head = "var<workgroup> a: u32; fn f() -> u32 { return workgroupUniformLoad(&a); }";
        assert_eq!(checked(16, head, "out[f()].x = 1.0; out[f()].y = 2.0;"), Verdict::UniformLoads(1));
        assert_eq!(
            checked(16, head, "out[f()].x = 1.0; out[workgroupUniformLoad(&a)].y = 2.0;"),
            Verdict::UniformLoads(2)
        );
        assert_eq!(checked(16, head, "a = 1u;"), Verdict::Accepted);
    }
}
