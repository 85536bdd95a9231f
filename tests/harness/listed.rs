//! What was compiled: whether `inspect::kernels`, which compilers are shown, has it, and their
//! names.

use std::collections::HashSet;
use std::io::Write;
use std::sync::LazyLock;

use wgpu_attention::Pipelines;
use wgpu_attention::inspect::{compiled, kernels};

/// A kernel and one of the words of its name.
type Axis = (String, String);

/// The values of a kernel's axes in its name, but for those that are sizes, of which there are too
/// many.
fn axes(name: &str) -> impl Iterator<Item = Axis> {
    let mut words = name.split(' ');
    let label = words.next().unwrap_or_default();
    let is_size =
        |word: &&str| word.split_once('=').is_some_and(|(_, v)| !v.starts_with(char::is_alphabetic));
    words.filter(move |word| !is_size(word)).map(move |word| (label.to_string(), word.to_string()))
}

/// Those that no listed kernel has.
pub fn unlisted(name: &str) -> Vec<Axis> {
    static LISTED: LazyLock<HashSet<Axis>> =
        LazyLock::new(|| kernels().iter().flat_map(|kernel| axes(&kernel.name)).collect());
    axes(name).filter(|axis| !LISTED.contains(axis)).collect()
}

/// Writes what `pipelines` has compiled to the end of the file `WGPU_ATTENTION_TEST_KERNELS`, a
/// line for each kernel, which may be there already; nothing where no file is named.
pub fn write(pipelines: &Pipelines) {
    let Some(path) = std::env::var_os("WGPU_ATTENTION_TEST_KERNELS") else { return };
    let lines: String = compiled(pipelines).iter().map(|name| format!("{name}\n")).collect();
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    if let Err(e) = file.and_then(|mut file| file.write_all(lines.as_bytes())) {
        super::say(&format!("WGPU_ATTENTION_TEST_KERNELS: {e}"));
    }
}

/// Panics if a kernel was compiled that has a value of an axis which no listed one has.
pub fn check(pipelines: &Pipelines) {
    for name in compiled(pipelines) {
        let unlisted = unlisted(&name);
        assert!(unlisted.is_empty(), "inspect::kernels lists none with {unlisted:?}, as {name} has");
    }
}
