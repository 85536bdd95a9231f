//! Runs the crate's tests in one process, then each test that did not pass alone.

use std::collections::{HashMap, VecDeque};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::say;
use super::visit::Visit;
use crate::error::{At, Result};
use crate::process::{self, Outcome};

/// The harness's outcome of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    Passed,
    Failed,
    Ignored,
}

/// The harness's exit status if tests failed.
const TESTS_FAILED: Outcome = Outcome::Failed(101);

/// The time limit of a test that runs alone, and the least time to try one.
const ALONE: Duration = Duration::from_secs(60);
const LEAST: Duration = Duration::from_secs(2);

pub fn run(visit: &mut Visit) -> Result {
    let start = Instant::now();
    let limit = visit.limit(Duration::MAX, visit.reserve + Duration::from_secs(20));
    visit.log("\n==== tests\n")?;
    let filters = &visit.options.filters;
    let mut list = visit.program("tests");
    list.args(["--list", "--format", "terse"]).args(filters).stderr(visit.open_log()?);
    let names = list.output().ok().filter(|output| output.status.success());
    let names = names.map(|output| listed(&String::from_utf8_lossy(&output.stdout))).unwrap_or_default();
    if names.is_empty() {
        visit.problem("tests: none could be listed".into(), Vec::new());
        return Ok(());
    }
    if limit < Duration::from_secs(3) {
        visit.problem("tests: no time was left".into(), Vec::new());
        return Ok(());
    }

    let path = visit.work.join("tests");
    let mut tests = visit.program("tests");
    tests.args(["--test-threads", &visit.options.threads.to_string()]).args(filters);
    tests.stdout(File::create(&path).at(&path)?).stderr(visit.open_log()?);
    // One process gets half of the time, separate processes the other half. On an H100, 54 of 645
    // tests passed in one process in 216 s. In separate processes 163 passed in 73 s.
    let outcome = process::within(limit.mul_f64(0.5), &mut tests)?;
    let text = fs::read(&path).at(&path)?;
    let text = String::from_utf8_lossy(&text);
    visit.log(&text)?;
    if ![Outcome::Ok, TESTS_FAILED].contains(&outcome) {
        let text =
            format!("tests: all in one process: {outcome}; those that had not finished ran again alone");
        visit.problem(text, Vec::new());
    }

    let first = said(&text);
    let count = |wanted| names.iter().filter(|name| first.get(name.as_str()) == Some(&wanted)).count();
    let (mut passed, ignored) = (count(Said::Passed), count(Said::Ignored));
    let (mut failed, mut unreached) = (0, 0);
    let again: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|name| !matches!(first.get(name), Some(Said::Passed | Said::Ignored)))
        .collect();
    if !again.is_empty() {
        say(format!("tests: {} to run again alone", again.len()));
        for (name, outcome) in again.iter().zip(alone(visit, &again)?) {
            let Some(words) = judged(first.get(name) == Some(&Said::Failed), outcome) else {
                unreached += 1;
                continue;
            };
            if words == "passed" {
                passed += 1;
                continue;
            }
            failed += 1;
            visit.row(json!({"bench": "tests", "what": words, "detail": name}))?;
            let output = fs::read(output_of(&visit.work, name)).unwrap_or_default();
            let output = String::from_utf8_lossy(&output);
            visit.log(&format!("\n---- {name}: {words}\n{output}"))?;
            visit.problem(format!("test {name}: {words}"), panic_of(&output));
        }
    }
    if unreached > 0 {
        let words = format!("{unreached} of {} were not reached", names.len());
        visit.row(json!({"bench": "part", "what": "tests", "detail": words}))?;
        visit.problem(format!("tests: {words}"), Vec::new());
    }
    for (what, tests) in [("passed", passed), ("failed", failed), ("ignored", ignored)] {
        visit.row(json!({"bench": "tests", "what": what, "value": tests, "unit": "tests"}))?;
    }
    say(format!(
        "tests: {passed} passed, {failed} failed, {ignored} ignored, {unreached} not reached of {}, {} s",
        names.len(),
        start.elapsed().as_secs()
    ));
    if passed == 0 {
        visit.problem("tests: none passed".into(), Vec::new());
    }
    Ok(())
}

