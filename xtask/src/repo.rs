//! The repository of the scripts.

use std::path::{Path, PathBuf, absolute};
use std::process::Command;
use std::{env, fs};

use serde_json::Value;

use crate::error::{At, Result, failed};
use crate::process;

/// The crate that is published.
const CRATE: &str = "wgpu-attention";

#[derive(Clone)]
pub struct Repo {
    pub root: PathBuf,
    /// `CARGO_TARGET_DIR`, or `target`.
    pub target: PathBuf,
}

impl Repo {
    pub fn new(root: &Path) -> Result<Self> {
        let root = absolute(root).at(root)?;
        let chosen = env::var_os("CARGO_TARGET_DIR").filter(|folder| !folder.is_empty());
        let target = absolute(chosen.map_or_else(|| root.join("target"), PathBuf::from)).at(&root)?;
        fs::create_dir_all(&target).at(&target)?;
        // Backups skip a folder with this mark. Cargo writes it only into folders that it creates.
        let mark = target.join("CACHEDIR.TAG");
        if !mark.exists() {
            let _ = fs::write(mark, "Signature: 8a477f597d28d172789f06886806bc55\n");
        }
        Ok(Repo { root, target })
    }

    /// Returns cargo at the root, so that a relative `CARGO_TARGET_DIR` has one meaning.
    pub fn cargo(&self) -> Command {
        let mut cargo = Command::new("cargo");
        cargo.current_dir(&self.root);
        if env::var_os("CARGO_TARGET_DIR").is_some() {
            cargo.env("CARGO_TARGET_DIR", &self.target);
        }
        cargo
    }

    /// Returns a folder under `target`, which it creates.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.target.join(name);
        fs::create_dir_all(&folder).at(&folder)?;
        Ok(folder)
    }

    /// Returns cargo's metadata of the workspace's packages.
    fn packages(&self) -> Result<Vec<Value>> {
        let text =
            process::output(self.cargo().args(["metadata", "--no-deps", "--format-version=1", "--locked"]))?;
        let mut all: Value = serde_json::from_str(&text).map_err(failed)?;
        Ok(all["packages"].as_array_mut().map(std::mem::take).unwrap_or_default())
    }

    /// Returns cargo's metadata of the crate.
    pub fn own_package(&self) -> Result<Value> {
        let own = self.packages()?.into_iter().find(|package| package["name"] == CRATE);
        own.ok_or_else(|| failed(format!("cargo knows no {CRATE}")))
    }

    /// Returns the names of the crates that are published.
    pub fn published(&self) -> Result<Vec<String>> {
        let packages = self.packages()?;
        let published = packages.iter().filter(|package| package["publish"].is_null());
        Ok(published.filter_map(|package| package["name"].as_str().map(str::to_owned)).collect())
    }

    /// Returns the names of all targets of a kind: `bench`, `test` ...
    pub fn targets(&self, kind: &str) -> Result<Vec<String>> {
        let of_kind =
            |target: &&Value| target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|k| k == kind));
        let name = |target: &Value| target["name"].as_str().map(str::to_owned);
        let names = |package: &Value| {
            let targets = package["targets"].as_array().into_iter().flatten();
            targets.filter(of_kind).filter_map(name).collect::<Vec<_>>()
        };
        Ok(self.packages()?.iter().flat_map(names).collect())
    }
}

/// Returns the programs that `--message-format=json` names.
pub fn executables(messages: &str) -> Vec<(String, PathBuf)> {
    let programs = messages.lines().filter_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        Some((message["target"]["name"].as_str()?.to_owned(), message["executable"].as_str()?.into()))
    });
    programs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_messages() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"half","kind":["lib"]},"executable":null}
            {"reason":"compiler-artifact","target":{"name":"tests","kind":["test"]},"executable":"/t/tests-01ab"}
            not JSON
            {"reason":"build-finished","success":true}"#;
        assert_eq!(executables(messages), [("tests".to_owned(), PathBuf::from("/t/tests-01ab"))]);
    }
}
