//! Faults with their results. `faults.jsonl` has the results of all runs; a log has those since.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::site::Fault;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry {
    #[serde(flatten)]
    pub fault: Fault,
    /// The parts of the tests that ran.
    pub parts: Vec<String>,
    /// The number of tests that reach the fault.
    pub tests: usize,
    /// `killed by …`, `survived`, `not reached`, `open` or `refused by the compiler`. Empty before
    /// the first run.
    pub outcome: String,
    pub seconds: f64,
    /// Why tests do not find it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

impl Entry {
    /// A fault that has not run.
    pub fn new(fault: Fault) -> Self {
        Entry { fault, parts: vec![], tests: 0, outcome: String::new(), seconds: 0.0, reason: String::new() }
    }

    /// True if further tests may find the fault.
    pub fn may_be_found(&self) -> bool {
        ["survived", "not reached", "open"].contains(&self.outcome.as_str())
    }
}

/// Results of files. A later one replaces an earlier one of the same fault.
#[derive(Default)]
pub struct Results(BTreeMap<Fault, Entry>);

impl Results {
    pub fn read(paths: &[&Path]) -> io::Result<Self> {
        let mut results = Results::default();
        for path in paths.iter().filter(|path| path.exists()) {
            for line in fs::read_to_string(path)?.lines() {
                results.add(serde_json::from_str(line)?);
            }
        }
        Ok(results)
    }

    fn add(&mut self, mut entry: Entry) {
        // Reasons are written by hand.
        if entry.reason.is_empty()
            && entry.may_be_found()
            && let Some(earlier) = self.0.get(&entry.fault)
        {
            entry.reason = earlier.reason.clone();
        }
        self.0.insert(entry.fault.clone(), entry);
    }

    pub fn get(&self, fault: &Fault) -> Option<&Entry> {
        self.0.get(fault)
    }

    pub fn faults(&self) -> impl Iterator<Item = &Fault> {
        self.0.keys()
    }
}

/// The files of results.
pub struct Files {
    pub recorded: PathBuf,
    pub log: PathBuf,
}

impl Files {
    pub fn read(&self) -> io::Result<Results> {
        Results::read(&[&self.recorded, &self.log])
    }

    /// Adds a result to the log, which several processes write.
    pub fn log(&self, entry: &Entry) -> io::Result<()> {
        let mut file = OpenOptions::new().create(true).append(true).open(&self.log)?;
        writeln!(file, "{}", serde_json::to_string(entry)?)
    }

    /// Moves the log's results into the recorded ones, which are those of `entries`.
    pub fn record(&self, entries: &[Entry]) -> io::Result<()> {
        let lines: Result<Vec<_>, _> = entries.iter().map(serde_json::to_string).collect();
        fs::write(&self.recorded, lines?.join("\n") + "\n")?;
        match fs::remove_file(&self.log) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}
