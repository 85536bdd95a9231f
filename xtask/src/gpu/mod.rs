//! `scripts/gpu`: runs a program with a usable Vulkan device, on any machine.
//!
//! The packages have a separate libc, so only the programs under test run through the packages'
//! dynamic loader. A wrapper script, `target/gpu/NAME/run`, starts them. Tools run natively; cargo
//! starts tests, examples, benches and doc tests through the wrapper. Inside a wrapped program
//! `/proc/self/exe`, and so `std::env::current_exe()`, names the loader.

pub mod drivers;
pub mod fetch;
pub mod machine;
mod root;
mod shell;
pub mod unpacked;

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{At, Result, refused};
use crate::process;
use crate::repo::Repo;
use drivers::{DRIVERS, Driver};
use machine::{Machine, Wanted};
use unpacked::{Cpu, Unpacked};

const DRIVER: &str = "WGPU_ATTENTION_DRIVER";
const RUNNER: &str = "WGPU_ATTENTION_RUNNER";
const PERF: &str = "GALLIVM_PERF";

/// Programs that run natively, in addition to scripts. They start the programs under test
/// themselves.
const NATIVE: [&str; 11] =
    ["cargo", "rustup", "rustc", "rustdoc", "sh", "bash", "dash", "zsh", "fish", "make", "just"];
const NATIVE_STARTS: [&str; 2] = ["cargo-", "python"];

/// Programs whose arguments name the program that they start.
const STARTERS: [&str; 13] = [
    "env", "gdb", "ionice", "ltrace", "nice", "nohup", "perf", "setsid", "stdbuf", "strace", "taskset",
    "time", "timeout",
];

fn usage() -> String {
    let mut drivers = String::new();
    for Driver { name, about, .. } in DRIVERS {
        drivers += &format!("  {name:<12} {}\n", about.replace('\n', "\n               "));
    }
    format!(
        "\
usage: scripts/gpu COMMAND [ARGS...]   runs COMMAND with a usable Vulkan device
       scripts/gpu --print-env         prints the variables it would export, for eval

macOS, Windows                    COMMAND runs as it is (Metal, Direct3D 12).
Linux with a GPU driver           COMMAND runs as it is. Such a machine has a device node, a driver
                                  file (ICD) whose library exists, and libvulkan.so.1; or the user
                                  has set VK_DRIVER_FILES or VK_ICD_FILENAMES.
other Linux (x86_64, aarch64)     A software driver, unpacked once under target/gpu from Debian's or
                                  the distribution's packages: no root, nothing installed, nothing
                                  written elsewhere. apt checks the archive's signatures.

WGPU_ATTENTION_DRIVER chooses the driver:
  auto         the machine's GPU driver, else lavapipe, else distro (default)
  system       any driver of the machine
{drivers}WGPU_ATTENTION_DEBIAN_MIRROR names a Debian mirror, if apt's configuration has none.

cargo, rustup, rustc, shells, make, python ... and scripts run natively. cargo starts tests, examples, benches and
doc tests with the driver (CARGO_TARGET_<TRIPLE>_RUNNER). Other ELF programs run with the driver, also behind env,
gdb, ionice, ltrace, nice, nohup, perf, setsid, stdbuf, strace, taskset, time and timeout.
Exported variables: WGPU_BACKEND, VK_DRIVER_FILES (for mesa-gl the variables of EGL), CARGO_TARGET_<TRIPLE>_RUNNER and
WGPU_ATTENTION_RUNNER (the script that starts a program with the driver). XDG_RUNTIME_DIR and MESA_SHADER_CACHE_DIR
(both under target/gpu) are exported if they are not set. GALLIVM_PERF=nopt is set, if it is not set, for `cargo test`
on lavapipe, distro and mesa-gl, because tests compile shaders more than they run them. Benches and programs are not
affected. lavapipe's packages contain the Khronos validation layer: WGPU_VALIDATION=1 WGPU_DEBUG=1 enable it.
"
    )
}

fn say(text: impl std::fmt::Display) {
    eprintln!("scripts/gpu: {text}");
}

/// The way in which programs get a device.
pub enum Setup {
    /// The machine's installed driver.
    Own(Inherited),
    Fetched(Fetched),
}

/// A driver under `target/gpu`.
pub struct Fetched {
    driver: &'static Driver,
    /// The script that starts programs with the driver.
    wrapper: PathBuf,
    variables: Vec<(String, OsString)>,
}

/// True if this runs inside another `scripts/gpu`. Then the settings are not the user's.
#[derive(Clone, Copy)]
pub struct Inherited(bool);

