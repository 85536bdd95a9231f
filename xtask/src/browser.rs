//! `scripts/browser`: runs the small cases, or the doctor, as a WebAssembly program in four
//! runtimes.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{self, ScopedJoinHandle};

use crate::error::{At, Result, failed, refused};
use crate::gpu::{self, Setup};
use crate::repo::{Repo, executables};
use crate::{dawn, files, npm, process};

const USAGE: &str = "\
scripts/browser [RUNTIME...] [WORD...]: runs the small cases of the tests (tests/small) as a WebAssembly program.

Runs all cases, or the cases with one of the WORDs in their names, in four runtimes or in the given ones:

  chromium   headless, on SwiftShader (no f16)
  node       on Dawn, Chromium's WebGPU, over the Vulkan driver of scripts/gpu (f16)
  firefox    headless: its WebGPU is wgpu, over lavapipe 26 (f16)
  deno       its WebGPU is wgpu, over the Vulkan driver of scripts/gpu (f16)

The word 1/2 selects every second case. The first runtime runs this share, and each other runtime the share after it.
Two runtimes run at a time.

scripts/browser --doctor [RUNTIME...] [--quick] [> PAGE.md]: prints the page of `cargo run --example doctor` about the
devices of these runtimes. --quick leaves out times and rates.

Prints the names of skipped and failed cases, then a table. Fails if the program does not build, or if a case fails,
panics or does not end. A runtime that is not available is skipped, with a line that begins with \"skipped:\".

Everything is fetched into target; nothing is installed. rustup fetches the standard library for wasm32, unless the
toolchain has it. wasm-bindgen comes from crates.io, Dawn and Deno from npm. apt-get fetches Chromium, unless it is
installed, and Debian's Firefox. Firefox runs in a separate root folder (unshare).
";

pub const TRIPLE: &str = "wasm32-unknown-unknown";

/// Installed browsers that suffice.
const CHROMIUMS: [&str; 3] = ["chromium", "chromium-headless-shell", "google-chrome"];

const DENO: &str = "2.9.6";

/// Settings that compile faster.
const CHEAP: [&str; 4] = ["--config", "profile.dev.debug=false", "--config", "profile.dev.incremental=false"];

/// A program that runs WebAssembly and has WebGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    Chromium,
    Node,
    Firefox,
    Deno,
}

const RUNTIMES: [Runtime; 4] = [Runtime::Chromium, Runtime::Node, Runtime::Firefox, Runtime::Deno];

impl Runtime {
    pub fn name(self) -> &'static str {
        match self {
            Runtime::Chromium => "chromium",
            Runtime::Node => "node",
            Runtime::Firefox => "firefox",
            Runtime::Deno => "deno",
        }
    }

    pub fn named(name: &OsStr) -> Option<Self> {
        RUNTIMES.into_iter().find(|runtime| name == runtime.name())
    }

    /// Fetches the runtime and links it in `folder`. Returns the program that starts it, or an
    /// empty path.
    fn get(self, repo: &Repo, folder: &Path, log: &Log) -> Result<PathBuf> {
        let got = match self {
            Runtime::Chromium => get_chromium(folder, log).map(|()| folder.join("chromium")),
            Runtime::Node => get_dawn(repo, folder, log).map(|()| PathBuf::new()),
            Runtime::Firefox => get_firefox(repo),
            Runtime::Deno => get_deno(repo, folder, log).map(|()| PathBuf::new()),
        };
        got.inspect_err(|error| log.note(&error.text))
    }

    /// True if the runtime uses the Vulkan driver of scripts/gpu, and starts through its wrapper.
    fn needs_driver(self) -> bool {
        matches!(self, Runtime::Node | Runtime::Deno)
    }

    /// The message if the runtime cannot be fetched.
    fn missing(self) -> &'static str {
        match self {
            Runtime::Chromium => "chromium: neither here nor from apt-get",
            Runtime::Node => "node: npm cannot fetch Dawn",
            Runtime::Firefox => {
                "firefox: apt-get cannot fetch it, or there are no user namespaces to run it in"
            }
            Runtime::Deno => "deno: npm cannot fetch it",
        }
    }
}

/// Fetches `runtimes`. A printed line names each runtime that is not available.
pub fn get(repo: &Repo, folder: &Path, log: &Log, runtimes: &[Runtime]) -> Vec<(Runtime, PathBuf)> {
    let got = |&runtime: &Runtime| match runtime.get(repo, folder, log) {
        Ok(path) => Some((runtime, path)),
        Err(_) => {
            log.skip(runtime.missing());
            None
        }
    };
    runtimes.iter().filter_map(got).collect()
}

