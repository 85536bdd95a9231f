//! Puts seeded faults into shaders and host code, and runs the tests with each. `scripts/mutation
//! --help` prints the options.

mod coverage;
mod host;
mod page;
mod results;
mod site;
mod suite;
mod tree;
mod wgsl;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use std::{env, fs};

use lexopt::prelude::*;

use results::{Entry, Files, Results};
use site::{Fault, Kind, Site};
use suite::{Outcome, Reach, Suite};

const SEED: u64 = 2026;

const OF_SHADERS: [(Kind, usize); 6] = [
    (Kind::MaskRule, 20),
    (Kind::Barrier, 15),
    (Kind::Stride, 15),
    (Kind::Bound, 35),
    (Kind::Operand, 25),
    (Kind::Constant, 20),
];

const OF_HOST: [(Kind, usize); 5] =
    [(Kind::MaskRule, 8), (Kind::Stride, 7), (Kind::Bound, 20), (Kind::Operand, 20), (Kind::Constant, 15)];

/// Folders of `src` with faults. Folders whose values only change the speed are left out.
const HOST_FOLDERS: [&str; 14] = [
    "additive",
    "attention",
    "cache",
    "layers",
    "linear_attention",
    "linformer",
    "local",
    "lsh",
    "mask",
    "matmul",
    "position",
    "recurrent",
    "rows",
    "selected",
];

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

#[derive(Default)]
struct Options {
    command: String,
    program: PathBuf,
    /// Parts of the tests: texts of the tests' names.
    filters: Vec<String>,
    only: String,
    minutes: Option<u64>,
    /// The number of the first fault.
    from: usize,
    /// The most seconds of tests for a fault.
    seconds: Option<f64>,
    /// Runs recorded survivors again.
    again: bool,
}

impl Options {
    fn read() -> std::result::Result<Self, lexopt::Error> {
        let mut options = Options::default();
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Long("program") => options.program = parser.value()?.into(),
                Long("filter") => options.filters.push(parser.value()?.string()?),
                Long("only") => options.only = parser.value()?.string()?,
                Long("seconds") => options.seconds = Some(parser.value()?.parse()?),
                Long("again") => options.again = true,
                Long("from") => options.from = parser.value()?.parse()?,
                Long("minutes") => options.minutes = Some(parser.value()?.parse()?),
                Value(command) if options.command.is_empty() => options.command = command.string()?,
                _ => return Err(argument.unexpected()),
            }
        }
        Ok(options)
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mutation: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result {
    let options = Options::read()?;
    let repo = env::current_dir()?;
    let work = env::var_os("CARGO_TARGET_DIR").map_or(repo.join("target"), PathBuf::from).join("mutants");
    let files = Files { recorded: repo.join("tools/mutation/faults.jsonl"), log: work.join("results.jsonl") };
    let earlier = files.read()?.faults().cloned().collect();
    let (shaders, host) = (drawn_shaders(&repo, &earlier)?, drawn_host(&repo, &earlier)?);
    match options.command.as_str() {
        "list" => {
            shaders.iter().chain(&host).for_each(|site| println!("{}: {}", site.fault.kind, site.name()))
        }
        "tree" => host::write_tree(&repo, &work.join("tree"), &host)?,
        "run" => run_all(&options, &repo, &work, &files, (&shaders, &host))?,
        "page" => write_page(&repo, &files, &[shaders, host].concat())?,
        "coverage-tree" => coverage::write_tree(&repo, &coverage_in(&work).join("tree"), &blocks(&repo)?)?,
        "coverage-page" => write_coverage(&repo, &coverage_in(&work))?,
        other => return Err(format!("no command `{other}`").into()),
    }
    Ok(())
}