impl Inherited {
    fn now() -> Self {
        Inherited(is_set(RUNNER))
    }

    fn names(self) -> Vec<String> {
        let names = || {
            ["VK_DRIVER_FILES", "WGPU_BACKEND", RUNNER]
                .map(String::from)
                .into_iter()
                .chain([runner_variable()])
        };
        if self.0 { names().collect() } else { Vec::new() }
    }

    /// True if the user has named a driver.
    fn names_a_driver(self) -> bool {
        is_set("VK_ICD_FILENAMES") || !self.0 && is_set("VK_DRIVER_FILES")
    }
}

/// True if the variable is set and not empty.
fn is_set(variable: &str) -> bool {
    env::var_os(variable).is_some_and(|value| !value.is_empty())
}

/// This does not ask rustc: only programs of this target can run through the packages' loader.
fn runner_variable() -> String {
    format!("CARGO_TARGET_{}_UNKNOWN_LINUX_GNU_RUNNER", env::consts::ARCH.to_uppercase())
}

impl Setup {
    /// Sets the driver's environment for `command`.
    pub fn apply(&self, command: &mut Command) {
        match self {
            Setup::Own(inherited) => {
                for name in inherited.names() {
                    command.env_remove(name);
                }
            }
            Setup::Fetched(fetched) => {
                command.env_remove("VK_ICD_FILENAMES").envs(fetched.variables.iter().cloned());
            }
        }
    }

    /// Returns the script that starts programs with the driver, if one is needed.
    pub fn runner(&self) -> Option<&Path> {
        match self {
            Setup::Own(_) => None,
            Setup::Fetched(fetched) => Some(&fetched.wrapper),
        }
    }
}

/// Returns the set-up that `WGPU_ATTENTION_DRIVER` names.
pub fn setup(repo: &Repo) -> Result<Setup> {
    let name = env::var(DRIVER).ok().filter(|name| !name.is_empty());
    setup_named(repo, name.as_deref().unwrap_or("auto"))
}

pub fn setup_named(repo: &Repo, name: &str) -> Result<Setup> {
    let known = drivers::find(name);
    if known.is_none() && !["auto", "system"].contains(&name) {
        let names: Vec<&str> =
            ["auto", "system"].into_iter().chain(DRIVERS.iter().map(|driver| driver.name)).collect();
        return Err(refused(format!("{DRIVER}={name} is unknown; choose one of: {}", names.join(" "))));
    }
    let inherited = Inherited::now();
    let own = || Ok(Setup::Own(inherited));
    if ["macos", "windows"].contains(&env::consts::OS) || name == "system" {
        return own();
    }
    let Some(cpu) = Cpu::named(env::consts::ARCH).filter(|_| env::consts::OS == "linux") else {
        let system = format!("{} {}", env::consts::OS, env::consts::ARCH);
        return if known.is_none() {
            own()
        } else {
            Err(refused(format!("no software driver for {system}")))
        };
    };
    // The machine does not matter if the user names a driver.
    let machine = known.is_none().then(Machine::look);
    let has_gpu = machine.as_ref().is_some_and(Machine::has_gpu);
    let has_vulkan = |wanted| machine.as_ref().is_some_and(|machine| machine.has_vulkan(wanted));
    if machine.is_some() && inherited.names_a_driver() || has_gpu && has_vulkan(Wanted::Hardware) {
        return own();
    }

    let base = base(repo)?;
    let unpacked = |driver: &Driver| Unpacked::new(base.join(driver.bundle.name), cpu);
    let driver = known.unwrap_or_else(|| {
        let [lavapipe, distro] =
            ["lavapipe", "distro"].map(|name| drivers::find(name).expect("an entry of the table"));
        // Without a Debian keyring or mirror (Ubuntu), the distribution's packages are used.
        let cannot_fetch = || process::have(&["apt-get"]) && !fetch::knows_debian();
        if !unpacked(lavapipe).is(lavapipe.bundle) && cannot_fetch() { distro } else { lavapipe }
    });
    let title = driver.bundle.title;
    if has_gpu {
        say(format!("a GPU is here but no Vulkan driver and loader for it: using {title}"));
    }
    let mut place = unpacked(driver);
    if !place.is(driver.bundle) {
        let log = base.join(format!("{}.log", driver.bundle.name));
        place = match fetch::fetch(&base, driver.bundle, cpu, &log) {
            Ok(place) => place,
            Err(error) if has_vulkan(Wanted::Any) => {
                say(format!("{title}: {error}; using the machine's own Vulkan driver"));
                return own();
            }
            Err(error) => return Err(refused(format!("{title}: {error}\n{}", advice(&log)))),
        };
    }
    let home = env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| Some(env::home_dir()?.join(".cargo")));
    let folders: Vec<PathBuf> = [Some(repo.root.clone()), Some(repo.target.clone()), home]
        .into_iter()
        .flatten()
        .filter(|folder| folder.is_dir())
        .collect();
    let wrapper = place.install(driver, &folders)?;
    let variables = variables(&base, &place, driver, &wrapper)?;
    Ok(Setup::Fetched(Fetched { driver, wrapper, variables }))
}

