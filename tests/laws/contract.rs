//! The Rust description of every kernel agrees with its WGSL, as naga reads it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::LazyLock;

use naga::proc::Layouter;
use naga::valid::{GlobalUse, ModuleInfo};
use naga::{
    AddressSpace, ArraySize, Expression, Function, Handle, Module, ScalarKind, StorageAccess, Type, TypeInner,
};
use support::wgsl;
use wgpu_attention::inspect::{BindingText, KernelText, StructTable, kernels, shared_structs};

use crate::harness::listed::unlisted;
use crate::harness::{due, rest};

/// The invocations per workgroup that every WebGPU device has.
const MAX_INVOCATIONS: u32 = 256;
const MAX_WORKGROUP_MEMORY: u32 = 16384;
const MAX_STORAGE_BUFFERS: usize = 8;

/// A parsed and validated module.
struct Parsed {
    module: Module,
    info: ModuleInfo,
    layouts: Layouter,
}

impl Parsed {
    fn new(text: &str) -> Result<Self, String> {
        let module = wgsl::parse(text)?;
        let info = wgsl::validate(&module, text)?;
        let mut layouts = Layouter::default();
        layouts.update(module.to_ctx()).map_err(|e| e.to_string())?;
        Ok(Parsed { module, info, layouts })
    }

    /// Returns a type in WGSL spelling.
    fn spelled(&self, ty: Handle<Type>) -> String {
        let ty = &self.module.types[ty];
        let scalar = |s: naga::Scalar| match (s.kind, s.width) {
            (ScalarKind::Bool, _) => "bool".to_string(),
            (kind, width) => {
                let kind = if kind == ScalarKind::Float {
                    "f"
                } else if kind == ScalarKind::Sint {
                    "i"
                } else {
                    "u"
                };
                format!("{kind}{}", u32::from(width) * 8)
            }
        };
        match &ty.inner {
            TypeInner::Scalar(s) => scalar(*s),
            TypeInner::Atomic(s) => format!("atomic<{}>", scalar(*s)),
            TypeInner::Vector { size, scalar: s } => format!("vec{}<{}>", *size as u8, scalar(*s)),
            TypeInner::Array { base, size: ArraySize::Constant(n), .. } => {
                format!("array<{}, {n}>", self.spelled(*base))
            }
            TypeInner::Array { base, size: ArraySize::Dynamic, .. } => {
                format!("array<{}>", self.spelled(*base))
            }
            TypeInner::Struct { .. } => ty.name.clone().unwrap_or_default(),
            other => format!("{other:?}"),
        }
    }

    /// Collects the struct itself, or the element type of an array.
    fn structs_within(&self, ty: Handle<Type>, found: &mut Vec<Handle<Type>>) {
        match &self.module.types[ty].inner {
            TypeInner::Array { base, .. } => self.structs_within(*base, found),
            TypeInner::Struct { members, .. } if !found.contains(&ty) => {
                found.push(ty);
                members.iter().for_each(|m| self.structs_within(m.ty, found));
            }
            _ => {}
        }
    }

    fn compare_struct(&self, ty: Handle<Type>, table: &StructTable, faults: &mut Vec<String>) {
        let TypeInner::Struct { members, span } = &self.module.types[ty].inner else {
            return faults.push(format!("{} is no struct", table.name));
        };
        let wgsl: Vec<_> = members
            .iter()
            .map(|m| (m.name.clone().unwrap_or_default(), m.offset as usize, self.spelled(m.ty)))
            .collect();
        let rust: Vec<_> =
            table.fields.iter().map(|f| (f.name.to_string(), f.offset, f.wgsl.to_string())).collect();
        for n in 0..wgsl.len().max(rust.len()) {
            let (wgsl, rust) = (wgsl.get(n), rust.get(n));
            if wgsl != rust {
                faults.push(format!("{} member {n}: WGSL {wgsl:?}, Rust {rust:?}", table.name));
            }
        }
        // A uniform buffer has whole vectors of 16 bytes.
        let is_params = table.name == "Params";
        let bytes = if is_params { span.next_multiple_of(16) } else { *span };
        if bytes as usize != table.bytes {
            faults.push(format!("{}: {span} bytes in WGSL, {} in Rust", table.name, table.bytes));
        }
    }
}