/// Records the results, and writes the page.
fn write_page(repo: &Path, files: &Files, drawn: &[Site]) -> Result {
    let results = files.read()?;
    let entry = |site: &Site| results.get(&site.fault).cloned();
    let entries: Vec<Entry> =
        drawn.iter().map(|site| entry(site).unwrap_or_else(|| Entry::new(site.fault.clone()))).collect();
    let named: Vec<(String, &Entry)> =
        drawn.iter().map(Site::name).zip(&entries).filter(|(_, entry)| !entry.outcome.is_empty()).collect();
    fs::write(repo.join("docs/notebook/mutations.md"), page::text(&named, drawn.len()))?;
    Ok(files.record(&entries)?)
}

/// The reasons in a file, which has a name, a tab and the reason in each line.
fn reasons(path: &Path) -> Result<BTreeMap<String, String>> {
    let text = fs::read_to_string(path)?;
    let pairs = text.lines().filter_map(|line| line.split_once('\t'));
    Ok(pairs.map(|(name, reason)| (name.into(), reason.into())).collect())
}

/// The folder of the copy with flags.
fn coverage_in(work: &Path) -> PathBuf {
    work.with_file_name("coverage")
}

fn blocks(repo: &Path) -> Result<Vec<coverage::Block>> {
    let mut all = Vec::new();
    for (file, text) in files(repo, "shaders", "wgsl")? {
        all.extend(coverage::blocks(&file, &text));
    }
    Ok(all)
}

fn write_coverage(repo: &Path, work: &Path) -> Result {
    let blocks = blocks(repo)?;
    let text = fs::read_to_string(work.join("reached"))?;
    let (flags, notes) = coverage::read_flags(&text, blocks.len());
    notes.iter().for_each(|note| println!("{note}"));
    let runs = fs::read_to_string(work.join("runs"))?;
    let runs: String = runs.lines().map(|run| format!("- {run}\n")).collect();
    let runs = format!("The runs:\n\n{}", runs.trim_end());
    let reasons = reasons(&repo.join("tools/mutation/unreached.txt"))?;
    fs::write(repo.join("docs/notebook/coverage.md"), coverage::page(&blocks, &flags, &runs, &reasons))?;
    Ok(())
}

fn drawn_shaders(repo: &Path, earlier: &BTreeSet<Fault>) -> Result<Vec<Site>> {
    let sites = sites(repo, "shaders", "wgsl", wgsl::sites)?;
    Ok(site::draw(&sites, earlier, &OF_SHADERS, SEED))
}

fn drawn_host(repo: &Path, earlier: &BTreeSet<Fault>) -> Result<Vec<Site>> {
    let mut all = Vec::new();
    for folder in HOST_FOLDERS {
        all.extend(sites(repo, &format!("src/{folder}"), "rs", host::sites)?);
    }
    all.retain(|site| !["reference", "/plan", "/tests"].iter().any(|part| site.fault.file.contains(part)));
    Ok(site::draw(&all, earlier, &OF_HOST, SEED))
}

/// All sites in the files of a folder, in the order of their names.
fn sites(repo: &Path, folder: &str, extension: &str, of: fn(&str, &str) -> Vec<Site>) -> Result<Vec<Site>> {
    let files = files(repo, folder, extension)?;
    Ok(files.iter().flat_map(|(file, text)| of(file, text)).collect())
}

/// The files of a folder with their texts, in the order of their names.
fn files(repo: &Path, folder: &str, extension: &str) -> Result<Vec<(String, String)>> {
    let mut names: Vec<String> = Vec::new();
    for entry in fs::read_dir(repo.join(folder))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    let mut all = Vec::new();
    for name in names {
        let path = format!("{folder}/{name}");
        if repo.join(&path).is_dir() {
            all.extend(files(repo, &path, extension)?);
        } else if path.ends_with(extension) {
            let text = fs::read_to_string(repo.join(&path))?;
            all.push((path, text));
        }
    }
    Ok(all)
}

