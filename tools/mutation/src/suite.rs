//! The test programs: the tests that reach a fault, and runs up to the first failure.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Passed,
    /// The first test that failed.
    Failed(String),
    Crashed(String),
    TimedOut,
    /// The compiler refuses the kernel, so that the fault cannot be made.
    Refused,
    /// Tests are left to run.
    Open,
}

/// Parts of wgpu's errors about a kernel's text.
const REFUSALS: [&str; 2] = ["parsing error", "Shader validation error"];

/// A fault that runs, and how to know the tests that reach it.
pub struct Reach {
    /// The first line of its shader, or its number.
    pub what: String,
    /// Its number, for a fault in host code.
    pub number: Option<usize>,
    /// The parts of the tests that have run it.
    pub seen: Vec<String>,
}

/// The seconds of the first tests of a fault. Each later group takes four times as many.
const FIRST_SECONDS: f64 = 2.0;

/// A test program, and the parts of its tests that run.
pub struct Suite {
    pub program: PathBuf,
    repo: PathBuf,
    /// The standard error of the last run.
    errors: PathBuf,
    parts: Vec<Part>,
}

/// The tests whose names contain a text.
struct Part {
    /// The name in the results: the program and the text, as `tests small::`.
    name: String,
    /// The seconds of each test without a fault.
    seconds: BTreeMap<String, f64>,
    /// The tests that reach a fault in host code, by its number, or a shader, by its first line.
    reached: BTreeMap<String, BTreeSet<String>>,
}

impl Suite {
    /// Runs each part of the tests without a fault, if that was not done before.
    pub fn new(program: &Path, filters: &[String], repo: &Path, work: &Path) -> io::Result<Self> {
        let errors = work.join(format!("errors-{}", std::process::id()));
        let mut suite = Suite { program: program.into(), repo: repo.into(), errors, parts: Vec::new() };
        let stem = program.file_name().unwrap_or_default().to_string_lossy();
        for filter in filters {
            let [times, reached] =
                ["times", "reached"].map(|kind| work.join(format!("{stem}.{filter}.{kind}")));
            let made = |path: &Path| fs::metadata(path).and_then(|data| data.modified());
            if !made(&times).is_ok_and(|time| made(program).is_ok_and(|built| built < time)) {
                fs::write(&times, suite.without_fault(filter, &reached)?)?;
            }
            let mut part = Part {
                name: format!("{} {filter}", stem.split('-').next().unwrap_or_default()),
                seconds: fs::read_to_string(&times)?.lines().filter_map(seconds_of).collect(),
                reached: BTreeMap::new(),
            };
            for (test, what) in fs::read_to_string(&reached)?.lines().filter_map(|line| line.split_once('\t'))
            {
                part.reached.entry(what.into()).or_default().insert(test.into());
            }
            suite.parts.push(part);
        }
        Ok(suite)
    }

    /// The output of tests without a fault, which must pass.
    fn without_fault(&self, filter: &str, reached: &Path) -> io::Result<Vec<u8>> {
        let _ = fs::remove_file(reached);
        let mut command = self.command(&self.program, &["-Zunstable-options", "--report-time", filter]);
        // `--report-time` is not stable.
        command.env("RUSTC_BOOTSTRAP", "1").env("WGPU_ATTENTION_REACHED", reached);
        let output = command.stderr(Stdio::null()).output()?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let text = String::from_utf8_lossy(&output.stdout);
        Err(io::Error::other(format!("tests fail without a fault:\n{text}")))
    }

    /// The names of all parts.
    pub fn parts(&self) -> Vec<String> {
        self.parts.iter().map(|part| part.name.clone()).collect()
    }