/// Returns every difference between a kernel's WGSL and its Rust description.
fn faults(kernel: &KernelText, structs: &[StructTable]) -> Vec<String> {
    let parsed = match Parsed::new(&kernel.wgsl) {
        Ok(parsed) => parsed,
        Err(e) => return vec![e],
    };
    let module = &parsed.module;
    let mut faults = Vec::new();

    let [entry] = module.entry_points.as_slice() else {
        return vec![format!("{} entry points", module.entry_points.len())];
    };
    if entry.name != "main" || entry.stage != naga::ShaderStage::Compute {
        faults.push(format!("the entry point is {:?} `{}`", entry.stage, entry.name));
    }
    let invocations: u32 = entry.workgroup_size.iter().product();
    if invocations != kernel.invocations || invocations > MAX_INVOCATIONS {
        faults.push(format!("{invocations} invocations in WGSL, {} in Rust", kernel.invocations));
    }
    if !module.overrides.is_empty() {
        faults.push("overrides, which pipelines do not set".into());
    }

    let used = parsed.info.get_entry_point(0);
    let mut bindings = Vec::new();
    let mut binds_mods = false;
    let mut workgroup_memory = 0;
    for (handle, global) in module.global_variables.iter() {
        let name = global.name.clone().unwrap_or_default();
        let binding = global.binding.as_ref().map(|b| (b.group, b.binding));
        match global.space {
            AddressSpace::Uniform => {
                let mods = Some((0, kernel.bindings.len() as u32 + 1));
                if kernel.binds_mods && (name.as_str(), binding) == ("mods", mods) {
                    // Its members depend on the functions. `mods` compares their results.
                    binds_mods = true;
                    continue;
                }
                if (name.as_str(), binding) != ("p", Some((0, 0))) {
                    faults.push(format!("uniform `{name}` at {binding:?}, not `p` at group 0 binding 0"));
                }
                if parsed.spelled(global.ty) != kernel.params.name {
                    faults.push(format!("the uniform is a {}", parsed.spelled(global.ty)));
                }
                let mut found = Vec::new();
                parsed.structs_within(global.ty, &mut found);
                for ty in found {
                    let name = parsed.spelled(ty);
                    match std::iter::once(&kernel.params).chain(structs).find(|t| t.name == name) {
                        Some(table) => parsed.compare_struct(ty, table, &mut faults),
                        None => faults.push(format!("{name} has no table")),
                    }
                }
            }
            AddressSpace::Storage { access } => {
                let access = if access.contains(StorageAccess::STORE) { "read_write" } else { "read" };
                let (group, number) = binding.unwrap_or((u32::MAX, u32::MAX));
                if group != 0 {
                    faults.push(format!("`{name}` is in group {group}"));
                }
                bindings.push(BindingText {
                    name: name.clone(),
                    binding: number,
                    wgsl: parsed.spelled(global.ty),
                    access,
                });
            }
            AddressSpace::WorkGroup => {
                // WebGPU counts each variable in multiples of 16 bytes.
                workgroup_memory += parsed.layouts[global.ty].size.next_multiple_of(16);
            }
            AddressSpace::Private => {}
            other => faults.push(format!("`{name}` in {other:?}")),
        }
        let wanted = match global.space {
            AddressSpace::Storage { access } if access.contains(StorageAccess::STORE) => GlobalUse::WRITE,
            _ => GlobalUse::READ,
        };
        if !used[handle].contains(wanted) {
            faults.push(format!("`{name}` is declared and not used as such"));
        }
    }
    if binds_mods != kernel.binds_mods {
        faults.push(format!("uniform `mods`: {binds_mods} in WGSL, {} in Rust", kernel.binds_mods));
    }
    bindings.sort_by_key(|b| b.binding);
    for n in 0..bindings.len().max(kernel.bindings.len()) {
        let (wgsl, rust) = (bindings.get(n), kernel.bindings.get(n));
        if wgsl != rust {
            faults.push(format!("binding {}: WGSL {wgsl:?}, Rust {rust:?}", n + 1));
        }
    }
    if bindings.len() > MAX_STORAGE_BUFFERS {
        faults.push(format!("{} storage buffers", bindings.len()));
    }
    // The largest tiles need devices with higher limits. plan.rs checks the limits.
    let named = |label, part| kernel.label == label && kernel.name.contains(part);
    let gradients = "attention.fused_backward";
    let large = named("attention.fused", " rows=128 ") || named(gradients, " side=64 ");
    let largest = wgsl::matrix_units(&kernel.wgsl) || large && named(gradients, " chunk=32 ");
    let factor = if largest { 3 } else { 1 + u32::from(large) };
    let most = factor * MAX_WORKGROUP_MEMORY;
    if workgroup_memory != kernel.workgroup_memory || workgroup_memory > most {
        faults.push(format!(
            "workgroup memory: {workgroup_memory} in WGSL, {} in Rust",
            kernel.workgroup_memory
        ));
    }
    faults.extend(mixed_capabilities(&parsed));
    faults.extend(crate::laws::fxc::refused(&parsed.module, &parsed.info));
    faults.extend(crate::laws::tint::refused(&kernel.wgsl));
    if !is_for_software(kernel) {
        faults.extend(indexed_registers(&parsed));
    }
    faults
}

