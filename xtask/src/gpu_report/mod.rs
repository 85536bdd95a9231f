//! `scripts/gpu-report`: makes a whole visit to a machine with a GPU, in one command.

mod add;
mod pack;
mod rows;
mod suite;
mod visit;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{At, Result, ended, refused};
use crate::gpu;
use crate::repo::Repo;

const USAGE: &str = "\
scripts/gpu-report: makes a whole visit to a machine with a GPU, in one command.

  scripts/gpu-report [OPTIONS]
      packs into target/gpu-report, runs it here (see scripts/gpu), and adds the results of a GPU
  scripts/gpu-report pack FOLDER [--vulkan-loader]
      builds everything in release mode into FOLDER. It then runs without a toolchain: it needs this machine's
      architecture (such as x86-64), its glibc or a newer one, sh, tar and gzip
      --vulkan-loader: adds Debian's libvulkan.so.1, for machines that have none
  FOLDER/run [OPTIONS]
      runs it
  scripts/gpu-report add [--name NAME] DIR...
      adds what `run --out DIR` wrote, in one visit or in parts, to benches/rows/NAME.jsonl, and makes tables and plots
      again; results of a software driver need a NAME

  --out DIR        folder for results (FOLDER/out): visit.jsonl (every figure), RESULTS.md, plots, log.txt, summary.txt
  --minutes N      time limit for the whole visit (9)
  --parts LIST     a list of facts,ceilings,benches,unchecked,tests,torch, separated by commas (all)
  --benches LIST   only these benches, separated by commas
  --tests FILTER   only tests with FILTER in their names; may be repeated
  --no-tests       all parts except tests
  --threads N      tests at once (the number of processors, at most 8)
  --quick, --full  benches only show that they work (default on software drivers), or measure (default on GPUs)

Each part has a time limit and a row with its outcome, so that a part that hangs does not use the others' time. Tests
that fail, crash or hang run again alone, which shows the guilty test. The part `unchecked` repeats some calls of the
benches `kernels` and `decode` on a Vulkan device without robust access to buffers; its rows stand apart. Exit status:
0 if everything ran and nothing failed, else 1. VK_DRIVER_FILES, WGPU_BACKEND and other variables of Vulkan and wgpu
are honoured. The part `torch` needs python3 with torch.
";

fn say(text: impl std::fmt::Display) {
    println!("gpu-report: {text}");
}

/// The options of a visit.
#[derive(Clone, Debug, PartialEq)]
struct Options {
    out: Option<PathBuf>,
    minutes: u64,
    parts: Vec<Part>,
    /// Names of benches; empty for all.
    benches: Vec<String>,
    filters: Vec<String>,
    threads: usize,
    /// `--quick` or `--full`; `None`: the device decides.
    quick: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Facts,
    Ceilings,
    Benches,
    Unchecked,
    Tests,
    Torch,
}

const PARTS: [(&str, Part); 6] = [
    ("facts", Part::Facts),
    ("ceilings", Part::Ceilings),
    ("benches", Part::Benches),
    ("unchecked", Part::Unchecked),
    ("tests", Part::Tests),
    ("torch", Part::Torch),
];

impl Options {
    /// Returns `None` for `--help`.
    fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Option<Self>> {
        use lexopt::prelude::*;
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
        let parts = PARTS.map(|(_, part)| part).into();
        let (benches, filters) = (Vec::new(), Vec::new());
        let mut options = Options { out: None, minutes: 9, parts, benches, filters, threads, quick: None };
        let mut tests = true;
        let mut parser = lexopt::Parser::from_args(arguments);
        while let Some(argument) = parser.next()? {
            match argument {
                Long("out") => options.out = Some(parser.value()?.into()),
                Long("minutes") => options.minutes = parser.value()?.parse()?,
                Long("parts") => options.parts = parse_parts(&parser.value()?.string()?)?,
                Long("benches") => {
                    options.benches = parser.value()?.string()?.split(',').map(str::to_owned).collect()
                }
                Long("tests") => options.filters.push(parser.value()?.string()?),
                Long("no-tests") => tests = false,
                Long("threads") => options.threads = parser.value()?.parse()?,
                Long("quick") => options.quick = Some(true),
                Long("full") => options.quick = Some(false),
                Short('h') | Long("help") => return Ok(None),
                other => return Err(refused(format!("{}; --help says more", other.unexpected()))),
            }
        }
        if options.threads == 0 {
            return Err(refused("--threads takes a whole number from 1"));
        }
        options.parts.retain(|&part| tests || part != Part::Tests);
        Ok(Some(options))
    }
}