/// Returns the folder for unpacked drivers.
fn base(repo: &Repo) -> Result<PathBuf> {
    let base = repo.target.join("gpu");
    // Cargo splits a runner at spaces. Vulkan and the loader split lists at colons.
    let odd = |c: char| c.is_whitespace() || ":\"'\\$`".contains(c);
    match base.to_str() {
        Some(path) if !path.contains(odd) => Ok(base),
        _ => {
            let path = base.display();
            Err(refused(format!(
                "cannot use {path}: set CARGO_TARGET_DIR to a path without spaces, colons and quotes"
            )))
        }
    }
}

fn advice(log: &Path) -> String {
    let mut text = String::new();
    if fs::metadata(log).is_ok_and(|data| data.len() > 0) {
        for line in fetch::errors_of(log) {
            text += &format!("    {line}\n");
        }
        text += &format!("full log: {}\n", log.display());
    }
    text + "To go on, do one of these:
  - install a Vulkan driver and set WGPU_ATTENTION_DRIVER=system; packages: mesa-vulkan-drivers libvulkan1
    (Debian, Ubuntu), mesa-vulkan-drivers vulkan-loader (Fedora), vulkan-swrast vulkan-icd-loader (Arch)
  - set WGPU_ATTENTION_DEBIAN_MIRROR to the address of a Debian mirror; needs Debian's archive keyring
  - set WGPU_ATTENTION_DRIVER=distro for this distribution's own lavapipe, by apt-get"
}

/// Returns all exported variables.
fn variables(
    base: &Path,
    place: &Unpacked,
    driver: &Driver,
    wrapper: &Path,
) -> Result<Vec<(String, OsString)>> {
    let runtime = base.join("runtime");
    private_folder(&runtime)?;
    let mut variables: Vec<(String, OsString)> =
        place.variables(driver).into_iter().map(|(name, value)| (name.into(), value.into())).collect();
    variables.push((RUNNER.into(), wrapper.into()));
    variables.push((runner_variable(), wrapper.into()));
    for (name, default) in [("XDG_RUNTIME_DIR", runtime), ("MESA_SHADER_CACHE_DIR", base.join("cache"))] {
        let chosen = env::var_os(name).filter(|value| !value.is_empty());
        variables.push((name.into(), chosen.unwrap_or_else(|| default.into())));
    }
    Ok(variables)
}

fn private_folder(path: &Path) -> Result {
    fs::create_dir_all(path).at(path)?;
    #[cfg(unix)]
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o700)).at(path)?;
    Ok(())
}

pub fn main(repo: &Repo, arguments: Vec<OsString>) -> Result {
    let Some(program) = arguments.first() else {
        print!("{}", usage());
        return Ok(());
    };
    if program == "-h" || program == "--help" {
        print!("{}", usage());
        return Ok(());
    }
    let setup = setup(repo)?;
    if program == "--print-env" {
        print!("{}", exports(&setup));
        return Ok(());
    }
    let words = match setup.runner() {
        Some(runner) => with_runner(&arguments, runner),
        None => arguments.clone(),
    };
    let mut command = Command::new(&words[0]);
    setup.apply(command.args(&words[1..]));
    if let Setup::Fetched(Fetched { driver, .. }) = &setup
        && driver.llvm
        && is_cargo_test(&arguments)
        && env::var_os(PERF).is_none()
    {
        command.env(PERF, "nopt");
    }
    process::exec(&mut command).map(|never| match never {})
}

fn exports(setup: &Setup) -> String {
    match setup {
        Setup::Own(_) => "# nothing to export: the machine's own driver\n".into(),
        Setup::Fetched(fetched) => {
            let line = |(name, value): &(String, OsString)| {
                format!("export {name}={}\n", shell::quote(&value.to_string_lossy()))
            };
            fetched.variables.iter().map(line).collect()
        }
    }
}