/// Checks the text for parts of a grid. The kernel may use nothing of the grid except the
/// workgroup's index. The text adds the part's first index, which it reads from another binding.
fn faults_of_part(kernel: &KernelText) -> Vec<String> {
    use naga::{Binding, BuiltIn};
    let [whole, part] = match [&kernel.wgsl, &kernel.wgsl_of_part].map(|text| Parsed::new(text)) {
        [Ok(whole), Ok(part)] => [whole, part],
        [Err(e), _] | [_, Err(e)] => return vec![e],
    };
    let asked: Vec<_> = whole.module.entry_points[0].function.arguments.iter().map(|a| &a.binding).collect();
    let asks = |builtin| asked.contains(&&Some(Binding::BuiltIn(builtin)));
    let mut faults = Vec::new();
    if [BuiltIn::GlobalInvocationId, BuiltIn::NumWorkGroups].map(asks).contains(&true) {
        faults.push("it asks how many workgroups a dispatch has, or has invocations numbered over it".into());
    }
    let used = part.info.get_entry_point(0);
    let is_read = |(handle, global): (Handle<naga::GlobalVariable>, &naga::GlobalVariable)| {
        let binding = global.binding.as_ref().map(|b| (b.group, b.binding as usize));
        global.name.as_deref() == Some("first_workgroup")
            && binding == Some((0, kernel.bindings.len() + 1 + usize::from(kernel.binds_mods)))
            && used[handle].contains(GlobalUse::READ)
    };
    if part.module.global_variables.iter().any(is_read) != asks(BuiltIn::WorkGroupId) {
        faults.push("a part's workgroups are not counted from `first_workgroup` on".into());
    }
    faults
}

/// True if no plan for a GPU chooses the kernel. The shader with its loop decides.
fn is_for_software(kernel: &KernelText) -> bool {
    static LOOPS: LazyLock<[String; 6]> = LazyLock::new(|| {
        let loops = [
            "attention/fused/cpu",
            "attention/fused_backward/cpu",
            "attention/decode/cpu",
            "matmul/cpu",
            "attention/softmax/row_per_invocation",
            "selected/indexer/cpu",
        ];
        loops.map(|loop_of| {
            let path = crate::harness::root().join("shaders").join(loop_of).with_extension("wgsl");
            let text = std::fs::read_to_string(path).expect("a readable shader");
            text.lines().next().expect("a first line").to_string()
        })
    });
    LOOPS.iter().any(|line| kernel.wgsl.contains(line.as_str()))
}

/// Finds SPIR-V with both cooperative matrices and subgroup operations, which crashes NVIDIA's
/// compiler (driver 595.58).
fn mixed_capabilities(parsed: &Parsed) -> Option<String> {
    const OP_CAPABILITY: u32 = 17;
    const GROUP_NON_UNIFORM: std::ops::RangeInclusive<u32> = 61..=68;
    const COOPERATIVE_MATRIX: u32 = 6022;
    let options = naga::back::spv::Options::default();
    let words = match naga::back::spv::write_vec(&parsed.module, &parsed.info, &options, None) {
        Ok(words) => words,
        Err(error) => return Some(error.to_string()),
    };
    let mut capabilities = Vec::new();
    // Capabilities follow the header of five words.
    let mut at = 5;
    while at < words.len() && words[at] & 0xffff == OP_CAPABILITY {
        capabilities.push(words[at + 1]);
        at += (words[at] >> 16) as usize;
    }
    let mixed = capabilities.contains(&COOPERATIVE_MATRIX)
        && capabilities.iter().any(|capability| GROUP_NON_UNIFORM.contains(capability));
    mixed.then(|| "cooperative matrices and subgroup operations in one module".into())
}