fn parse_parts(list: &str) -> Result<Vec<Part>> {
    let find = |name| PARTS.iter().find(|(part, _)| *part == name).map(|&(_, part)| part);
    list.split(',')
        .filter(|name| !name.is_empty())
        .map(|name| find(name).ok_or_else(|| refused(format!("there is no part {name}"))))
        .collect()
}

pub fn main(repo: &Repo, arguments: Vec<OsString>) -> Result {
    match arguments.first().and_then(|word| word.to_str()) {
        Some("pack") => pack::main(repo, &arguments[1..]),
        Some("add") => add::main(repo, &arguments[1..]),
        _ => here(repo, &arguments),
    }
}

/// The program behind `FOLDER/run`.
pub fn run_packed(folder: &Path, arguments: Vec<OsString>) -> Result {
    match Options::parse(arguments)? {
        Some(options) => visit::run(folder, &options, suite::run),
        None => help(),
    }
}

fn help() -> Result {
    print!("{USAGE}");
    Ok(())
}

/// Packs, visits this machine, and adds the results of a GPU.
fn here(repo: &Repo, arguments: &[OsString]) -> Result {
    if Options::parse(arguments.iter().cloned())?.is_none() {
        return help();
    }
    let folder = repo.target.join("gpu-report");
    pack::pack(repo, &folder, false)?;
    let out = folder.join("out");
    let mut run = Command::new(folder.join("run"));
    gpu::setup(repo)?.apply(&mut run);
    let status = run.arg("--out").arg(&out).args(arguments).status().at(&folder)?;
    let rows = rows::read(&out.join("visit.jsonl")).unwrap_or_default();
    if rows.iter().any(|row| row["bench"] == "facts") {
        if rows::of_software(&rows) {
            say("a software driver: nothing added to benches/RESULTS.md");
        } else {
            add::add(repo, None, &[out])?;
        }
    }
    if status.success() { Ok(()) } else { Err(ended(status)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Option<Options>> {
        Options::parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn options() {
        let all = parse("").unwrap().unwrap();
        assert_eq!((all.minutes, all.parts.len(), all.quick, &all.out), (9, 6, None, &None));
        assert!((1..=8).contains(&all.threads));
        let line =
            "--quick --parts facts,tests --benches d,e --tests a --tests=b --minutes 4 --threads 3 --out x";
        let some = parse(line).unwrap().unwrap();
        assert_eq!(some.benches, ["d", "e"]);
        assert_eq!(some.parts, [Part::Facts, Part::Tests]);
        assert_eq!(some.filters, ["a", "b"]);
        assert_eq!((some.minutes, some.threads, some.quick), (4, 3, Some(true)));
        assert_eq!(some.out.as_deref(), Some(Path::new("x")));
        assert_eq!(parse("--parts tests,torch --no-tests").unwrap().unwrap().parts, [Part::Torch]);
        assert_eq!(parse("--minutes 1 -h").unwrap(), None);
    }

    #[test]
    fn unknown_options_are_refused() {
        for line in ["--minutes", "--minutes x", "--threads 0", "--parts all", "--fast", "word"] {
            let error = parse(line).expect_err(line);
            assert_eq!(error.status, 2, "{line}: {error}");
            assert!(!error.text.is_empty(), "{line}");
        }
    }
}
