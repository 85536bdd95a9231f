//! The files of a report.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use super::visit::Visit;
use super::{growth, peers, share, tables};

#[derive(Default, PartialEq)]
pub struct Wanted {
    pub rows: Vec<PathBuf>,
    pub results: Option<PathBuf>,
    pub plots: Option<PathBuf>,
    /// True if the tables include software drivers.
    pub software: bool,
}

impl Wanted {
    /// Returns the files that the repository contains.
    pub fn committed(root: &Path) -> Result<Self, Box<dyn Error>> {
        let benches = root.join("benches");
        let mut rows: Vec<PathBuf> = fs::read_dir(benches.join("rows"))?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_, std::io::Error>>()?;
        rows.retain(|path| path.extension().is_some_and(|e| e == "jsonl"));
        rows.sort();
        let (results, plots) = (benches.join("RESULTS.md"), benches.join("plots"));
        Ok(Wanted { rows, results: Some(results), plots: Some(plots), ..Default::default() })
    }

    pub fn files(&self) -> Result<Vec<(PathBuf, String)>, Box<dyn Error>> {
        let visits: Vec<Visit> = self.rows.iter().map(|file| Visit::read(file)).collect::<Result<_, _>>()?;
        let mut files = Vec::new();
        if let Some(path) = &self.results {
            files.push((path.clone(), tables::results(&visits, self.software)));
        }
        let Some(folder) = &self.plots else { return Ok(files) };
        for visit in &visits {
            let plots = [
                ("share", share::plot(visit)?),
                ("growth", growth::plot(visit)?),
                ("peers", peers::plot(visit)?),
            ];
            for (name, plot) in plots {
                let own = visit.name.starts_with(name);
                let stem = if own { visit.name.clone() } else { format!("{name}-{}", visit.name) };
                files.extend(plot.map(|svg| (folder.join(stem).with_extension("svg"), svg)));
            }
        }
        Ok(files)
    }
}