/// Returns arrays of an invocation with an index that is not a constant. They lie in memory unless
/// the driver unrolls the loop.
fn indexed_registers(parsed: &Parsed) -> Vec<String> {
    let Parsed { module, info, .. } = parsed;
    let functions = module.functions.iter().map(|(handle, function)| (function, &info[handle]));
    let entries = module.entry_points.iter().enumerate().map(|(n, e)| (&e.function, info.get_entry_point(n)));
    functions
        .chain(entries)
        .flat_map(|(function, about)| {
            let is_array = |place: Handle<Expression>| match *about[place].ty.inner_with(&module.types) {
                TypeInner::Pointer { base, .. } => {
                    matches!(module.types[base].inner, TypeInner::Array { .. })
                }
                TypeInner::Array { .. } => true,
                _ => false,
            };
            let is_indexed = |expression: &Expression| match *expression {
                Expression::Access { base, index } => {
                    is_array(base)
                        && is_of_invocation(module, function, base)
                        && !is_constant(function, index)
                }
                _ => false,
            };
            let count = function.expressions.iter().filter(|(_, e)| is_indexed(e)).count();
            let name = function.name.clone().unwrap_or("main".into());
            (count > 0).then(|| format!("{name}: {count} indices into arrays of registers"))
        })
        .collect()
}

/// Returns the base of a place expression, without the accesses.
fn root(function: &Function, mut place: Handle<Expression>) -> &Expression {
    while let Expression::Access { base, .. } | Expression::AccessIndex { base, .. } =
        function.expressions[place]
    {
        place = base;
    }
    &function.expressions[place]
}

fn is_of_invocation(module: &Module, function: &Function, place: Handle<Expression>) -> bool {
    match *root(function, place) {
        Expression::GlobalVariable(variable) => {
            module.global_variables[variable].space == AddressSpace::Private
        }
        // A pointer parameter points to a variable of the invocation.
        _ => true,
    }
}

fn is_constant(function: &Function, index: Handle<Expression>) -> bool {
    match function.expressions[index] {
        Expression::Literal(_) | Expression::Constant(_) | Expression::ZeroValue(_) => true,
        Expression::Binary { left, right, .. } => is_constant(function, left) && is_constant(function, right),
        Expression::Select { condition, accept, reject } => {
            [condition, accept, reject].into_iter().all(|part| is_constant(function, part))
        }
        Expression::Math { arg, arg1, .. } => {
            is_constant(function, arg) && arg1.is_none_or(|arg1| is_constant(function, arg1))
        }
        _ => false,
    }
}

/// Checks the first kernel of each label, and an eighth of the others.
#[test]
fn kernels_match_host_descriptions() {
    let mut labels = HashSet::new();
    let kernels: Vec<_> = kernels()
        .into_iter()
        .filter(|kernel| labels.insert(kernel.label) | due(&kernel.name) || rest(&kernel.name))
        .collect();
    let structs = shared_structs();
    // Each fault is listed once, with one kernel that has it.
    let mut bad: BTreeMap<(&str, String), (usize, &str)> = BTreeMap::new();
    for kernel in &kernels {
        for fault in faults(kernel, &structs) {
            bad.entry((kernel.label, fault)).or_insert((0, &kernel.name)).0 += 1;
        }
    }
    let lines: String = bad
        .iter()
        .map(|((_, fault), (count, name))| format!("{fault}: {count} kernels, as {name}\n"))
        .collect();
    assert!(lines.is_empty(), "of {} kernels:\n{lines}", kernels.len());
}

#[test]
fn grid_parts_count_from_first_workgroup() {
    let mut seen = HashSet::new();
    let kernels = kernels();
    // Parts have another beginning of the entry function. The rest of the text is equal.
    let entry = |kernel: &KernelText| {
        let text = kernel.wgsl.split_once("@compute").expect("an entry point").1;
        text.split_once('{').expect("a body").0.to_string()
    };
    let different: Vec<_> = kernels.iter().filter(|k| seen.insert((k.label, entry(k)))).collect();
    assert!(different.len() >= 80, "{}", different.len());
    for kernel in different {
        let faults = faults_of_part(kernel);
        assert!(faults.is_empty(), "{}: {faults:?}", kernel.name);
    }
    let mut wrong = kernels.into_iter().find(|k| k.label == "attention.rotate").expect("a kernel");
    wrong.wgsl_of_part = wrong.wgsl.clone();
    assert_eq!(faults_of_part(&wrong), ["a part's workgroups are not counted from `first_workgroup` on"]);
}

