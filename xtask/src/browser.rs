//! `scripts/browser`: the small cases, or the doctor, as a program for browsers, in two runtimes.

use std::env;
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{self, ScopedJoinHandle};

use crate::error::{At, Result, failed, refused};
use crate::gpu::{self, Setup};
use crate::repo::{Repo, executables};
use crate::{dawn, files, process};

const USAGE: &str = "\
scripts/browser [WORD...]: the small cases of the tests (tests/small) as a WebAssembly program, all or those with one
of the words in their names, in two runtimes; with a word as 1/2 every second case, each in one of the two:

  chromium   headless, on SwiftShader (no f16)
  node       on Dawn, Chromium's WebGPU, over the Vulkan driver of scripts/gpu (f16)

scripts/browser --doctor [chromium|node] [--quick] [> PAGE.md]: what `cargo run --example doctor` prints about a
device, of the one that such a runtime gives, or both; --quick leaves out times and rates.

Prints what was skipped and what failed by name, then a table. Fails if the program does not build, or a case
fails, panics or does not end. What is needed and cannot be had is skipped, in a line that begins with \"skipped:\".

Everything is fetched into target, nothing is installed: the standard library for wasm32 with rustup, unless
the toolchain has it; wasm-bindgen from crates.io; Chromium with apt-get, unless there is one; Dawn with npm.
";

pub const TRIPLE: &str = "wasm32-unknown-unknown";

/// Installed ones that will do.
const CHROMIUMS: [&str; 3] = ["chromium", "chromium-headless-shell", "google-chrome"];

/// Compiled faster.
const CHEAP: [&str; 4] = ["--config", "profile.dev.debug=false", "--config", "profile.dev.incremental=false"];

pub fn main(repo: &Repo, words: Vec<OsString>) -> Result {
    if words.iter().any(|word| word == "-h" || word == "--help") {
        print!("{USAGE}");
        return Ok(());
    }
    let job = Job::of(words)?;
    let folder = repo.folder("browser")?;
    let log = Log::new(folder.join("log"))?;
    if !process::have(&["node"]) {
        log.skip("chromium and node: there is no node");
        return Ok(());
    }
    let Some(toolchain) = Toolchain::get(repo, TRIPLE, &log)? else { return Ok(()) };

    // The runtimes, while the program compiles.
    let [log_chromium, log_dawn] = ["log.chromium", "log.dawn"].map(|name| Log::new(folder.join(name)));
    let (log_chromium, log_dawn) = (log_chromium?, log_dawn?);
    let (program, chromium, dawn) = thread::scope(|scope| {
        let chromium = job.chromium.then(|| scope.spawn(|| get_chromium(&folder, &log_chromium)));
        let dawn = job.node.then(|| scope.spawn(|| get_dawn(repo, &folder, &log_dawn)));
        let program = build(repo, &folder, &toolchain, if job.doctor { DOCTOR } else { CASES });
        (program, chromium.map(ScopedJoinHandle::join), dawn.map(ScopedJoinHandle::join))
    });
    program?;

    let mut node = Command::new("node");
    node.current_dir(&repo.root).arg("tests/browser/run.mjs").arg(&folder);
    let mut runtimes = 0;
    match chromium {
        None => {}
        Some(Ok(Ok(()))) => {
            node.arg(joined("chromium=", &folder.join("chromium")));
            runtimes += 1;
        }
        Some(_) => log_chromium.skip("chromium: neither here nor from apt-get"),
    }
    match dawn {
        None => {}
        Some(Ok(Ok(()))) => match gpu::setup(repo) {
            Ok(setup) => {
                use_driver(&setup, &mut node, job.doctor);
                runtimes += 1;
            }
            Err(error) => {
                log.note(&format!("scripts/gpu: {error}"));
                log.skip("node: no Vulkan driver");
            }
        },
        Some(_) => log_dawn.skip("node: npm cannot fetch Dawn"),
    }
    if runtimes == 0 { Ok(()) } else { process::run(node.args(job.words)) }
}

/// What is to be run, and where.
#[derive(Debug, PartialEq)]
struct Job {
    /// The doctor, not the cases.
    doctor: bool,
    chromium: bool,
    node: bool,
    /// For run.mjs.
    words: Vec<OsString>,
}

