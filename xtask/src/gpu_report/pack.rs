//! Packs everything that a visit runs into one folder.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf, absolute};
use std::process::Command;

use super::say;
use crate::error::{At, Result, failed, refused};
use crate::files::{self, Temporary};
use crate::process;
use crate::repo::{Repo, executables};

const MOST_MIB: u64 = 60;

/// The bench that is not packed: it needs the workload files of other libraries.
const LEFT_OUT: &str = "peer";

/// The files that tests and PyTorch's part read.
const FILES: [&str; 7] = [
    "tests/vectors",
    "shaders",
    "docs/guide",
    "docs/masks",
    "src/presets",
    "examples/chat/src/tests.rs",
    "benches/sdpa.py",
];

const RUN: &str = r#"#!/bin/sh
here=$(dirname "$(realpath "$0")")
exec "$here/xtask" run-packed "$here" "$@"
"#;

pub fn main(repo: &Repo, arguments: &[OsString]) -> Result {
    use lexopt::prelude::*;
    let (mut folder, mut loader) = (None, false);
    let mut parser = lexopt::Parser::from_args(arguments);
    while let Some(argument) = parser.next()? {
        match argument {
            Long("vulkan-loader") => loader = true,
            Value(path) if folder.is_none() => folder = Some(absolute(PathBuf::from(path))?),
            other => return Err(other.unexpected().into()),
        }
    }
    pack(repo, &folder.ok_or_else(|| refused("pack needs a folder"))?, loader)
}

/// The archive of programs and data in a packed folder.
pub const PAYLOAD: &str = "payload.tar.xz";

pub fn pack(repo: &Repo, folder: &Path, loader: bool) -> Result {
    if holds_something_else(folder) {
        return Err(refused(format!("{} holds something else", folder.display())));
    }
    let temporary = Temporary::new(&std::env::temp_dir(), "gpu-report")?;
    let at = &temporary.0;
    let bin = at.join("bin");
    fs::create_dir(&bin).at(&bin)?;
    for (name, program) in programs(repo)? {
        let packed = bin.join(name);
        let stripped = process::quiet_output(Command::new("strip").arg("-o").arg(&packed).arg(&program));
        if stripped.is_none() {
            fs::copy(&program, &packed).at(&program)?;
        }
    }
    process::run(Command::new("cp").current_dir(&repo.root).args(["-r", "--parents"]).args(FILES).arg(at))?;
    if loader {
        add_loader(at)?;
    }

    files::remove_all(folder)?;
    fs::create_dir_all(folder).at(folder)?;
    let version = Version::of(repo);
    fs::write(folder.join("version"), version.to_lines()).at(folder)?;
    // Compressed to a quarter of the size. The programs share much code, which gzip does not find.
    let payload = folder.join(PAYLOAD);
    process::run(Command::new("tar").arg("-C").arg(at).arg("-cJf").arg(&payload).arg("."))?;
    let xtask = folder.join("xtask");
    let own = std::env::current_exe()?;
    if process::quiet_output(Command::new("strip").arg("-o").arg(&xtask).arg(&own)).is_none() {
        fs::copy(&own, &xtask).at(&xtask)?;
    }
    files::replace(&folder.join("run"), RUN, true)?;

    let bytes = files::size(folder)?;
    say(format!("{}: {version}, {} KiB", folder.display(), bytes >> 10));
    if bytes > MOST_MIB << 20 {
        return Err(refused(format!("that is more than {MOST_MIB} MiB")));
    }
    Ok(())
}

/// True if the folder is neither empty nor a packed folder.
fn holds_something_else(folder: &Path) -> bool {
    let empty = || fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
    folder.exists() && !folder.join("version").exists() && !empty()
}

