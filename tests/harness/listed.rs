//! Compiled kernels: their names, and a check that the list `inspect::kernels`, which compilers are
//! tested with, contains them.

use std::collections::HashSet;
use std::io::Write;
use std::sync::LazyLock;

use wgpu_attention::Pipelines;
use wgpu_attention::inspect::{compiled, kernels};

/// A kernel and one of the words of its name.
type Axis = (String, String);

/// Returns the values of a kernel's axes in its name, except sizes, which have too many values.
fn axes(name: &str) -> impl Iterator<Item = Axis> {
    let mut words = name.split(' ');
    let label = words.next().unwrap_or_default();
    let is_size =
        |word: &&str| word.split_once('=').is_some_and(|(_, v)| !v.starts_with(char::is_alphabetic));
    words.filter(move |word| !is_size(word)).map(move |word| (label.to_string(), word.to_string()))
}

/// Returns the axes that no listed kernel has.
pub fn unlisted(name: &str) -> Vec<Axis> {
    static LISTED: LazyLock<HashSet<Axis>> =
        LazyLock::new(|| kernels().iter().flat_map(|kernel| axes(&kernel.name)).collect());
    axes(name).filter(|axis| !LISTED.contains(axis)).collect()
}

/// Appends the compiled kernels of `pipelines` to the file `WGPU_ATTENTION_TEST_KERNELS`, a line
/// for each kernel. Duplicates may occur. Without a file name it writes nothing.
pub fn write(pipelines: &Pipelines) {
    let Some(path) = std::env::var_os("WGPU_ATTENTION_TEST_KERNELS") else { return };
    let lines: String = compiled(pipelines).iter().map(|name| format!("{name}\n")).collect();
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    if let Err(e) = file.and_then(|mut file| file.write_all(lines.as_bytes())) {
        super::say(&format!("WGPU_ATTENTION_TEST_KERNELS: {e}"));
    }
}

/// Panics if a compiled kernel has a value of an axis that no listed kernel has.
pub fn check(pipelines: &Pipelines) {
    for name in compiled(pipelines) {
        let unlisted = unlisted(&name);
        assert!(unlisted.is_empty(), "inspect::kernels lists none with {unlisted:?}, as {name} has");
    }
}