impl Job {
    fn of(mut words: Vec<OsString>) -> Result<Self> {
        if words.first().is_none_or(|word| word != "--doctor") {
            return Ok(Job { doctor: false, chromium: true, node: true, words });
        }
        let [chromium, node] = ["chromium", "node"].map(|name| words.iter().any(|word| word == name));
        words.retain(|word| word != "chromium" && word != "node");
        match words.iter().find(|word| *word != "--doctor" && *word != "--quick") {
            Some(word) => {
                Err(refused(format!("--doctor knows no {}; --help says what it knows", word.display())))
            }
            None => Ok(Job { doctor: true, chromium: chromium || !node, node: node || !chromium, words }),
        }
    }
}

fn use_driver(setup: &Setup, node: &mut Command, timed: bool) {
    setup.apply(node);
    if !timed && env::var_os("GALLIVM_PERF").is_none() {
        // lavapipe: compile in half the time
        node.env("GALLIVM_PERF", "nopt");
    }
    node.arg(joined("node=", setup.runner().unwrap_or(Path::new(""))));
}

pub fn joined(start: &str, path: &Path) -> OsString {
    let mut text = OsString::from(start);
    text.push(path);
    text
}

/// A file for what programs say.
pub struct Log(PathBuf);

impl Log {
    pub fn new(path: PathBuf) -> Result<Self> {
        fs::write(&path, "").at(&path)?;
        Ok(Log(path))
    }

    pub fn stream(&self) -> Stdio {
        OpenOptions::new().append(true).open(&self.0).map_or_else(|_| Stdio::null(), Stdio::from)
    }

    pub fn note(&self, text: &str) {
        use std::io::Write;
        let _ = OpenOptions::new().append(true).open(&self.0).and_then(|mut file| writeln!(file, "{text}"));
    }

    pub fn skip(&self, why: &str) {
        println!("skipped: {why} (log: {})", self.0.display());
    }

    /// Whether `command`, which says into the log what it says, succeeds.
    fn run(&self, command: &mut Command) -> bool {
        let status = command.stdin(Stdio::null()).stdout(self.stream()).stderr(self.stream()).status();
        status
            .inspect_err(|error| self.note(&format!("{}: {error}", command.get_program().display())))
            .is_ok_and(|s| s.success())
    }

    fn must(&self, command: &mut Command) -> Result {
        if self.run(command) { Ok(()) } else { Err(failed(command.get_program().display())) }
    }
}