    /// The tests that reach `what` with their seconds, the fastest first. `seen` are parts to leave
    /// out.
    fn reaching(&self, what: &str, seen: &[String]) -> Vec<(&str, f64)> {
        let mut tests = Vec::new();
        for part in self.parts.iter().filter(|part| !seen.contains(&part.name)) {
            let names = part.reached.get(what).into_iter().flatten();
            tests.extend(names.filter_map(|test| part.seconds.get_key_value(test.as_str())));
        }
        tests.sort_by(|a, b| a.1.total_cmp(b.1));
        tests.into_iter().map(|(test, seconds)| (test.as_str(), *seconds)).collect()
    }

    /// Runs `program`, which is this program or a copy with a fault, with the tests that reach
    /// `what`. Returns their number too. After `most` seconds of tests the outcome is open.
    pub fn run(&self, program: &Path, reach: &Reach, most: f64) -> io::Result<(Outcome, usize)> {
        let tests = self.reaching(&reach.what, &reach.seen);
        let mut rest = &tests[..];
        let (mut size, mut done) = (FIRST_SECONDS, 0.0);
        while !rest.is_empty() {
            let mut sum = 0.0;
            let fits = rest.iter().take_while(|(_, seconds)| {
                sum += seconds;
                sum <= size
            });
            let (group, later) = rest.split_at(fits.count().max(1));
            let seconds: f64 = group.iter().map(|(_, seconds)| seconds).sum();
            done += seconds;
            if done > most {
                return Ok((Outcome::Open, tests.len()));
            }
            let mut command = self.command(program, &["--exact", "--nocapture"]);
            command.args(group.iter().map(|(test, _)| test)).stderr(File::create(&self.errors)?);
            command.envs(reach.number.map(|number| (crate::host::VARIABLE, number.to_string())));
            let outcome = first_failure(&mut command, Duration::from_secs_f64(5.0 * seconds + 120.0))?;
            if outcome != Outcome::Passed {
                let errors = fs::read_to_string(&self.errors).unwrap_or_default();
                let is_refused = REFUSALS.iter().any(|text| errors.contains(text));
                return Ok((if is_refused { Outcome::Refused } else { outcome }, tests.len()));
            }
            (rest, size) = (later, 4.0 * size);
        }
        Ok((Outcome::Passed, tests.len()))
    }

    fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let tests = self.repo.join("tests");
        let mut command = Command::new(self.repo.join("scripts/gpu"));
        command.arg(program).args(arguments).current_dir(&tests).env("CARGO_MANIFEST_DIR", &tests);
        command.env("GALLIVM_PERF", "nopt");
        command
    }
}

/// The name and the time in `test a::b ... ok <1.234s>`.
fn seconds_of(line: &str) -> Option<(String, f64)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ok <")?;
    Some((name.into(), rest.strip_suffix("s>")?.parse().ok()?))
}

/// Runs tests up to the first failure.
fn first_failure(command: &mut Command, limit: Duration) -> io::Result<Outcome> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let outcome = watch(&mut child, limit);
    if outcome != Some(Outcome::Passed) {
        let _ = child.kill();
    }
    let status = child.wait()?;
    match outcome {
        Some(Outcome::Passed) | None if status.code().is_none() => Ok(Outcome::Crashed(status.to_string())),
        // Without a failure, tests end with a summary or by a signal.
        None => Err(io::Error::other(format!("the tests did not run: {status}"))),
        Some(outcome) => Ok(outcome),
    }
}

/// Reads the output up to a failure, the summary or the limit. Returns `None` if it ends before.
fn watch(child: &mut Child, limit: Duration) -> Option<Outcome> {
    let output = BufReader::new(child.stdout.take()?);
    let (send, lines) = mpsc::channel();
    thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
    let end = Instant::now() + limit;
    loop {
        match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                if let Some(name) =
                    line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED"))
                {
                    return Some(Outcome::Failed(name.into()));
                }
                if line.starts_with("test result: ok") {
                    return Some(Outcome::Passed);
                }
            }
            Err(RecvTimeoutError::Timeout) => return Some(Outcome::TimedOut),
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}