pub fn main(repo: &Repo, words: Vec<OsString>) -> Result {
    if words.iter().any(|word| word == "-h" || word == "--help") {
        print!("{USAGE}");
        return Ok(());
    }
    let job = Job::of(words)?;
    let folder = repo.folder("browser")?;
    let log = Log::new(folder.join("log"))?;
    if !process::have(&["node"]) {
        log.skip("all runtimes: there is no node, which starts them");
        return Ok(());
    }
    let Some(toolchain) = Toolchain::get(repo, TRIPLE, &log)? else { return Ok(()) };

    // The runtimes are fetched while the program compiles.
    let of_runtime = |runtime: &Runtime| Log::new(folder.join(format!("log.{}", runtime.name())));
    let logs = job.runtimes.iter().map(of_runtime).collect::<Result<Vec<Log>>>()?;
    let (program, got, setup) = thread::scope(|scope| {
        let folder = &folder;
        let get = |(&runtime, log)| scope.spawn(move || Runtime::get(runtime, repo, folder, log));
        let got: Vec<_> = job.runtimes.iter().zip(&logs).map(get).collect();
        let needed = job.runtimes.iter().any(|runtime| runtime.needs_driver());
        let setup = needed.then(|| scope.spawn(|| gpu::setup(repo)));
        let program = build(repo, folder, &toolchain, if job.doctor { DOCTOR } else { CASES });
        let got: Vec<_> = got.into_iter().map(result).collect();
        (program, got, setup.map(result))
    });
    program?;

    let mut node = Command::new("node");
    node.current_dir(&repo.root).arg("tests/browser/run.mjs").arg(&folder);
    if let Some(Ok(setup)) = &setup {
        use_driver(setup, &mut node, job.doctor);
    }
    let mut runtimes = 0;
    for ((runtime, log), got) in job.runtimes.iter().zip(&logs).zip(got) {
        let Ok(path) = got else {
            log.skip(runtime.missing());
            continue;
        };
        let path: &Path = match &setup {
            Some(Ok(setup)) if runtime.needs_driver() => setup.runner().unwrap_or(Path::new("")),
            Some(Err(error)) if runtime.needs_driver() => {
                log.note(&format!("scripts/gpu: {error}"));
                log.skip(&format!("{}: no Vulkan driver", runtime.name()));
                continue;
            }
            _ => &path,
        };
        node.arg(joined(&format!("{}=", runtime.name()), path));
        runtimes += 1;
    }
    if runtimes == 0 { Ok(()) } else { process::run(node.args(job.words)) }
}

/// Returns the result of a thread, or an error if it panicked.
fn result<T>(thread: ScopedJoinHandle<Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|_| Err(failed("a thread panicked")))
}

/// The programs to run, and their runtimes.
#[derive(Debug, PartialEq)]
struct Job {
    /// True for the doctor, false for the cases.
    doctor: bool,
    runtimes: Vec<Runtime>,
    /// Arguments for run.mjs.
    words: Vec<OsString>,
}

impl Job {
    fn of(mut words: Vec<OsString>) -> Result<Self> {
        let doctor = words.iter().any(|word| word == "--doctor");
        let is_named = |runtime: &Runtime| words.iter().any(|word| word == runtime.name());
        let mut runtimes: Vec<Runtime> = RUNTIMES.into_iter().filter(is_named).collect();
        words.retain(|word| word != "--doctor" && Runtime::named(word).is_none());
        let known = |word: &OsString| {
            if doctor { word == "--quick" } else { !word.to_string_lossy().starts_with('-') }
        };
        if let Some(word) = words.iter().find(|word| !known(word)) {
            let word = word.display();
            let with = if doctor { "--doctor" } else { "scripts/browser without --doctor" };
            return Err(refused(format!("{with} knows no {word}; --help says what it knows")));
        }
        if doctor {
            words.insert(0, "--doctor".into());
        }
        if runtimes.is_empty() {
            runtimes = RUNTIMES.into();
        }
        Ok(Job { doctor, runtimes, words })
    }
}

fn use_driver(setup: &Setup, node: &mut Command, timed: bool) {
    setup.apply(node);
    if !timed && env::var_os("GALLIVM_PERF").is_none() {
        // lavapipe then compiles in half the time.
        node.env("GALLIVM_PERF", "nopt");
    }
}