#[test]
fn kernel_names_are_unique() {
    let kernels = kernels();
    let names: HashSet<_> = kernels.iter().map(|k| &k.name).collect();
    assert_eq!(names.len(), kernels.len());
    let texts: HashSet<_> = kernels.iter().map(|k| &k.wgsl).collect();
    println!("{} different texts", texts.len());
    let mut shown: Vec<_> = kernels.iter().map(|k| k.name.len()).collect();
    shown.sort_unstable();
    assert!(shown.last().is_some_and(|longest| *longest <= 250), "a name and `.wgsl` must do for a file");
}

/// Returns every shader file with its text.
fn shaders() -> Vec<(PathBuf, String)> {
    let (mut found, mut folders) = (Vec::new(), vec![crate::harness::root().join("shaders")]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("the shaders are there") {
            let path = entry.expect("a readable folder").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let text = std::fs::read_to_string(&path).expect("a readable shader");
                found.push((path, text));
            }
        }
    }
    found
}

/// The tests of this file would miss a shader that no listed kernel contains.
#[test]
fn every_shader_file_is_in_a_kernel() {
    let kernels = kernels();
    let mut stems: HashSet<_> = kernels.iter().filter_map(|k| k.label.strip_prefix("attention.")).collect();
    let labels = stems.len();
    let mut files = BTreeMap::new();
    for (path, text) in shaders() {
        stems.remove(path.file_stem().and_then(|s| s.to_str()).unwrap_or_default());
        // Only the text before an unrolled loop, which kernels may contain in expanded form.
        files.insert(path, text.split("/* unrolled */").next().unwrap_or_default().to_string());
    }
    assert!(stems.is_empty(), "kernels without a file of their name: {stems:?}");
    assert!(files.len() >= labels);
    // Searches the first kernel of each label, then the second of each. Few files occur only in a
    // rare variant.
    let mut nth = HashMap::new();
    let mut in_turn: Vec<_> =
        kernels.iter().map(|k| (*nth.entry(k.label).and_modify(|n| *n += 1).or_insert(0), k)).collect();
    in_turn.sort_by_key(|(nth, _)| *nth);
    for (_, kernel) in in_turn {
        if files.is_empty() {
            break;
        }
        files.retain(|_, text| !kernel.wgsl.contains(text.as_str()));
    }
    assert!(files.is_empty(), "in no kernel: {:?}", files.keys());
}

/// The harness checks every kernel that a test's device compiles (`Profile::tidy`).
#[test]
fn unlisted_kernels_are_reported() {
    let listed = kernels();
    assert!(listed.iter().all(|kernel| unlisted(&kernel.name).is_empty()));
    let is_tile =
        |name: &&str| name.starts_with("attention.fused q=F32") && name.contains("tiles=Gpu rows=64");
    let name = listed.iter().map(|k| k.name.as_str()).find(is_tile);
    let name = name.expect("such a kernel");
    assert_eq!(unlisted(&name.replace("rows=64", "rows=63")), []);
    let of = |word: &str| ("attention.fused".to_string(), word.to_string());
    assert_eq!(unlisted(&name.replace("out=F32", "out=Q8")), [of("out=Q8")]);
    assert_eq!(unlisted(&format!("{name} mirrored")), [of("mirrored")]);
    assert_eq!(unlisted("attention.other dtype=F32").len(), 1);
}

/// The comparison must be able to fail.
#[test]
fn a_wrong_table_is_reported() {
    let kernels = kernels();
    let kernel = kernels
        .iter()
        .find(|k| k.label == "attention.softmax" && k.workgroup_memory > 0 && k.bindings.len() > 3)
        .expect("a softmax with workgroup memory and a mask");
    let structs = shared_structs();
    assert_eq!(faults(kernel, &structs), Vec::<String>::new());

    type Change = fn(&mut KernelText, &mut Vec<StructTable>);
    let changes: [(&str, Change); 21] = [
        ("member 1", |k, _| k.params.fields[1].name = "other"),
        ("member 2", |k, _| k.params.fields[2].offset += 4),
        ("member 4", |k, _| k.params.fields[4].wgsl = "vec2<f32>"),
        ("member", |k, _| k.params.fields.truncate(5)),
        ("member 0", |k, _| k.params.fields.swap(0, 1)),
        ("bytes in WGSL", |k, _| k.params.bytes += 16),
        ("is a Params", |k, _| k.params.name = "Other"),
        ("View member 1", |_, s| s[0].fields[1].offset = 20),
        ("View: 32 bytes", |_, s| s[0].bytes = 20),
        ("MaskParams member 4", |_, s| s[1].fields[4].wgsl = "u32"),
        ("MaskParams has no table", |_, s| s.retain(|t| t.name != "MaskParams")),
        ("binding 1", |k, _| k.bindings[0].name = "other".into()),
        ("binding 1", |k, _| k.bindings[0].access = "read"),
        ("binding 2", |k, _| k.bindings[1].wgsl = "array<f16>".into()),
        ("binding 3", |k, _| k.bindings[2].binding = 7),
        ("binding", |k, _| k.bindings.truncate(2)),
        ("invocations", |k, _| k.invocations /= 2),
        ("workgroup memory", |k, _| k.workgroup_memory += 16),
        ("is declared and not used", |k, _| k.wgsl += "@group(0) @binding(9) var<storage> x: array<u32>;\n"),
        ("entry points", |k, _| k.wgsl += "@compute @workgroup_size(1) fn other() {}\n"),
        ("error", |k, _| k.wgsl += "fn broken() -> u32 { return 1.0; }\n"),
    ];
    for (expected, change) in changes {
        let (mut kernel, mut structs) = (kernel.clone(), structs.clone());
        change(&mut kernel, &mut structs);
        let found = faults(&kernel, &structs);
        assert!(found.iter().any(|f| f.contains(expected)), "`{expected}` is not among {found:?}");
    }
}

