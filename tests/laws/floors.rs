//! The library's folders form five floors. A folder imports only from floors below, and no imports
//! form a cycle.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The floors from top to bottom. A folder imports from floors below, and on its own floor from
/// folders to the right.
const FLOORS: [&[&str]; 5] = [
    // Programs over operators: tuning, checks, slices in and a `Vec` out, and the reference as one
    // module.
    &["tune", "check", "gpu", "presets", "reference", "inspect", "agreement", "kernel_list"],
    // Layers of models.
    &["layers"],
    // Attention, and its variants.
    &["additive", "linformer", "lsh", "local", "recurrent", "linear_attention", "selected", "attention"],
    // Operators that attention and layers use.
    &["rows", "matmul", "mask", "cache", "position"],
    // The base, which knows no operator.
    &["kernel", "tensor", "device"],
];

/// Files named `plan.rs`, and files in folders `plan`, use neither devices nor tensors.
const NO_DEVICES: [&str; 2] = ["wgpu::", "TensorView"];

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../src")
}

/// Collects the files below `folder`, each with its path from `src`.
fn files(folder: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in std::fs::read_dir(folder).expect("a folder of the library") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let code = std::fs::read_to_string(&path).expect("a file of the library");
            let code: Vec<&str> = code.lines().filter(|l| !l.trim_start().starts_with("//")).collect();
            let name = path.strip_prefix(source()).expect("below src").to_path_buf();
            found.push((name, code.join("\n")));
        }
    }
}

fn library() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    files(&source(), &mut found);
    assert!(found.len() > 50, "{} files", found.len());
    found
}

/// Returns the first name of every path in `code` that begins with `root`. For `root::{a::b, c}` it
/// returns all names.
fn names(code: &str, root: &str) -> BTreeSet<String> {
    let word = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices(root) {
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
            continue;
        }
        let rest = &code[at + root.len()..];
        let Some(list) = rest.strip_prefix('{') else {
            names.insert(word(rest));
            continue;
        };
        let (mut depth, mut start) = (0, true);
        for (n, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => start = true,
                c if start && !c.is_whitespace() => {
                    names.insert(word(&list[n..]));
                    start = false;
                }
                _ => {}
            }
        }
    }
    names
}

/// Returns the top module of a file's path.
fn module(file: &Path) -> String {
    let first = file.components().next().expect("a path").as_os_str().to_string_lossy();
    first.trim_end_matches(".rs").to_string()
}

#[test]
fn import_names_are_found() {
    let code = "use crate::a::B;\nuse crate::{c::{D, E}, f};\nlet x = crate::g::h(othercrate::i::J);";
    assert_eq!(names(code, "crate::").into_iter().collect::<Vec<_>>(), ["a", "c", "f", "g"]);
}

#[test]
fn modules_import_from_below() {
    let folders: Vec<&str> = FLOORS.into_iter().flatten().copied().collect();
    let place = |name: &str| folders.iter().position(|m| *m == name);
    let mut wrong = Vec::new();
    for (file, code) in library() {
        let own = module(&file);
        if own == "lib" {
            continue;
        }
        let Some(own_place) = place(&own) else {
            wrong.push(format!("{own} has no floor in tests/laws/floors.rs"));
            continue;
        };
        for name in names(&code, "crate::") {
            match place(&name) {
                Some(other) if other > own_place || name == own => {}
                Some(_) => wrong.push(format!("{} imports {name}, which stands above it", file.display())),
                None => {}
            }
        }
        if file.components().any(|part| matches!(part.as_os_str().to_str(), Some("plan" | "plan.rs"))) {
            let seen = NO_DEVICES.iter().filter(|name| code.contains(**name));
            wrong.extend(seen.map(|name| format!("{} names {name}", file.display())));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A kernel's shader lies in the folder of its operator: `src/rows/norm/kernels/norm_sums.rs` has
/// `shaders/rows/norm/norm_sums.wgsl`.
#[test]
fn shaders_lie_in_the_folders_of_their_kernels() {
    let mut kernels = 0;
    for (file, code) in library() {
        let Some(label) = code.split("const LABEL: &'static str = \"attention.").nth(1) else { continue };
        let stem = label.split('"').next().expect("a label");
        let folder = file.ancestors().find(|f| f.ends_with("kernels")).and_then(Path::parent);
        let folder = folder.unwrap_or_else(|| panic!("{} lies in no folder `kernels`", file.display()));
        let shader = source().join("../shaders").join(folder).join(format!("{stem}.wgsl"));
        assert!(
            shader.is_file(),
            "{} declares attention.{stem}, {} is not there",
            file.display(),
            shader.display()
        );
        kernels += 1;
    }
    assert!(kernels > 80, "{kernels} kernels");
}

/// The files of a folder import each other without a cycle. The test leaves out `mod.rs`, which
/// imports them or is imported by them.
#[test]
fn folders_have_no_import_cycles() {
    let mut folders: BTreeMap<PathBuf, BTreeMap<String, String>> = BTreeMap::new();
    for (file, code) in library() {
        let folder = file.parent().expect("a folder").to_path_buf();
        let stem = file.file_stem().expect("a stem").to_string_lossy().into_owned();
        if folder != Path::new("") && stem != "mod" {
            folders.entry(folder).or_default().insert(stem, code);
        }
    }
    assert!(folders.len() > 5, "{folders:?}");
    for (folder, mut files) in folders {
        let inside = format!("crate::{}::", folder.display());
        // Repeatedly removes the files that import none of the others.
        loop {
            let left: BTreeSet<String> = files.keys().cloned().collect();
            let free: Vec<String> = files
                .iter()
                .filter(|(stem, code)| {
                    let mut named = names(code, "super::");
                    named.extend(names(code, &inside));
                    named.remove(*stem);
                    named.is_disjoint(&left)
                })
                .map(|(stem, _)| stem.clone())
                .collect();
            if free.is_empty() {
                break;
            }
            free.iter().for_each(|stem| drop(files.remove(stem)));
        }
        assert!(files.is_empty(), "{}: a circle among {:?}", folder.display(), files.keys());
    }
}
