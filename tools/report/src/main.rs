//! `cargo run -p report [-- ROWS... [--results FILE] [--plots DIR] [--software] [--brief]]`
//!
//! Makes tables and plots from the rows that benches write. The rows are files of JSON lines, one
//! for each visit to a machine. Without files, it reads `benches/rows/*.jsonl` and writes
//! `benches/RESULTS.md` and `benches/plots`. A test compares them with the committed files. The
//! results of software drivers say nothing about GPUs: the tables omit them without `--software`,
//! and plots name the driver. `--brief` prints a line for each ceiling and each kernel except
//! staged ones, and writes nothing.

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

/// Reads the command line. The boolean is `--brief`.
fn wanted() -> Result<(Wanted, bool), Box<dyn Error>> {
    use lexopt::prelude::*;
    let (mut wanted, mut brief) = (Wanted::default(), false);
    let mut parser = lexopt::Parser::from_env();
    while let Some(argument) = parser.next()? {
        match argument {
            Long("results") => wanted.results = Some(parser.value()?.into()),
            Long("plots") => wanted.plots = Some(parser.value()?.into()),
            Long("software") => wanted.software = true,
            Long("brief") => brief = true,
            Value(file) => wanted.rows.push(file.into()),
            other => return Err(other.unexpected().into()),
        }
    }
    if wanted.rows.is_empty() {
        wanted = Wanted::committed(&root())?;
    }
    Ok((wanted, brief))
}

fn run() -> Result<(), Box<dyn Error>> {
    let (wanted, brief) = wanted()?;
    if brief {
        for file in &wanted.rows {
            print!("{}", tables::brief(&Visit::read(file)?));
        }
        return Ok(());
    }
    for (path, text) in wanted.files()? {
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
