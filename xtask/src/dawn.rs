//! `scripts/dawn`: Chromium's WebGPU, for Node.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;

use crate::error::Result;
use crate::npm;
use crate::repo::Repo;

const PACKAGE: &str = "webgpu@0.6.2";

const USAGE: &str = "\
scripts/dawn: fetches Dawn, Chromium's WebGPU for Node, once with npm into target/dawn, and prints its path.
Exit status 1 if that fails: without node, npm or the package.
";

pub fn main(repo: &Repo, arguments: Vec<OsString>) -> Result {
    if arguments.is_empty() {
        println!("{}", fetch(repo, || io::stderr().into())?.display());
    } else {
        print!("{USAGE}");
    }
    Ok(())
}

/// Fetches Dawn, and returns its folder. npm's output goes into the log.
pub fn fetch(repo: &Repo, log: impl Fn() -> Stdio) -> Result<PathBuf> {
    npm::fetch(repo, "dawn", PACKAGE, log)
}
