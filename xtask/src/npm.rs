//! Packages of npm, unpacked under `target`.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::error::{At, Result, failed};
use crate::process;
use crate::repo::Repo;

/// Fetches `package`, as `name@version`, once into the folder `target/NAME`, and returns the
/// folder. npm's output goes into the log.
pub fn fetch(repo: &Repo, name: &str, package: &str, log: impl Fn() -> Stdio) -> Result<PathBuf> {
    let folder = repo.folder(name)?;
    let done = folder.join(package.replace('/', "+"));
    if !done.exists() {
        if !process::have(&["node", "npm"]) {
            return Err(failed("no node or no npm"));
        }
        let mut npm = Command::new("npm");
        npm.arg("install").arg("--prefix").arg(&folder);
        npm.args(["--no-audit", "--no-fund", "--ignore-scripts", package]).stdout(log()).stderr(log());
        if !npm.status().is_ok_and(|status| status.success()) {
            return Err(failed(format!("npm cannot fetch {package}")));
        }
        fs::write(&done, "").at(&done)?;
    }
    Ok(folder)
}
