//! WGSL that FXC refuses or compiles wrongly. FXC is the compiler of wgpu's DX12 backend on an
//! unmodified Windows.
//!
//! The program `scripts/shaders` compiles all kernels with FXC. These checks need no tools, and
//! name the function.

use naga::valid::{FunctionInfo, ModuleInfo};
use naga::{
    AddressSpace, BinaryOperator, Block, Expression, Function, Module, Scalar, ScalarKind, Statement,
    TypeInner,
};
use support::wgsl;

/// Returns every place of a module that FXC refuses or compiles wrongly, by function.
pub fn refused(module: &Module, info: &ModuleInfo) -> Vec<String> {
    let functions = module.functions.iter().map(|(handle, function)| (function, &info[handle]));
    let entries = module.entry_points.iter().enumerate().map(|(n, e)| (&e.function, info.get_entry_point(n)));
    let mut refused = Vec::new();
    for (function, about) in functions.chain(entries) {
        let name = function.name.as_deref().unwrap_or("main");
        if function.result.is_some() && continues_behind_return(&function.body) {
            refused
                .push(format!("{name}: statements follow a branch that returns: put them into its `else`"));
        }
        if stores_to_component(&function.body, module, function, about) {
            refused.push(format!("{name}: stores to a computed component of a vector: use `select`"));
        }
        if joins_bools(module, function, about) {
            refused.push(format!("{name}: `&=`, `|=` or `^=` of a bool: use `&&`, `||` or `select`"));
        }
        if reads_component(module, function, about) {
            refused.push(format!("{name}: reads a computed component of a vector: use `component`"));
        }
    }
    refused
}

fn returns(block: &Block) -> bool {
    any_statement(block, &mut |statement| matches!(statement, Statement::Return { .. }))
}

/// FXC treats the result of such a function as uninitialised, and barriers that depend on it as
/// divergent (X3663, X4026).
fn continues_behind_return(block: &Block) -> bool {
    block.iter().enumerate().any(|(n, statement)| {
        let is_last = n + 1 == block.len();
        match statement {
            Statement::Return { .. } => !is_last,
            Statement::If { accept, reject, .. } if is_last => {
                continues_behind_return(accept)
                    || continues_behind_return(reject)
                    || returns(accept) != returns(reject)
            }
            Statement::If { accept, reject, .. } => returns(accept) || returns(reject),
            Statement::Switch { cases, .. } if is_last => {
                cases.iter().any(|case| continues_behind_return(&case.body))
            }
            Statement::Switch { cases, .. } => cases.iter().any(|case| returns(&case.body)),
            Statement::Block(inner) if is_last => continues_behind_return(inner),
            Statement::Block(inner) => returns(inner),
            Statement::Loop { body, continuing, .. } => returns(body) || returns(continuing),
            _ => false,
        }
    })
}

/// FXC unrolls every loop around such a store. If it cannot, it refuses the kernel (X3550, X3511).
fn stores_to_component(block: &Block, module: &Module, function: &Function, about: &FunctionInfo) -> bool {
    let is_of_invocation =
        |space: AddressSpace| matches!(space, AddressSpace::Function | AddressSpace::Private);
    any_statement(block, &mut |statement| {
        let Statement::Store { pointer, .. } = *statement else { return false };
        let Expression::Access { base, .. } = function.expressions[pointer] else { return false };
        match *about[base].ty.inner_with(&module.types) {
            TypeInner::Pointer { base, space } => {
                is_of_invocation(space) && matches!(module.types[base].inner, TypeInner::Vector { .. })
            }
            TypeInner::ValuePointer { size: Some(_), space, .. } => is_of_invocation(space),
            _ => false,
        }
    })
}

/// In a loop, FXC evaluates `held = held & all(…)` with the value of `held` from before the loop,
/// and drops the loop.
fn joins_bools(module: &Module, function: &Function, about: &FunctionInfo) -> bool {
    use BinaryOperator::{And, ExclusiveOr, InclusiveOr};
    any_statement(&function.body, &mut |statement| {
        let Statement::Store { pointer, value } = *statement else { return false };
        let Expression::Binary { op: And | InclusiveOr | ExclusiveOr, left, right } =
            function.expressions[value]
        else {
            return false;
        };
        let loads = |operand| match function.expressions[operand] {
            Expression::Load { pointer: from } => function.expressions[from] == function.expressions[pointer],
            _ => false,
        };
        matches!(*about[value].ty.inner_with(&module.types), TypeInner::Scalar(Scalar::BOOL))
            && (loads(left) || loads(right))
    })
}

