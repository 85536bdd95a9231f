//! Adds the results of visits to `benches/rows`, from which the tables and plots are made.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use super::{rows, say};
use crate::error::{At, Result, refused};
use crate::process;
use crate::repo::Repo;

pub fn main(repo: &Repo, arguments: &[OsString]) -> Result {
    use lexopt::prelude::*;
    let (mut name, mut folders) = (None, Vec::new());
    let mut parser = lexopt::Parser::from_args(arguments);
    while let Some(argument) = parser.next()? {
        match argument {
            Long("name") => name = Some(parser.value()?.string()?),
            Value(folder) => folders.push(PathBuf::from(folder)),
            other => return Err(other.unexpected().into()),
        }
    }
    add(repo, name, &folders)
}

pub fn add(repo: &Repo, name: Option<String>, folders: &[PathBuf]) -> Result {
    if folders.is_empty() {
        return Err(refused("add needs the folders that run wrote"));
    }
    let (mut all, mut lines) = (Vec::new(), String::new());
    for folder in folders {
        let path = folder.join("visit.jsonl");
        let text = fs::read_to_string(&path).unwrap_or_default();
        if text.is_empty() {
            return Err(refused(format!("there is no {}", path.display())));
        }
        all.extend(rows::read(&path)?);
        lines += &text;
    }
    let name = match name {
        Some(name) => name,
        None if rows::of_software(&all) => {
            return Err(refused(
                "a software driver says nothing about GPUs; give its rows a name to keep them for plots",
            ));
        }
        None => name_of(&all)
            .ok_or_else(|| refused("the rows do not say when and on which device: give them a --name"))?,
    };
    let path = repo.root.join(format!("benches/rows/{name}.jsonl"));
    fs::write(&path, lines).at(&path)?;
    say(format!("benches/rows/{name}.jsonl"));
    process::run(repo.cargo().args(["run", "-q", "--release", "--locked", "-p", "report"]))
}

/// Returns the date and the device of a visit.
fn name_of(rows: &[Value]) -> Option<String> {
    let device = rows::text(rows, "facts", "device")?.to_lowercase();
    let words: Vec<&str> =
        device.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
    Some(format!("{}-{}", rows::text(rows, "visit", "date")?, words.join("-")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names() {
        let visit = json!({"bench": "visit", "date": "2026-11-22", "commit": "c"});
        let device = "AMD Radeon RX 7900 (RADV NAVI31)";
        let facts = json!({"bench": "facts", "device": device, "device_type": "DiscreteGpu"});
        let rows = [visit.clone(), facts];
        assert_eq!(name_of(&rows).as_deref(), Some("2026-11-22-amd-radeon-rx-7900-radv-navi31"));
        assert_eq!(name_of(&[visit]), None);
        assert!(!rows::of_software(&rows));
        assert!(rows::of_software(&[json!({"bench": "facts", "device_type": "Cpu"})]));
    }
}
