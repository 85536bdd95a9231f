//! `scripts/package`: checks that the crate is fit to be published.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

use crate::browser::{Log, Toolchain};
use crate::error::{At, Result, failed, refused};
use crate::files;
use crate::process;
use crate::repo::Repo;

const USAGE: &str = "\
scripts/package [STEP...]: checks that the crate is fit to be published.

  package    `cargo package` gives no warning and less than 10 MB, and the packed library compiles
  publish    `cargo publish --dry-run` gives no warning for the crates that are published
  docs       the documentation builds as docs.rs builds it: from the packed library, for its targets
  msrv       Cargo.toml's rust-version is the toolchain that runs the tests, or an older installed one
  deny       the dependencies' licences, sources and version requirements satisfy deny.toml (cargo-deny, which is built
             under target/tools if it is not installed)
  audit      cargo-deny with RustSec's advisories, if they can be fetched
  semver     cargo-semver-checks against the published version, if both are available

A step whose tool or data is not available is skipped, with a message. Without arguments, all steps run.
";

const MOST_BYTES: u64 = 10_000_000;
const CARGO_DENY: &str = "cargo-deny@0.20.2";

type Step = fn(&Crate) -> Result<String>;

const STEPS: [(&str, Step); 7] = [
    ("package", Crate::package),
    ("publish", Crate::publish),
    ("docs", Crate::docs),
    ("msrv", Crate::msrv),
    ("deny", Crate::deny),
    ("audit", Crate::audit),
    ("semver", Crate::semver),
];

pub fn main(repo: &Repo, arguments: Vec<OsString>) -> Result {
    if arguments.iter().any(|word| word == "-h" || word == "--help") {
        print!("{USAGE}");
        return Ok(());
    }
    let mut steps = STEPS.to_vec();
    if !arguments.is_empty() {
        let find = |word: &OsString| {
            let step = STEPS.into_iter().find(|(name, _)| word == name);
            step.ok_or_else(|| refused(format!("no step {}", word.display())))
        };
        steps = arguments.iter().map(find).collect::<Result<_>>()?;
    }
    let own = Crate::of(repo)?;
    for (name, step) in steps {
        match step(&own) {
            Ok(text) => println!("{name:<8} {text}"),
            Err(error) => {
                println!("{name:<8} FAILED: {error}");
                return Err(crate::error::Error { text: String::new(), ..error });
            }
        }
    }
    Ok(())
}

struct Crate {
    repo: Repo,
    metadata: Value,
    /// The folder of tools that are not installed.
    tools: PathBuf,
}

impl Crate {
    fn of(repo: &Repo) -> Result<Self> {
        Ok(Crate { repo: repo.clone(), metadata: repo.own_package()?, tools: repo.folder("tools")? })
    }

    /// Returns a field of `[package]`.
    fn field(&self, name: &str) -> Result<&str> {
        self.metadata[name].as_str().ok_or_else(|| failed(format!("Cargo.toml has no {name}")))
    }

    fn package(&self) -> Result<String> {
        let name = self.field("name")?;
        let package = ["package", "-p", name, "--color", "never", "--locked", "--no-verify", "--allow-dirty"];
        let log = said(self.repo.cargo().args(package), "cargo package")?;
        if log.lines().any(|line| line.starts_with("warning")) {
            print!("{log}");
            return Err(failed("not without warnings"));
        }
        let target = &self.repo.target;
        let archive = target.join(format!("package/{name}-{}.crate", self.field("version")?));
        let bytes = fs::metadata(&archive).at(&archive)?.len();
        if bytes >= MOST_BYTES {
            return Err(failed(format!("{bytes} bytes, more than {MOST_BYTES}")));
        }
        // cargo's verification is not used, because it would compile the dependencies again.
        let unpacked = target.join("unpacked");
        files::remove_all(&unpacked)?;
        fs::create_dir(&unpacked).at(&unpacked)?;
        let mut tar = Command::new("tar");
        tar.arg("-xvzf").arg(&archive).arg("-C").arg(&unpacked).args(["--strip-components", "1"]);
        let names = process::output(&mut tar)?;
        let mut check = self.repo.cargo();
        check.args(["check", "--quiet", "--locked", "--lib", "--examples", "--manifest-path"]);
        check.arg(unpacked.join("Cargo.toml"));
        process::run(check.env("CARGO_TARGET_DIR", target))
            .map_err(|_| failed("what it packs does not compile"))?;
        Ok(format!("{} files, {bytes} bytes, compiles", names.lines().count()))
    }

    fn publish(&self) -> Result<String> {
        let names = self.repo.published()?;
        let mut publish = self.repo.cargo();
        publish.args([
            "publish",
            "--dry-run",
            "--color",
            "never",
            "--locked",
            "--no-verify",
            "--allow-dirty",
        ]);
        names.iter().for_each(|name| _ = publish.args(["-p", name]));
        let log = said(&mut publish, "cargo publish")?;
        let is_fault = |line: &&str| line.starts_with("warning") && !line.ends_with("due to dry run");
        match log.lines().find(is_fault) {
            Some(line) => Err(failed(line)),
            None => Ok(names.join(", ")),
        }
    }

