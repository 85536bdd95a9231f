//! The verdicts of earlier runs. A run compiles only what has changed since, so that a stopped run
//! can be continued.
//!
//! A hash of the kernel's text, of the question and of the compiler identifies a verdict. A
//! compiler is its command, the versions in `Cargo.lock`, and the sources of this program that call
//! it. Rejections are not stored.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::sync::Mutex;

use crate::translate;
use crate::verdict::Verdict;

type Error = Box<dyn std::error::Error>;

/// Files that only select variants, print, or judge verdicts.
const WITHOUT_VERDICTS: [&str; 9] = [
    "call.rs",
    "compiled.rs",
    "cover.rs",
    "main.rs",
    "model.rs",
    "permitted.rs",
    "permitted.txt",
    "table.rs",
    "verdict_cache.rs",
];

/// The stored verdicts, by their keys.
pub struct VerdictCache {
    verdicts: HashMap<u64, Verdict>,
    /// The file that they are appended to, a line of JSON each.
    file: Mutex<File>,
    stamp: u64,
}

impl VerdictCache {
    /// Reads the verdicts in the file at `path`, which need not exist. `root` is the repository.
    pub fn open(path: &Path, root: &Path) -> Result<Self, Error> {
        let file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
        let mut verdicts = HashMap::new();
        for line in BufReader::new(&file).lines() {
            // The last line of a stopped run may be incomplete.
            if let Ok((key, verdict)) = serde_json::from_str(&line?) {
                verdicts.insert(key, verdict);
            }
        }
        Ok(VerdictCache { verdicts, file: Mutex::new(file), stamp: stamp(root)? })
    }

    /// Returns the key of a question: the texts that determine the verdict.
    pub fn key(&self, texts: &[&str]) -> u64 {
        let stamp = self.stamp.to_le_bytes();
        // A byte that no text contains ends each text.
        let bytes = texts.iter().flat_map(|text| text.bytes().chain([0xff]));
        translate::fnv(stamp.into_iter().chain(bytes))
    }

    pub fn get(&self, key: u64) -> Option<&Verdict> {
        self.verdicts.get(&key)
    }

    /// Stores a verdict for later runs, unless it is a rejection.
    pub fn store(&self, key: u64, verdict: &Verdict) -> std::io::Result<()> {
        if !verdict.is_accepted() {
            return Ok(());
        }
        let line = serde_json::to_string(&(key, verdict))?;
        writeln!(self.file.lock().expect("nobody panics with it"), "{line}")
    }
}

/// Returns a hash of everything in the repository that determines verdicts, except kernels.
fn stamp(root: &Path) -> Result<u64, Error> {
    let here = root.join("tools/shaders");
    // The scripts name the versions of what they fetch.
    let mut paths = ["Cargo.lock", "scripts/dawn", "scripts/shaders"].map(|path| root.join(path)).to_vec();
    for folder in ["src", "metal", ""] {
        for entry in std::fs::read_dir(here.join(folder))? {
            let entry = entry?;
            let name = entry.file_name();
            let counts = !WITHOUT_VERDICTS.iter().any(|other| name == *other);
            if counts && entry.file_type()?.is_file() {
                paths.push(entry.path());
            }
        }
    }
    paths.sort_unstable();
    let mut bytes = Vec::new();
    for path in paths {
        bytes.extend(std::fs::read(path)?);
    }
    Ok(translate::fnv(bytes.into_iter()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_run_has_accepted_verdicts() {
        let path = std::env::temp_dir().join(format!("verdicts-{}.jsonl", std::process::id()));
        let cache = VerdictCache::open(&path, &crate::root()).unwrap();
        let [a, b, c] = [["a", "b"], ["ab", ""], ["a", "c"]].map(|texts| cache.key(&texts));
        assert!(a != b && a != c);
        cache.store(a, &Verdict::UniformLoads(3)).unwrap();
        cache.store(b, &Verdict::Rejected("why".into())).unwrap();
        assert_eq!(cache.get(a), None);
        std::fs::write(&path, std::fs::read_to_string(&path).unwrap() + "[12, {\"Comp").unwrap();
        let cache = VerdictCache::open(&path, &crate::root()).unwrap();
        assert_eq!(cache.get(a), Some(&Verdict::UniformLoads(3)));
        assert_eq!(cache.get(b), None);
        std::fs::remove_file(&path).unwrap();
    }
}
