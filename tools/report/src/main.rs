//! `cargo run -p report [-- ROWS... [--results FILE] [--plots DIR] [--software] [--brief]]`
//!
//! Makes tables and plots from the rows that benches write. The rows are files of JSON lines, one
//! for each visit to a machine. Without files, it reads `benches/rows/*.jsonl` and writes
//! `benches/RESULTS.md` and `benches/plots`. A test compares them with the committed files. The
//! results of software drivers say nothing about GPUs: the tables omit them without `--software`,
//! and plots name the driver. `--brief` prints a line for each ceiling and each kernel except
//! staged ones, and writes nothing.
//!
//! `cargo run -p report -- --cache-formats FILE` draws `docs/caches.svg` instead. It reads no rows.
//! FILE is what `chat --perplexity README.md > FILE` has written.

mod cache_formats;
mod figure;
mod growth;
mod output;
mod peers;
mod picture;
mod share;
mod tables;
#[cfg(test)]
mod tests;
mod visit;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{fs, process};

use output::Wanted;
use visit::Visit;

/// The repository's folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The work of one run.
enum Task {
    Files(Wanted),
    Brief(Wanted),
    /// Draws the table in a file of `chat --perplexity`.
    CacheFormats(PathBuf),
}

/// Reads the command line.
fn task() -> Result<Task, Box<dyn Error>> {
    use lexopt::prelude::*;
    let (mut wanted, mut brief, mut cache_formats) = (Wanted::default(), false, None);
    let mut parser = lexopt::Parser::from_env();
    while let Some(argument) = parser.next()? {
        match argument {
            Long("results") => wanted.results = Some(parser.value()?.into()),
            Long("plots") => wanted.plots = Some(parser.value()?.into()),
            Long("software") => wanted.software = true,
            Long("brief") => brief = true,
            Long("cache-formats") => cache_formats = Some(PathBuf::from(parser.value()?)),
            Value(file) => wanted.rows.push(file.into()),
            other => return Err(other.unexpected().into()),
        }
    }
    if let Some(file) = cache_formats {
        if brief || wanted != Wanted::default() {
            return Err("--cache-formats takes no rows and no other option".into());
        }
        return Ok(Task::CacheFormats(file));
    }
    if wanted.rows.is_empty() {
        wanted = Wanted::committed(&root())?;
    }
    Ok(if brief { Task::Brief(wanted) } else { Task::Files(wanted) })
}

/// Draws the table in `file`. Returns the picture and its path.
fn cache_formats(file: &Path) -> Result<(PathBuf, String), Box<dyn Error>> {
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let text = fs::read_to_string(file).map_err(|error| named(&error))?;
    let picture = cache_formats::plot(&text).map_err(|error| named(&error))?;
    Ok((root().join("docs/caches.svg"), picture))
}

fn run() -> Result<(), Box<dyn Error>> {
    let files = match task()? {
        Task::Brief(wanted) => {
            for file in &wanted.rows {
                print!("{}", tables::brief(&Visit::read(file)?));
            }
            return Ok(());
        }
        Task::Files(wanted) => wanted.files()?,
        Task::CacheFormats(file) => vec![cache_formats(&file)?],
    };
    for (path, text) in files {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(&path, text)?;
        println!("{}", path.display());
    }
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("report: {error}");
        process::exit(1);
    }
}