pub fn joined(start: &str, path: &Path) -> OsString {
    let mut text = OsString::from(start);
    text.push(path);
    text
}

/// A file for the output of programs.
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

    /// Runs `command` with its output in the log. Returns true if it succeeds.
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

/// A toolchain with the standard library of a target.
pub struct Toolchain(Vec<(&'static str, OsString)>);

impl Toolchain {
    /// Returns the current toolchain, or fetches the same version with the target. Returns `None`,
    /// with a message, if that is impossible.
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

    /// Returns the environment variables that make cargo use the toolchain.
    pub fn variables(&self) -> impl Iterator<Item = (&'static str, OsString)> {
        self.0.iter().cloned()
    }

    fn cargo(&self, repo: &Repo) -> Command {
        let mut cargo = repo.cargo();
        cargo.arg("build").args(CHEAP).envs(self.variables());
        cargo
    }
}

/// cargo's arguments, and the folder of the built program.
pub struct Program {
    pub cargo: &'static [&'static str],
    pub place: &'static str,
}

const CASES: Program = Program { cargo: &["--test", "browser"], place: "program" };
const DOCTOR: Program = Program { cargo: &["--example", "doctor"], place: "doctor" };

/// Builds the program, and runs wasm-bindgen's tool of the same version on it.
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

/// Returns the version of a package in a `Cargo.lock`.
fn version_of(name: &str, lock: &str) -> Option<String> {
    let (_, rest) = lock.split_once(&format!("\nname = \"{name}\"\nversion = \""))?;
    Some(rest.split_once('"')?.0.into())
}

fn get_dawn(repo: &Repo, folder: &Path, log: &Log) -> Result {
    link(&dawn::fetch(repo, || log.stream())?, &folder.join("dawn"))
}

/// Fetches Deno's program, as `deno` in `folder`.
fn get_deno(repo: &Repo, folder: &Path, log: &Log) -> Result {
    let package = match (env::consts::OS, env::consts::ARCH) {
        ("linux", "x86_64") => "@deno/linux-x64-glibc",
        ("linux", "aarch64") => "@deno/linux-arm64-glibc",
        (system, cpu) => return Err(failed(format!("no Deno for {system} on {cpu}"))),
    };
    let at = npm::fetch(repo, "deno", &format!("{package}@{DENO}"), || log.stream())?;
    link(&at.join("node_modules").join(package).join("deno"), &folder.join("deno"))
}

/// Returns the script that starts programs of Firefox's packages.
fn get_firefox(repo: &Repo) -> Result<PathBuf> {
    let setup = gpu::setup_named(repo, "firefox")?;
    setup.runner().map(Path::to_owned).ok_or_else(|| failed("no packages of Debian's for this system"))
}

/// Links an installed Chromium, or unpacks Debian's, as `chromium` in `folder`.
fn get_chromium(folder: &Path, log: &Log) -> Result {
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
    // A single bad source does not matter.
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

/// Returns the folders with shared libraries, except Chromium's.
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
        use Runtime::{Deno, Firefox, Node};
        let job = |words: &[&str]| Job::of(words.iter().map(OsString::from).collect());
        let of = |doctor, runtimes: &[Runtime], words: &[&str]| Job {
            doctor,
            runtimes: runtimes.into(),
            words: words.iter().map(OsString::from).collect(),
        };
        assert_eq!(job(&["masks", "1/2"]).unwrap(), of(false, &RUNTIMES, &["masks", "1/2"]));
        assert_eq!(job(&["deno", "masks", "firefox"]).unwrap(), of(false, &[Firefox, Deno], &["masks"]));
        assert_eq!(job(&["--doctor"]).unwrap(), of(true, &RUNTIMES, &["--doctor"]));
        let one = job(&["--doctor", "node", "--quick"]).unwrap();
        assert_eq!(one, of(true, &[Node], &["--doctor", "--quick"]));
        assert!(job(&["--doctor", "masks"]).is_err());
        assert!(job(&["--quick"]).is_err());
    }

    #[test]
    fn usage_names_every_runtime() {
        for runtime in RUNTIMES {
            assert!(USAGE.contains(&format!("\n  {:<10} ", runtime.name())));
            assert!(runtime.missing().starts_with(runtime.name()));
        }
        assert!(USAGE.lines().all(|line| line.len() <= 120));
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