/// Returns the suite, every bench and the tool that makes tables, by name.
fn programs(repo: &Repo) -> Result<Vec<(String, PathBuf)>> {
    let mut benches = repo.targets("bench")?;
    benches.retain(|name| name != LEFT_OUT);
    let mut only_benches = ["bench", "--no-run", "-p", "benches"].map(String::from).to_vec();
    only_benches.extend(benches.iter().map(|name| format!("--bench={name}")));
    let tests = ["test", "--release", "--no-run", "--test=tests"].map(String::from);
    let report = ["build", "--release", "-p", "report"].map(String::from);
    let mut made = Vec::new();
    for arguments in [&tests[..], &only_benches, &report] {
        made.extend(built(repo, arguments)?);
    }
    for name in benches.iter().map(String::as_str).chain(["tests", "report"]) {
        if !made.iter().any(|(program, _)| program == name) {
            return Err(refused(format!("cargo made no {name}")));
        }
    }
    Ok(made)
}

/// Returns the programs that cargo builds from these arguments.
fn built(repo: &Repo, arguments: &[String]) -> Result<Vec<(String, PathBuf)>> {
    let mut cargo = repo.cargo();
    let messages = process::output(
        cargo.args(arguments).args(["--locked", "--message-format=json-render-diagnostics"]),
    )?;
    Ok(executables(&messages))
}

/// Adds Debian's libvulkan.so.1.
fn add_loader(at: &Path) -> Result {
    let (lib, deb) = (at.join("lib"), at.join("deb"));
    fs::create_dir(&lib).at(&lib)?;
    fs::create_dir(&deb).at(&deb)?;
    let script = "apt-get -q download libvulkan1 >&2 && dpkg-deb -x libvulkan1_*.deb . && \
        cp -P usr/lib/*/libvulkan.so.1* ../lib";
    process::run(Command::new("sh").current_dir(&deb).args(["-c", script]))
        .map_err(|_| refused("libvulkan1 could not be had"))?;
    fs::remove_dir_all(&deb).at(&deb)
}

/// The state from which a folder was packed.
#[derive(Debug, PartialEq)]
pub struct Version {
    pub commit: String,
    /// True if there were uncommitted changes.
    pub dirty: bool,
}

impl Version {
    fn of(repo: &Repo) -> Self {
        let git = |arguments: &[&str]| {
            process::quiet_output(Command::new("git").current_dir(&repo.root).args(arguments))
        };
        let commit =
            git(&["describe", "--always", "--abbrev=12", "--exclude=*"]).unwrap_or_else(|| "unknown".into());
        let dirty = git(&["status", "--porcelain"]).is_some_and(|changes| !changes.is_empty());
        Version { commit: commit.trim().into(), dirty }
    }

    fn to_lines(&self) -> String {
        format!("commit={}\ndirty={}\n", self.commit, self.dirty)
    }

    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("version");
        let lines = fs::read_to_string(&path).at(&path)?;
        Version::parse(&lines).ok_or_else(|| failed(format!("{}: no version", path.display())))
    }

    fn parse(lines: &str) -> Option<Self> {
        let field = |name| lines.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        Some(Version { commit: field("commit")?.into(), dirty: field("dirty")? == "true" })
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "commit {}{}", self.commit, if self.dirty { " with uncommitted changes" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        let version = Version { commit: "0123456789ab".into(), dirty: true };
        assert_eq!(Version::parse(&version.to_lines()), Some(version));
        assert_eq!(Version::parse("commit=1"), None);
    }

    #[test]
    fn folders_of_others_are_left_alone() {
        let temporary = Temporary::new(&std::env::temp_dir(), "xtask-test-pack").unwrap();
        let folder = temporary.0.join("folder");
        assert!(!holds_something_else(&folder));
        fs::create_dir(&folder).unwrap();
        assert!(!holds_something_else(&folder));
        fs::write(folder.join("letter"), "").unwrap();
        assert!(holds_something_else(&folder));
        fs::write(folder.join("version"), "").unwrap();
        assert!(!holds_something_else(&folder));
    }
}