/// One that has the standard library of a target.
pub struct Toolchain(Vec<(&'static str, OsString)>);

impl Toolchain {
    /// This one, or one of the same version with the target, fetched; None if that cannot be, which is said.
    pub fn get(repo: &Repo, target: &str, log: &Log) -> Result<Option<Self>> {
        let rustc = |arguments: &[&str]| {
            process::output(Command::new("rustc").current_dir(&repo.root).args(arguments))
        };
        let library = rustc(&["--print", "target-libdir", "--target", target])?;
        if Path::new(library.trim()).is_dir() {
            return Ok(Some(Toolchain(Vec::new())));
        }
        let version = rustc(&["--version"])?;
        let version = version.split_whitespace().nth(1).unwrap_or_default();
        let home = repo.folder("rustup")?;
        let mut rustup = Command::new("rustup");
        rustup.args([
            "toolchain",
            "install",
            version,
            "--profile",
            "minimal",
            "--target",
            target,
            "--no-self-update",
        ]);
        rustup.env("RUSTUP_HOME", &home).stdout(log.stream()).stderr(log.stream());
        let limit = std::time::Duration::from_secs(120);
        if !matches!(process::within(limit, &mut rustup), Ok(process::Outcome::Ok)) {
            log.skip(&format!("rustup cannot fetch the standard library of Rust {version} for {target}"));
            return Ok(None);
        }
        Ok(Some(Toolchain(vec![("RUSTUP_HOME", home.into()), ("RUSTUP_TOOLCHAIN", version.into())])))
    }

    /// What cargo needs in the environment to use it.
    pub fn variables(&self) -> impl Iterator<Item = (&'static str, OsString)> {
        self.0.iter().cloned()
    }

    fn cargo(&self, repo: &Repo) -> Command {
        let mut cargo = repo.cargo();
        cargo.arg("build").args(CHEAP).envs(self.variables());
        cargo
    }
}

/// What cargo builds, and the folder that it goes to.
pub struct Program {
    pub cargo: &'static [&'static str],
    pub place: &'static str,
}

const CASES: Program = Program { cargo: &["--test", "browser"], place: "program" };
const DOCTOR: Program = Program { cargo: &["--example", "doctor"], place: "doctor" };

/// The program, and wasm-bindgen's part of it by a tool of the same version.
pub fn build(repo: &Repo, folder: &Path, toolchain: &Toolchain, program: Program) -> Result {
    let Program { cargo: arguments, place } = program;
    let tool = folder.join("bindgen");
    fs::create_dir_all(&tool).at(&tool)?;
    let manifest = tool.join("Cargo.toml");
    let lock = repo.root.join("Cargo.lock");
    let version = version_of("wasm-bindgen", &fs::read_to_string(&lock).at(&lock)?)
        .ok_or_else(|| failed("Cargo.lock names no wasm-bindgen"))?;
    fs::write(&manifest, bindgen_manifest(&version, &repo.root)).at(&manifest)?;
    let mut cargo = toolchain.cargo(repo);
    cargo.args(["--quiet", "--manifest-path"]).arg(&manifest).arg("--target-dir").arg(&tool);
    let mut bindgen = cargo.spawn()?;

    let mut cargo = toolchain.cargo(repo);
    cargo.args(["--locked", "--target", TRIPLE, "--config", "profile.dev.opt-level=1"]).args(arguments);
    let built = process::output(cargo.args(["--message-format", "json-render-diagnostics"]));
    let status = bindgen.wait()?;
    let messages = built?;
    if !status.success() {
        return Err(crate::error::ended(status));
    }
    let (_, program) = executables(&messages)
        .pop()
        .ok_or_else(|| failed(format!("cargo made no program of {}", arguments.join(" "))))?;
    process::run(Command::new(tool.join("debug/bindgen")).arg(program).arg(folder.join(place)))
}

fn bindgen_manifest(version: &str, root: &Path) -> String {
    let path = root.join("tests/browser/bindgen.rs");
    format!(
        r#"[package]
name = "bindgen"
version = "{version}"
edition = "2024"
rust-version = "1.95"

[[bin]]
name = "bindgen"
path = {path:?}

[dependencies]
wasm-bindgen-cli-support = "={version}"

[workspace]
"#
    )
}

/// Of a package in a `Cargo.lock`.
fn version_of(name: &str, lock: &str) -> Option<String> {
    let (_, rest) = lock.split_once(&format!("\nname = \"{name}\"\nversion = \""))?;
    Some(rest.split_once('"')?.0.into())
}

fn get_dawn(repo: &Repo, folder: &Path, log: &Log) -> Result {
    let dawn = dawn::fetch(repo, || log.stream()).inspect_err(|error| log.note(&error.text))?;
    link(&dawn, &folder.join("dawn"))
}

/// An installed one, or Debian's, unpacked, as `chromium` in `folder`.
pub fn get_chromium(folder: &Path, log: &Log) -> Result {
    let program = folder.join("chromium");
    if program.exists() {
        return Ok(());
    }
    if let Some(installed) = CHROMIUMS.iter().find_map(process::find) {
        return link(&installed, &program);
    }
    if !process::have(&["apt-get", "dpkg-deb"]) {
        return Err(failed("no apt-get"));
    }
    let (lists, root) = (folder.join("apt"), folder.join("root"));
    files::remove_all(&lists)?;
    files::remove_all(&root)?;
    for path in [lists.join("lists/partial"), lists.join("archives/partial"), root.clone()] {
        fs::create_dir_all(&path).at(&path)?;
    }
    let apt = |arguments: &[&str]| {
        let mut apt = Command::new("apt-get");
        apt.args(["-q", "-y"]);
        let own = [("State::Lists", "lists"), ("Cache", ""), ("Cache::Archives", "archives")];
        for (name, below) in own {
            apt.arg("-o").arg(joined(&format!("Dir::{name}="), &lists.join(below)));
        }
        for option in ["Debug::NoLocking=1", "APT::Sandbox::User=root", "Acquire::Languages=none"] {
            apt.args(["-o", option]);
        }
        apt.args(arguments);
        apt
    };
    // One bad source must not matter.
    log.run(&mut apt(&["update"]));
    log.must(&mut apt(&[
        "install",
        "--download-only",
        "--no-install-recommends",
        "chromium-headless-shell",
    ]))?;
    for deb in files::ending(&lists.join("archives"), ".deb") {
        log.must(Command::new("dpkg-deb").arg("-x").arg(deb).arg(&root))?;
    }
    let mut folders = Vec::new();
    library_folders(&root.join("usr/lib"), &mut folders);
    let path = folders.join(":");
    let shell = root.join("usr/lib/chromium/chromium-headless-shell");
    let libraries = process::output(Command::new("ldd").arg(&shell).env("LD_LIBRARY_PATH", &path))?;
    let missing: Vec<&str> = libraries.lines().filter(|line| line.contains("not found")).collect();
    if !missing.is_empty() {
        log.note(&missing.join("\n"));
        return Err(failed("libraries of Chromium's are missing"));
    }
    let shell = shell.display();
    let text = format!("#!/bin/sh\nexport LD_LIBRARY_PATH=\"{path}\"\nexec \"{shell}\" \"$@\"\n");
    files::replace(&program, &text, true)?;
    files::remove_all(&lists)
}

/// Folders with shared libraries, but Chromium's own.
fn library_folders(folder: &Path, found: &mut Vec<String>) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    let is_library =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().contains(".so"));
    if !folder.to_string_lossy().contains("/chromium") && paths.iter().any(is_library) {
        found.push(folder.display().to_string());
    }
    for path in paths.iter().filter(|path| path.is_dir() && !path.is_symlink()) {
        library_folders(path, found);
    }
}