    /// Documents the library that `package` has unpacked. docs.rs uses a newer compiler, and it
    /// sets `docsrs`, which the library ignores. On the first target warnings are errors. Browsers
    /// have no blocking methods, so links to them do not resolve there.
    fn docs(&self) -> Result<String> {
        self.package()?;
        let targets = &self.metadata["metadata"]["docs"]["rs"]["targets"];
        let targets: Vec<&str> = targets.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        for (n, target) in targets.iter().enumerate() {
            let log = Log::new(self.tools.join("log.docs"))?;
            let Some(toolchain) = Toolchain::get(&self.repo, target, &log)? else {
                return Ok(format!("skipped: no standard library for {target}"));
            };
            let mut doc = self.repo.cargo();
            doc.args([
                "doc",
                "--quiet",
                "--no-deps",
                "--locked",
                "--lib",
                "--target",
                target,
                "--manifest-path",
            ]);
            doc.arg(self.repo.target.join("unpacked/Cargo.toml")).envs(toolchain.variables());
            doc.env("CARGO_TARGET_DIR", &self.repo.target)
                .env("RUSTDOCFLAGS", if n == 0 { "-D warnings" } else { "--cap-lints allow" });
            process::run(&mut doc).map_err(|_| failed(format!("not for {target}")))?;
        }
        Ok(targets.join(", "))
    }

    fn msrv(&self) -> Result<String> {
        let stated = self.field("rust_version")?;
        let version = process::output(Command::new("rustc").arg("--version").current_dir(&self.repo.root))?;
        let have = version.split_whitespace().nth(1).unwrap_or_default();
        if is_version(have, stated) {
            return Ok(format!("{stated}, which is this toolchain: {have}"));
        }
        if process::quiet_output(Command::new("rustup").args(["run", stated, "rustc", "--version"])).is_none()
        {
            return Ok(format!("skipped: Rust {stated} is not here, {have} is"));
        }
        let mut check = self.repo.cargo();
        check.arg(format!("+{stated}")).args(["check", "--quiet", "--locked", "--target-dir"]);
        check.arg(self.repo.target.join("msrv"));
        process::run(&mut check).map_err(|_| failed(format!("not with {stated}")))?;
        Ok(format!("{stated} compiles"))
    }

    /// Returns cargo-deny. If it is not installed, it is built without optimisations: it takes
    /// longer to build than to run.
    fn cargo_deny(&self) -> Option<Command> {
        let built = self.tools.join("bin/cargo-deny");
        let program = match process::find("cargo-deny") {
            Some(installed) => installed,
            None if built.exists() => built,
            None => {
                let mut install = self.repo.cargo();
                install
                    .args(["install", "--quiet", "--locked", "--debug", CARGO_DENY, "--root"])
                    .arg(&self.tools);
                install.env("CARGO_TARGET_DIR", self.tools.join("build")).env("CARGO_PROFILE_DEV_DEBUG", "0");
                process::run(&mut install).ok()?;
                built
            }
        };
        let mut command = Command::new(program);
        command.current_dir(&self.repo.root);
        Some(command)
    }

    fn deny(&self) -> Result<String> {
        let [Some(mut of_crate), Some(mut of_all)] = [(); 2].map(|()| self.cargo_deny()) else {
            return Ok("skipped: cargo-deny cannot be built here".into());
        };
        // Only the crate is shipped, but the whole workspace is compiled here.
        let licences = checked(of_crate.args(["--log-level", "error", "check", "licenses"]))?;
        let others = ["--workspace", "--log-level", "error", "check", "bans", "sources"];
        Ok(format!("{licences}, {}", checked(of_all.args(others))?))
    }

    fn audit(&self) -> Result<String> {
        let Some(mut fetch) = self.cargo_deny() else {
            return Ok("skipped: cargo-deny cannot be built here".into());
        };
        if process::quiet_output(fetch.args(["fetch", "db"])).is_none() {
            return Ok("skipped: RustSec's advisories cannot be fetched".into());
        }
        let mut deny = self.cargo_deny().ok_or_else(|| failed("cargo-deny has gone"))?;
        checked(deny.args(["--workspace", "--log-level", "error", "check", "advisories"]))
    }

    fn semver(&self) -> Result<String> {
        let name = self.field("name")?;
        let mut info = Command::new("cargo");
        // Another folder is used: here the command would describe the local crate.
        info.current_dir(env::temp_dir()).args(["info", "--quiet", "--registry", "crates-io", name]);
        if process::quiet_output(&mut info).is_none() {
            return Ok("skipped: crates.io shows no version to compare with".into());
        }
        if !process::have(&["cargo-semver-checks"]) {
            return Ok("skipped: cargo-semver-checks is not installed".into());
        }
        process::run(self.repo.cargo().arg("semver-checks")).map_err(|_| failed("see above"))?;
        Ok("the version's number fits what changed".into())
    }
}

/// Returns the output of a program. If the program fails, the output is printed.
fn said(command: &mut Command, what: &str) -> Result<String> {
    let Output { status, stdout, stderr } = command.output()?;
    let text = String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned();
    if status.success() {
        return Ok(text);
    }
    print!("{text}");
    Err(failed(what))
}

/// Returns cargo-deny's last line.
fn checked(deny: &mut Command) -> Result<String> {
    let text = said(deny, "see above")?;
    Ok(text.lines().last().unwrap_or_default().into())
}

/// True if `have` is `stated` or a patch release of it.
fn is_version(have: &str, stated: &str) -> bool {
    have.strip_prefix(stated).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert!(is_version("1.95.0", "1.95") && is_version("1.95", "1.95"));
        assert!(!is_version("1.950.0", "1.95") && !is_version("1.96.0", "1.95"));
    }
}