/// Returns `arguments` with `runner` in front of the program that runs with the driver, if there is
/// one.
fn with_runner(arguments: &[OsString], runner: &Path) -> Vec<OsString> {
    let name = |n: usize| stem(&arguments[n]);
    let starts = |n: usize| STARTERS.contains(&name(n).as_str());
    let mut at = 0;
    while at < arguments.len() && (starts(at) || starts(0) && elf(&arguments[at]).is_none()) {
        // `perf stat PROGRAM` does not start a program `stat`.
        at += if name(at) == "perf" { 2 } else { 1 };
    }
    let mut words = arguments.to_vec();
    let Some(program) = arguments.get(at).filter(|word| !is_native(word)).and_then(|word| elf(word)) else {
        return words;
    };
    words[at] = program.into();
    words.insert(at, runner.into());
    if (0..at).any(|n| name(n) == "gdb") {
        // A debugger starts no script, but follows `sh` to the program that the script starts.
        words.insert(at, "sh".into());
        if !words[..at].iter().any(|word| word == "--args") {
            words.insert(at, "--args".into());
        }
    }
    words
}

fn stem(program: &OsStr) -> String {
    Path::new(program).file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn is_native(program: &OsStr) -> bool {
    let name = stem(program);
    NATIVE.contains(&name.as_str()) || NATIVE_STARTS.iter().any(|start| name.starts_with(start))
}

/// Returns the file that `program` starts, if it is no script.
fn elf(program: &OsStr) -> Option<PathBuf> {
    let path = process::find(program)?;
    let mut magic = [0; 4];
    File::open(&path).ok()?.read_exact(&mut magic).ok()?;
    (magic == *b"\x7fELF").then_some(path)
}

/// True for `cargo test`, also with a toolchain or options before `test`.
fn is_cargo_test(arguments: &[OsString]) -> bool {
    let Some((program, rest)) = arguments.split_first() else { return false };
    let words = rest.iter().map(|word| word.to_string_lossy());
    let command = words.into_iter().find(|word| !word.starts_with(['+', '-']));
    stem(program) == "cargo" && command.is_some_and(|word| ["test", "t"].contains(&&*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn tests_of_cargo() {
        for line in ["cargo test", "/usr/bin/cargo +nightly test --release", "cargo --locked t -- filter"] {
            assert!(is_cargo_test(&words(line)), "{line}");
        }
        for line in ["cargo bench -- test", "cargo run test", "cargo", "test", "cargo-x test", "sh -c test"] {
            assert!(!is_cargo_test(&words(line)), "{line}");
        }
    }

    #[test]
    fn programs_that_start_others_run_natively() {
        for program in ["cargo", "/usr/bin/cargo-nextest", "python3.11", "sh"] {
            assert!(is_native(program.as_ref()), "{program}");
        }
        for program in ["target/release/examples/decode_loop", "vulkaninfo", "./shader"] {
            assert!(!is_native(program.as_ref()), "{program}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn programs_behind_others_run_with_the_driver() {
        let this = env::current_exe().unwrap().display().to_string();
        let run = |line: &str| {
            let words = with_runner(&words(&line.replace("THIS", &this)), Path::new("/run"));
            let words: Vec<String> =
                words.iter().map(|word| word.to_string_lossy().replace(&this, "THIS")).collect();
            words.join(" ")
        };
        assert_eq!(run("THIS 60"), "/run THIS 60");
        assert_eq!(run("timeout -s KILL 60 THIS sh"), "timeout -s KILL 60 /run THIS sh");
        assert_eq!(run("env A=1 nice -n 5 THIS"), "env A=1 nice -n 5 /run THIS");
        assert_eq!(run("env -u A B=1 THIS"), "env -u A B=1 /run THIS");
        assert_eq!(run("perf stat THIS"), "perf stat /run THIS");
        assert_eq!(run("gdb THIS 1"), "gdb --args sh /run THIS 1");
        assert_eq!(run("gdb -q --args THIS 1"), "gdb -q --args sh /run THIS 1");
        for line in [
            "sh -c THIS",
            "env A=1 sh -c THIS",
            "timeout 9 cargo run THIS",
            "perf",
            "timeout 9 no-such-program",
            "no-such-program THIS",
        ] {
            assert_eq!(run(line), line);
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn scripts_are_no_programs() {
        assert!(elf("sh".as_ref()).is_some());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/gpu");
        assert_eq!(elf(script.as_os_str()), None);
        assert_eq!(elf("no-such-program".as_ref()), None);
    }

    #[test]
    fn the_usage_text_names_every_driver() {
        let usage = usage();
        for driver in DRIVERS {
            assert!(usage.contains(&format!("\n  {:<12} ", driver.name)));
        }
        assert!(usage.lines().all(|line| line.len() <= 120));
    }
}