/// Runs each fault that no test has found, with the parts of the tests that have not run it. The
/// order is random too, so that a part of the results is a fair sample.
fn run_all(
    options: &Options,
    repo: &Path,
    work: &Path,
    files: &Files,
    (shaders, host): (&[Site], &[Site]),
) -> Result {
    let end = options.minutes.map(|minutes| Instant::now() + Duration::from_secs(minutes * 60));
    let suite = Suite::new(&options.program, &options.filters, &work.join("tree"), work)?;
    let numbers = (1..).map(Some);
    let mut all: Vec<(Option<usize>, &Site)> =
        shaders.iter().map(|site| (None, site)).chain(numbers.zip(host)).collect();
    all.sort_by_key(|(_, site)| site::rank(&site.fault, !SEED));
    all.rotate_left(options.from);
    let recorded = Results::read(&[&files.recorded])?;
    for (number, site) in all {
        // Other processes write results too.
        let logged = Results::read(&[&files.log])?.get(&site.fault).cloned();
        let is_known = |entry: &&Entry| !(entry.outcome.is_empty() || options.again && entry.may_be_found());
        let known = logged.or_else(|| recorded.get(&site.fault).filter(is_known).cloned());
        let is_done = known.as_ref().is_some_and(|entry| {
            !entry.may_be_found() || suite.parts().iter().all(|part| entry.parts.contains(part))
        });
        if is_done || !site.name().contains(&options.only) || end.is_some_and(|end| Instant::now() > end) {
            continue;
        }
        let most = options.seconds.unwrap_or(f64::INFINITY);
        let entry = entry(&suite, repo, work, (number, site), known, most)?;
        println!("{:6.1} s  {}  {}", entry.seconds, entry.outcome, site.name());
        files.log(&entry)?;
    }
    let _ = fs::remove_file(copy_in(work));
    Ok(())
}

/// The place of this process's copy of the program.
fn copy_in(work: &Path) -> PathBuf {
    work.join(format!("program-{}", std::process::id()))
}

/// Runs the tests that reach a fault. `known` is the result of earlier parts.
fn entry(
    suite: &Suite,
    repo: &Path,
    work: &Path,
    (number, site): (Option<usize>, &Site),
    known: Option<Entry>,
    most: f64,
) -> Result<Entry> {
    let start = Instant::now();
    let mut parts = known.as_ref().map_or(vec![], |entry| entry.parts.clone());
    let seen = parts.clone();
    let (outcome, count) = match number {
        Some(n) => suite.run(&suite.program, &Reach { what: n.to_string(), number, seen }, most)?,
        None => {
            let text = fs::read_to_string(repo.join(&site.fault.file))?;
            let program = with_shader(&suite.program, work, site, &text)?;
            let what = text.lines().next().unwrap_or_default().into();
            suite.run(&program, &Reach { what, number, seen }, most)?
        }
    };
    let tests = known.filter(|_| !parts.is_empty()).map_or(0, |entry| entry.tests) + count;
    let outcome = match outcome {
        Outcome::Passed if tests == 0 => "not reached".into(),
        Outcome::Passed => "survived".into(),
        Outcome::Failed(test) => format!("killed by {test}"),
        Outcome::Crashed(status) => format!("killed by a crash ({status})"),
        Outcome::TimedOut => "killed by the time limit".into(),
        Outcome::Open => "open".into(),
        Outcome::Refused => "refused by the compiler".into(),
    };
    if outcome != "open" {
        parts.extend(suite.parts());
        parts.dedup();
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(Entry { parts, tests, outcome, seconds, ..Entry::new(site.fault.clone()) })
}

/// Writes the fault over the shader's text in a copy of the program.
fn with_shader(program: &Path, work: &Path, site: &Site, text: &str) -> Result<PathBuf> {
    let mut bytes = fs::read(program)?;
    let places: Vec<usize> = memchr::memmem::find_iter(&bytes, text).collect();
    if places.is_empty() {
        return Err(format!("{} is not in the program", site.fault.file).into());
    }
    for at in places {
        bytes[at + site.range.start..at + site.range.end].copy_from_slice(site.fault.after.as_bytes());
    }
    let copy = copy_in(work);
    fs::write(&copy, bytes)?;
    fs::set_permissions(&copy, fs::metadata(program)?.permissions())?;
    Ok(copy)
}