/// FXC multiplies the vector by (0, 1, 0, 0) or similar and adds up. So infinity or NaN in the
/// other components makes the result NaN. Vectors of integers, of workgroup memory and of buffers
/// are read correctly.
fn reads_component(module: &Module, function: &Function, about: &FunctionInfo) -> bool {
    let is_float = |scalar: Scalar| scalar.kind == ScalarKind::Float;
    let in_registers = |space: AddressSpace| {
        matches!(space, AddressSpace::Function | AddressSpace::Private | AddressSpace::Uniform)
    };
    function.expressions.iter().any(|(_, expression)| {
        let Expression::Access { base, .. } = *expression else { return false };
        match *about[base].ty.inner_with(&module.types) {
            TypeInner::Vector { scalar, .. } => is_float(scalar),
            TypeInner::Pointer { base, space } => match module.types[base].inner {
                TypeInner::Vector { scalar, .. } => is_float(scalar) && in_registers(space),
                _ => false,
            },
            TypeInner::ValuePointer { size: Some(_), scalar, space } => {
                is_float(scalar) && in_registers(space)
            }
            _ => false,
        }
    })
}

/// True if `holds` is true for a statement of the block, at any depth.
fn any_statement(block: &Block, holds: &mut dyn FnMut(&Statement) -> bool) -> bool {
    block.iter().any(|statement| {
        holds(statement)
            || match statement {
                Statement::Block(inner) => any_statement(inner, holds),
                Statement::If { accept, reject, .. } => {
                    any_statement(accept, holds) || any_statement(reject, holds)
                }
                Statement::Switch { cases, .. } => cases.iter().any(|case| any_statement(&case.body, holds)),
                Statement::Loop { body, continuing, .. } => {
                    any_statement(body, holds) || any_statement(continuing, holds)
                }
                _ => false,
            }
    })
}

#[test]
fn refused_code_is_found() {
    let count = |text: &str| {
        let text = format!(
            "{text}\n@group(0) @binding(0) var<storage, read_write> out: vec4<f32>;\n\
             @compute @workgroup_size(1) fn main(@builtin(local_invocation_index) n: u32) {{ out = f(n); }}"
        );
        let module = wgsl::parse(&text).unwrap();
        let info = wgsl::validate(&module, &text).unwrap();
        refused(&module, &info).len()
    };
    let of = |body: &str| count(&format!("fn f(n: u32) -> vec4<f32> {{ {body} }}"));
    assert_eq!(of("if n > 1u { return vec4<f32>(1.0); } return vec4<f32>();"), 1);
    assert_eq!(of("for (var m = 0u; m < n; m++) { return vec4<f32>(1.0); } return vec4<f32>();"), 1);
    assert_eq!(
        of(
            "if n > 1u { if n > 2u { return vec4<f32>(1.0); } } else { return vec4<f32>(2.0); } return vec4<f32>();"
        ),
        1
    );
    assert_eq!(of("var x = vec4<u32>(); x[n] = 1u; return vec4<f32>(x);"), 1);
    assert_eq!(of("var x: array<vec4<i32>, 4>; x[n][n] = 1; return vec4<f32>(x[n]);"), 1);
    assert_eq!(of("var held = n > 1u; held &= n < 5u; return vec4<f32>(f32(held));"), 1);
    assert_eq!(of("var held = n > 1u; held = held && n < 5u; return vec4<f32>(f32(held));"), 0);
    assert_eq!(of("var held = (n > 1u) & (n < 5u); return vec4<f32>(f32(held));"), 0);
    assert_eq!(of("var held = n; held &= 5u; return vec4<f32>(f32(held));"), 0);
    assert_eq!(of("let x = out; return vec4<f32>(x[n]);"), 1);
    assert_eq!(of("var x = out; return vec4<f32>(x[n]);"), 1);
    assert_eq!(of("var x: array<vec4<f32>, 4>; return vec4<f32>(x[n][n]);"), 1);
    assert_eq!(of("let x = vec4<u32>(n); return vec4<f32>(f32(x[n]) + out[n]);"), 0);
    assert_eq!(of("if n > 1u { return vec4<f32>(1.0); } else { return vec4<f32>(); }"), 0);
    assert_eq!(of("var x: array<vec4<f32>, 4>; x[n][2] = 1.0; x[n] = vec4<f32>(); return x[n];"), 0);
    // A function without a result may return early.
    assert_eq!(
        count(
            "fn g() { if out.x > 1.0 { return; } out.x = 2.0; } fn f(n: u32) -> vec4<f32> { g(); return out; }"
        ),
        0
    );
}
