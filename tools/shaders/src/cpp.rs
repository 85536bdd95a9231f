//! Checks naga's MSL with a C++ compiler: syntax, names and types, against the declarations in
//! `metal/metal_stdlib`. MSL is C++ with address spaces, which this check ignores, and with a
//! library. The declarations are a part of the library. Only Metal's compiler can show that a
//! kernel compiles.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::verdict::Verdict;

/// Checks the MSL files at `paths` in one process. `scratch` is a file to write.
pub fn check(compiler: &str, paths: &[PathBuf], scratch: &Path) -> Vec<Verdict> {
    match messages(compiler, paths, scratch) {
        Ok(messages) => paths.iter().map(|path| verdict(&messages, path)).collect(),
        Err(why) => vec![Verdict::Rejected(why.to_string()); paths.len()],
    }
}

fn messages(compiler: &str, paths: &[PathBuf], scratch: &Path) -> io::Result<String> {
    // A namespace holds the names of a kernel, so that the next kernel cannot see them.
    let include = |(n, path): (usize, &PathBuf)| {
        format!("namespace kernel{n} {{\n#include \"{}\"\n}}\n", path.display())
    };
    let text = paths.iter().enumerate().map(include).collect::<String>();
    std::fs::write(scratch, format!("#include <metal_stdlib>\n#include <simd/simd.h>\n{text}"))?;
    let declarations = Path::new(env!("CARGO_MANIFEST_DIR")).join("metal");
    let mut command = Command::new(compiler);
    // MSL has no doubles: a literal without a suffix is a float.
    command.args(["-x", "c++", "-std=c++17", "-fsyntax-only", "-fsingle-precision-constant", "-w"]);
    command.args(["-fmax-errors=0", "-fdiagnostics-color=never"]).arg("-I").arg(declarations).arg(scratch);
    let run = command.env("LC_ALL", "C").output()?;
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    let is_about_kernels = paths.iter().any(|path| verdict(&said, path) != Verdict::Accepted);
    if run.status.success() || is_about_kernels {
        Ok(said)
    } else {
        Err(io::Error::other(format!("{}: {said}", run.status)))
    }
}

/// The first error in the file at `path`.
fn verdict(messages: &str, path: &Path) -> Verdict {
    let start = format!("{}:", path.display());
    let errors = messages.lines().filter_map(|line| line.strip_prefix(&start));
    let mut errors = errors.filter(|line| line.contains(" error: "));
    errors.next().map_or(Verdict::Accepted, |error| Verdict::Rejected(format!("line {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_belong_to_their_files() {
        let said = "In file included from all.cpp:3:\n1.metal: In function 'void kernel0::f()':\n\
                    1.metal:7:9: error: no match for 'operator+'\n1.metal:8:9: error: other\n\
                    11.metal:2:1: warning: unused\nmetal_stdlib:20:1: error: elsewhere\n";
        let why = "line 7:9: error: no match for 'operator+'";
        assert_eq!(verdict(said, Path::new("1.metal")), Verdict::Rejected(why.into()));
        assert_eq!(verdict(said, Path::new("11.metal")), Verdict::Accepted);
    }

    #[test]
    fn msl_errors_are_found() {
        if Command::new("g++").arg("--version").output().is_err() {
            return println!("skipped: there is no g++");
        }
        let wgsl = "@group(0) @binding(0) var<storage, read_write> out: array<vec4<f32>>;\n\
                    @compute @workgroup_size(8) fn main(@builtin(local_invocation_index) n: u32) {\n\
                    out[n] = max(out[n].wzyx * 2.0, vec4<f32>(out[0].xy, 0.5, f32(n))); }";
        let right = crate::translate::msl_text(wgsl).unwrap();
        let texts = [
            (right.clone(), true),
            (right.replace("metal::max(", "metal::most("), false),
            (right.replace(".wzyx", ".wzy"), false),
            (right.replace("0.5", "0.5, 0.5"), false),
            (right.replacen(';', "", 1), false),
        ];
        let folder = std::env::temp_dir().join(format!("msl_errors_are_found-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (n, (text, is_right)) in texts.iter().enumerate() {
            let path = folder.join(format!("{n}.metal"));
            std::fs::write(&path, text).unwrap();
            let verdicts = check("g++", &[path], &folder.join("all.cpp"));
            assert_eq!(verdicts[0] == Verdict::Accepted, *is_right, "{verdicts:?}: {text}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