#[cfg(unix)]
fn link(from: &Path, to: &Path) -> Result {
    if to.is_symlink() {
        fs::remove_file(to).at(to)?;
    }
    std::os::unix::fs::symlink(from, to).at(to)
}

#[cfg(not(unix))]
fn link(_: &Path, to: &Path) -> Result {
    Err(failed(format!("{}: no links here", to.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_in_a_lock() {
        let lock = "version = 4\n\n[[package]]\nname = \"wasm-bindgen-macro\"\nversion = \"1\"\n\n\
            [[package]]\nname = \"wasm-bindgen\"\nversion = \"0.2.105\"\nsource = \"x\"\n";
        assert_eq!(version_of("wasm-bindgen", lock).as_deref(), Some("0.2.105"));
        assert_eq!(version_of("wgpu", lock), None);
    }

    #[test]
    fn jobs() {
        let job = |words: &[&str]| Job::of(words.iter().map(OsString::from).collect());
        let of = |doctor, chromium, node, words: &[&str]| Job {
            doctor,
            chromium,
            node,
            words: words.iter().map(OsString::from).collect(),
        };
        assert_eq!(job(&["node", "1/2"]).unwrap(), of(false, true, true, &["node", "1/2"]));
        assert_eq!(job(&["--doctor"]).unwrap(), of(true, true, true, &["--doctor"]));
        let one = job(&["--doctor", "node", "--quick"]).unwrap();
        assert_eq!(one, of(true, false, true, &["--doctor", "--quick"]));
        assert!(job(&["--doctor", "masks"]).is_err());
    }

    #[test]
    fn folders_of_libraries() {
        let temporary = files::Temporary::new(&env::temp_dir(), "xtask-test-browser").unwrap();
        for file in ["a/libx.so.1", "chromium/liby.so", "b/c/libz.so", "b/text"] {
            let path = temporary.0.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let mut found = Vec::new();
        library_folders(&temporary.0, &mut found);
        assert_eq!(found, ["a", "b/c"].map(|name| temporary.0.join(name).display().to_string()));
    }
}