fn listed(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

/// Returns the outcomes that the harness printed, by name.
fn said(text: &str) -> HashMap<&str, Said> {
    let outcomes = text.lines().filter_map(|line| {
        let (name, outcome) = line.strip_prefix("test ")?.split_once(" ... ")?;
        let name = name.strip_suffix(" - should panic").unwrap_or(name);
        let kinds = [("ok", Said::Passed), ("FAILED", Said::Failed), ("ignored", Said::Ignored)];
        let (_, said) = kinds.into_iter().find(|(word, _)| outcome.starts_with(word))?;
        Some((name, said))
    });
    outcomes.collect()
}

/// Returns the outcome of each test in a separate process. `None`: there was no time, or the test
/// did not end within a limit below [`ALONE`].
fn alone(visit: &Visit, names: &[&str]) -> Result<Vec<Option<Outcome>>> {
    let folder = visit.work.join("alone");
    fs::create_dir_all(&folder).at(&folder)?;
    let end = Instant::now() + visit.limit(Duration::from_secs(100_000), visit.reserve);
    let one = |name: &str| -> Result<Option<Outcome>> {
        let left = end.saturating_duration_since(Instant::now());
        if left < LEAST {
            return Ok(None);
        }
        let path = output_of(&visit.work, name);
        let output = File::create(&path).at(&path)?;
        let mut test = visit.program("tests");
        test.args(["--exact", name]).stdout(output.try_clone()?).stderr(output);
        let outcome = process::within(left.min(ALONE), &mut test)?;
        Ok(Some(outcome).filter(|outcome| left >= ALONE || *outcome != Outcome::TimedOut))
    };
    let queue: Mutex<VecDeque<usize>> = Mutex::new((0..names.len()).collect());
    let next = || queue.lock().expect("no thread panics").pop_front();
    let results = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..visit.options.threads.min(names.len()) {
            scope.spawn(|| {
                while let Some(n) = next() {
                    let result = one(names[n]);
                    results.lock().expect("no thread panics").push((n, result));
                }
            });
        }
    });
    let mut results = results.into_inner().expect("no thread panics");
    results.sort_by_key(|(n, _)| *n);
    results.into_iter().map(|(_, result)| result).collect()
}

fn output_of(work: &Path, name: &str) -> PathBuf {
    work.join("alone").join(name.replace(':', "_"))
}

/// Returns the verdict on a test that did not pass in one process, from its outcome alone. `None`:
/// it was not reached.
fn judged(failed: bool, alone: Option<Outcome>) -> Option<String> {
    let words = match alone {
        None if !failed => return None,
        Some(Outcome::Ok) if failed => "failed, but passes alone".into(),
        Some(Outcome::Ok) => "passed".into(),
        None | Some(TESTS_FAILED) => "failed".into(),
        Some(Outcome::TimedOut) => "hung".into(),
        Some(outcome) => outcome.to_string(),
    };
    Some(words)
}

/// Returns the place of the panic, and two lines of its message.
fn panic_of(output: &str) -> Vec<String> {
    let lines = output.lines().skip_while(|line| !line.contains("panicked at"));
    lines.take(3).map(|line| line.chars().take(200).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_listed() {
        assert_eq!(
            listed("gpu::a_layer: test\nmasks::causal: test\nkernels: benchmark\n"),
            ["gpu::a_layer", "masks::causal"]
        );
    }

    #[test]
    fn harness_lines_are_parsed() {
        let text = "\nrunning 4 tests\ntest gpu::a_layer ... ok\ntest fuzz::all ... ignored, takes an hour\n\
            test errors::panics - should panic ... ok\ntest masks::causal ... FAILED\n\
            test masks::window has been running\ntest key_splits::many ... \n\nfailures:\n    masks::causal\n\
            test result: FAILED. 2 passed\n";
        let expected = [
            ("gpu::a_layer", Said::Passed),
            ("fuzz::all", Said::Ignored),
            ("errors::panics", Said::Passed),
            ("masks::causal", Said::Failed),
        ];
        assert_eq!(said(text), expected.into());
    }

    #[test]
    fn verdicts_follow_reruns() {
        let cases = [
            (true, Some(Outcome::Ok), Some("failed, but passes alone")),
            (false, Some(Outcome::Ok), Some("passed")),
            (true, None, Some("failed")),
            (false, None, None),
            (true, Some(TESTS_FAILED), Some("failed")),
            (false, Some(Outcome::TimedOut), Some("hung")),
            (false, Some(Outcome::Crashed(11)), Some("crashed, signal 11")),
            (true, Some(Outcome::Failed(1)), Some("failed, status 1")),
        ];
        for (failed, alone, words) in cases {
            assert_eq!(judged(failed, alone).as_deref(), words);
        }
    }

    #[test]
    fn why_a_test_failed() {
        let output =
            "running 1 test\nthread 'a' panicked at tests/a.rs:1:\nleft: 1\nright: 2\nnote: run with\n";
        assert_eq!(panic_of(output), ["thread 'a' panicked at tests/a.rs:1:", "left: 1", "right: 2"]);
        assert_eq!(panic_of("test a ... ok\n"), Vec::<String>::new());
    }
}