/// Returns the names after `kind` in a snippet's header, up to the next such line.
fn header_names(text: &str, kind: &str) -> Option<Vec<String>> {
    let header = text.lines().map_while(|line| line.strip_prefix("//")).collect::<Vec<_>>().join("\n");
    let (_, list) = header.split_once(&format!("\n {kind}: "))?;
    let list = &list[..=list.find(".\n").unwrap_or(list.rfind('.')?)];
    let names = list.split([',', ';', '\n', ' ']).map(|name| name.trim_end_matches('.'));
    Some(names.filter(|name| !name.is_empty() && *name != "nothing").map(str::to_string).collect())
}

/// Returns the words of WGSL without its comments. A `.` belongs to a word, so that members are not
/// names.
fn words(text: &str) -> HashSet<&str> {
    let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    code.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '.')).collect()
}

/// Returns the names that a file declares outside functions.
fn declared(text: &str) -> HashSet<&str> {
    let kinds = ["const ", "fn ", "struct ", "alias ", "var<workgroup> ", "var<private> "];
    let names = text.lines().filter_map(|line| kinds.iter().find_map(|kind| line.strip_prefix(kind)));
    names.filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()).collect()
}

/// The header of every shared snippet lists the names that it needs and the names that it gives.
#[test]
fn snippet_headers_list_their_names() {
    let kernels = kernels();
    let stems: HashSet<_> = kernels.iter().filter_map(|k| k.label.strip_prefix("attention.")).collect();
    let is_piece =
        |path: &PathBuf| !path.file_stem().is_some_and(|s| stems.contains(s.to_str().unwrap_or("")));
    let pieces: Vec<_> = shaders().into_iter().filter(|(path, _)| is_piece(path)).collect();
    // Then the stem of a file tells if it belongs to one kernel.
    assert!(pieces.len() + stems.len() == shaders().len(), "two files have the name of one kernel");
    let pieces: Vec<_> = pieces.into_iter().map(|(path, text)| (path.display().to_string(), text)).collect();
    let functions: HashSet<_> = pieces
        .iter()
        .flat_map(|(_, text)| text.lines().filter_map(|line| line.strip_prefix("fn ")?.split('(').next()))
        .collect();
    let mut faults = Vec::new();
    for (path, text) in &pieces {
        let (Some(needs), Some(gives)) = (header_names(text, "Needs"), header_names(text, "Gives")) else {
            faults.push(format!("{path}: the header lacks `Needs: ….` or `Gives: ….`"));
            continue;
        };
        let (own, used) = (declared(text), words(text));
        for name in &gives {
            if !own.contains(name.as_str()) {
                faults.push(format!("{path} gives {name} and does not declare it"));
            }
        }
        for name in &needs {
            let member = format!("{name}.");
            if own.contains(name.as_str()) || !used.iter().any(|w| w == name || w.starts_with(&member)) {
                faults.push(format!("{path} needs {name}, which it declares itself or does not use"));
            }
        }
        let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
        for call in code.flat_map(|line| line.match_indices('(').map(move |(at, _)| &line[..at])) {
            let name = call.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
            if functions.contains(name) && !own.contains(name) && !needs.iter().any(|need| need == name) {
                faults.push(format!("{path} calls {name}, which is not under `Needs`"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(pieces.len() > 30, "{} pieces", pieces.len());
}
