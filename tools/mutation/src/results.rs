//! The file of results, one line for each run.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::site::Kind;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry {
    pub name: String,
    pub file: String,
    pub line: usize,
    pub kind: Kind,
    pub before: String,
    pub after: String,
    /// The parts of the tests that ran.
    pub parts: Vec<String>,
    /// The number of tests that reach the fault.
    pub tests: usize,
    /// `killed by …`, `survived`, `not reached`, `open` or `refused by the compiler`.
    pub outcome: String,
    pub seconds: f64,
}

impl Entry {
    /// True if further tests may find the fault.
    pub fn may_be_found(&self) -> bool {
        ["survived", "not reached", "open"].contains(&self.outcome.as_str())
    }
}

pub struct Results {
    path: PathBuf,
    /// The last entry of each name.
    entries: BTreeMap<String, Entry>,
}

impl Results {
    pub fn read(path: &Path) -> io::Result<Self> {
        let text = if path.exists() { fs::read_to_string(path)? } else { String::new() };
        let lines: Result<Vec<Entry>, _> = text.lines().map(serde_json::from_str).collect();
        let entries = lines?.into_iter().map(|entry| (entry.name.clone(), entry)).collect();
        Ok(Results { path: path.into(), entries })
    }

    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }

    pub fn add(&mut self, entry: Entry) -> io::Result<()> {
        let mut file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        writeln!(file, "{}", serde_json::to_string(&entry)?)?;
        self.entries.insert(entry.name.clone(), entry);
        Ok(())
    }
}
