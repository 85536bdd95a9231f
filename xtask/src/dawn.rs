//! `scripts/dawn`: Chromium's WebGPU, for Node.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::{fs, io};

use crate::error::{At, Result, failed};
use crate::process;
use crate::repo::Repo;

const PACKAGE: &str = "webgpu@0.6.2";

const USAGE: &str = "\
scripts/dawn: Dawn, Chromium's WebGPU, for Node; fetched once by npm into target/dawn, whose path is printed.
Exit status 1 where that cannot be: no node, no npm, or not the package.
";

pub fn main(repo: &Repo, arguments: Vec<OsString>) -> Result {
    if arguments.is_empty() {
        println!("{}", fetch(repo, || io::stderr().into())?.display());
    } else {
        print!("{USAGE}");
    }
    Ok(())
}

/// Where it is. What npm says goes where `log` says.
pub fn fetch(repo: &Repo, log: impl Fn() -> Stdio) -> Result<PathBuf> {
    let folder = repo.folder("dawn")?;
    let done = folder.join(PACKAGE);
    if !done.exists() {
        if !process::have(&["node", "npm"]) {
            return Err(failed("no node or no npm"));
        }
        let mut npm = Command::new("npm");
        npm.arg("install").arg("--prefix").arg(&folder);
        npm.args(["--no-audit", "--no-fund", "--ignore-scripts", PACKAGE]).stdout(log()).stderr(log());
        if !npm.status().is_ok_and(|status| status.success()) {
            return Err(failed(format!("npm cannot fetch {PACKAGE}")));
        }
        fs::write(&done, "").at(&done)?;
    }
    Ok(folder)
}
