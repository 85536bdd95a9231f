//! `scripts/drivers`: runs the small cases of the test suite on other drivers.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::time::Instant;

use crate::error::{At, Error, Result, failed};
use crate::repo::Repo;
use crate::windows::Windows;
use crate::{gpu, process};

const USAGE: &str = "\
scripts/drivers [DRIVER ...]: runs the small cases of the test suite on each software driver, then prints a table.

  lavapipe-25   Mesa 25.0, an older compiler of shaders
  swiftshader   subgroups of 4, no f16, 256 invocations
  mesa-gl       wgpu's GL backend: no f16, no subgroups
  validation    lavapipe 26 under the Khronos validation layer: core checks and synchronization

Without arguments, these drivers run. The following run only if they are named:

  lavapipe      lavapipe 26 without the layer
  dx12-fxc      wgpu's DX12 backend: the tests of tests/small, built for Windows, under Wine. Wine's Direct3D 12 uses
                lavapipe, with Microsoft's FXC from Dawn's package. Needs rustup, npm and user namespaces

Fails if a test fails, if the layer is missing, or if the layer prints messages that tests/harness/validation.rs does
not explain. Drivers that cannot be fetched are skipped. Skipped cases and their reasons follow the table. All output
is in target/drivers/. WGPU_ATTENTION_TEST_FILTERS selects other tests than the small cases.
";

/// A driver, with its tests.
struct Run {
    name: &'static str,
    /// The value of `WGPU_ATTENTION_DRIVER`.
    driver: &'static str,
    validation: bool,
    by_default: bool,
    tests: Tests,
}

/// The small cases that a driver runs.
#[derive(Clone, Copy, PartialEq)]
enum Tests {
    All,
    /// The cases with [`Case::cheap`].
    Cheap,
    /// The cases of tests/small, in programs for Windows.
    OnWindows,
}

/// The value of `WGPU_ATTENTION_TEST_FILTERS`.
const ON_WINDOWS: [&str; 1] = ["small::"];

const RUNS: [Run; 6] = [
    Run {
        name: "lavapipe-25",
        driver: "lavapipe-25",
        validation: false,
        by_default: true,
        tests: Tests::Cheap,
    },
    Run {
        name: "swiftshader",
        driver: "swiftshader",
        validation: false,
        by_default: true,
        tests: Tests::All,
    },
    Run { name: "mesa-gl", driver: "mesa-gl", validation: false, by_default: true, tests: Tests::All },
    Run { name: "validation", driver: "lavapipe", validation: true, by_default: true, tests: Tests::All },
    Run { name: "lavapipe", driver: "lavapipe", validation: false, by_default: false, tests: Tests::All },
    Run { name: "dx12-fxc", driver: "wine", validation: false, by_default: false, tests: Tests::OnWindows },
];

/// The small cases, by parts of their tests' names. They cover every kernel, masks, caches, decode,
/// layers, positions, f16 and refusals. Other tests of the suite take minutes on these drivers,
/// because every further shape or mask compiles another shader.
struct Case {
    test: &'static str,
    /// True if lavapipe-25 runs the case. It takes ten times as long to compile a shader.
    cheap: bool,
}

const fn cheap(test: &'static str) -> Case {
    Case { test, cheap: true }
}

const fn dear(test: &'static str) -> Case {
    Case { test, cheap: false }
}

const SMALL: [Case; 24] = [
    dear("stages::append_keys"),
    dear("stages::average_weights"),
    dear("stages::scores"),
    dear("stages::softmax"),
    dear("stages::weighted_sum"),
    cheap("gpu::attention_with_every_option"),
    dear("gpu::attention_with_every_part"),
    cheap("gpu::a_layer"),
    dear("biases::added_terms_may_be_narrow"),
    cheap("block_maps::device_maps"),
    dear("key_splits::bad_numbers"),
    dear("merge::merged_parts"),
    dear("cache::full::copies_on_write"),
    cheap("cache::full::device_refuses"),
    cheap("cache::full::truncating"),
    dear("cache::steps::ragged"),
    cheap("cache::rotation"),
    dear("recording::cached"),
    dear("small::tests::gradients"),
    dear("small::tests::parts_of_models"),
    cheap("position::rotations"),
    cheap("position::additions"),
    cheap("errors::refused::limits"),
    cheap("threads::threads_share_a_device"),
];

/// Tests with the validation layer. The second one also runs on matrix units.
const WITH_VALIDATION: [&str; 2] = ["validation::", "biases::sink_takes"];

impl Run {
    /// Returns the tests to run, by parts of their names, and the small cases that are left out.
    fn filters(&self) -> (Vec<&'static str>, Vec<&'static str>) {
        if self.tests == Tests::OnWindows {
            return (ON_WINDOWS.to_vec(), Vec::new());
        }
        let (run, left_out): (Vec<&Case>, Vec<&Case>) =
            SMALL.iter().partition(|case| case.cheap || self.tests == Tests::All);
        let names = |cases: Vec<&Case>| cases.iter().map(|case| case.test).collect::<Vec<_>>();
        let mut run = names(run);
        run.extend(WITH_VALIDATION.iter().filter(|_| self.validation));
        (run, names(left_out))
    }
}

pub fn main(repo: &Repo, arguments: Vec<OsString>) -> Result {
    if arguments.iter().any(|word| word == "-h" || word == "--help") {
        print!("{USAGE}");
        return Ok(());
    }
    let named = |word: &OsString| RUNS.iter().find(|run| word == run.name);
    let runs: Option<Vec<&Run>> = match &arguments[..] {
        [] => Some(RUNS.iter().filter(|run| run.by_default).collect()),
        words => words.iter().map(named).collect(),
    };
    let Some(runs) = runs else {
        eprint!("{USAGE}");
        return Err(Error { status: 2, text: String::new() });
    };

    if runs.iter().any(|run| run.tests != Tests::OnWindows) {
        process::run(test(repo).arg("--no-run"))?;
        let tests = process::output(test(repo).args(["--quiet", "--", "--list", "--format", "terse"]))?;
        let unknown = unknown(&tests);
        if !unknown.is_empty() {
            return Err(failed(format!(
                "xtask/src/drivers.rs names tests that are not there: {}",
                unknown.join(" ")
            )));
        }
    }
    let mut results = Vec::new();
    for run in runs {
        println!("== {}", run.name);
        results.push((run.name, run_on(repo, run)?));
    }
    print!("{}", table(&results));
    for (name, result) in &results {
        println!("skipped on {name}:");
        result.skipped.iter().for_each(|line| println!("  {line}"));
    }
    if results.iter().any(|(_, result)| result.failed) {
        Err(Error { status: 1, text: String::new() })
    } else {
        Ok(())
    }
}

/// Returns the names of the tables above that no test of a list has.
fn unknown(tests: &str) -> Vec<&'static str> {
    let names = SMALL.iter().map(|case| case.test).chain(WITH_VALIDATION).chain(ON_WINDOWS);
    names.filter(|name| !tests.lines().any(|line| line.ends_with(": test") && line.contains(name))).collect()
}

/// Returns the command that runs the suite, compiled for speed.
fn test(repo: &Repo) -> std::process::Command {
    let mut cargo = repo.cargo();
    cargo.args(["test", "--release", "--test", "tests"]).env("CARGO_TERM_COLOR", "never");
    cargo
}

/// The result of a driver: a row of the table, and further lines.
#[derive(Debug, Default)]
struct Ran {
    device: String,
    said: Said,
    seconds: Option<f64>,
    processor_seconds: Option<f64>,
    failed: bool,
    /// Lines about skipped cases.
    skipped: Vec<String>,
}

fn run_on(repo: &Repo, run: &Run) -> Result<Ran> {
    let path = repo.folder("drivers")?.join(format!("{}.log", run.name));
    let prepared = gpu::setup_named(repo, run.driver).and_then(|setup| {
        let windows = (run.tests == Tests::OnWindows).then(|| Windows::prepare(repo, &setup));
        Ok((setup, windows.transpose()?))
    });
    let (setup, windows) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            eprintln!("scripts/drivers: {error}");
            let skipped = vec![format!("{}: skipped, it could not be set up", run.name)];
            fs::write(&path, format!("{}\n", skipped[0])).at(&path)?;
            return Ok(Ran { device: "none: it could not be set up".into(), skipped, ..Ran::default() });
        }
    };
    let chosen = env::var("WGPU_ATTENTION_TEST_FILTERS").unwrap_or_default();
    let (filters, left_out) = match chosen.split_whitespace().collect::<Vec<_>>() {
        chosen if chosen.is_empty() => run.filters(),
        chosen => (chosen, Vec::new()),
    };
    let left_out: String =
        left_out.iter().map(|test| format!("{test}: skipped, too long to compile\n")).collect();
    fs::write(&path, left_out).at(&path)?;
    let log = OpenOptions::new().append(true).open(&path).at(&path)?;

    let mut cargo = test(repo);
    setup.apply(&mut cargo);
    if let Some(windows) = &windows {
        windows.apply(&mut cargo);
    }
    cargo.arg("--").args(filters).stdout(log.try_clone()?).stderr(log).env_remove("WGPU_VALIDATION");
    if run.validation {
        cargo.env("WGPU_VALIDATION", "1");
    }
    if env::var_os("WGPU_ATTENTION_TEST_ALL").is_none() {
        // Few tests, but every case of each.
        cargo.env("WGPU_ATTENTION_TEST_ALL", "1");
    }
    if env::var_os("GALLIVM_PERF").is_none() {
        // Shaders are compiled with fewer optimisations, because compiling takes longer than
        // running.
        cargo.env("GALLIVM_PERF", "nopt");
    }
    let (start, processor) = (Instant::now(), processor_seconds());
    let status = cargo.status()?;
    let (seconds, processor) = (start.elapsed().as_secs_f64(), processor_seconds().zip(processor));

    let text = fs::read(&path).at(&path)?;
    let text = String::from_utf8_lossy(&text);
    let said = Said::of(&text);
    let failed = !status.success() || said.passed == 0 || said.messages != 0;
    if failed {
        print!("{}", why(&text));
    }
    Ok(Ran {
        device: said.device.clone().unwrap_or_else(|| "none".into()),
        skipped: skipped(&text),
        said,
        seconds: Some(seconds),
        processor_seconds: processor.map(|(after, before)| after - before),
        failed,
    })
}

/// Returns the processor time of all ended child programs, if Linux reports it.
fn processor_seconds() -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The fields after the program's name, which may contain spaces; in hundredths of a second.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let hundredths = |n: usize| fields.get(n)?.parse::<f64>().ok();
    Some((hundredths(13)? + hundredths(14)?) / 100.0)
}

/// The contents of a log.
#[derive(Debug, Default, PartialEq)]
struct Said {
    device: Option<String>,
    passed: u64,
    failed: Option<u64>,
    /// Unexplained messages of the validation layer.
    messages: usize,
    cases_skipped: u64,
}

const MESSAGE: &str = "unexplained validation message";

impl Said {
    fn of(text: &str) -> Self {
        let mut said = Said::default();
        for line in text.lines() {
            if let Some((device, _)) =
                line.strip_prefix("device `full`: ").and_then(|rest| rest.rsplit_once(", f16: "))
            {
                said.device.get_or_insert_with(|| device.into());
            } else if let Some(counts) = line.strip_prefix("test result: ") {
                if said.failed.is_none() {
                    said.passed = before(counts, " passed").unwrap_or_default();
                    said.failed = before(counts, " failed");
                }
            } else if line.starts_with(MESSAGE) {
                said.messages += 1;
            } else if let Some((_, cases)) = line.split_once(": skipped ") {
                said.cases_skipped += before(cases, " cases ").unwrap_or_default();
            }
        }
        said
    }
}

/// Returns the number before a word.
fn before(text: &str, word: &str) -> Option<u64> {
    text.split_once(word)?.0.rsplit(' ').next()?.parse().ok()
}

/// Returns the skipped cases by reason, then the tests that are left out.
fn skipped(text: &str) -> Vec<String> {
    let (mut cases, mut tests) = (BTreeMap::<&str, u64>::new(), Vec::new());
    for line in text.lines() {
        let Some((name, why)) = line.split_once(": skipped") else { continue };
        if let Some(why) = why.strip_prefix(' ') {
            // "12 cases on `full`: their names"
            let Some((count, rest)) = why.split_once(" cases ") else { continue };
            let (Ok(count), Some((why, _))) = (count.parse::<u64>(), rest.rsplit_once(": ")) else {
                continue;
            };
            *cases.entry(why).or_default() += count;
        } else if why.starts_with(", ") && !name.is_empty() && !name.starts_with(' ') {
            tests.push(line.to_owned());
        }
    }
    let mut lines: Vec<String> = cases.iter().map(|(why, count)| format!("{count} cases {why}")).collect();
    lines.sort();
    lines.extend(tests);
    lines
}

/// Returns the reason of a failure, from a log.
fn why(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let tells = |line: &str| line.starts_with("unexplained") || line.contains("panicked at");
    let near = (0..lines.len()).filter(|&n| lines[n.saturating_sub(3)..=n].iter().any(|line| tells(line)));
    let near = near.take(40).map(|n| lines[n]);
    let end = lines[lines.len().saturating_sub(30)..].iter().copied();
    near.chain(end).map(|line| format!("{line}\n")).collect()
}

fn table(results: &[(&str, Ran)]) -> String {
    let mut text = String::new();
    let mut row = |[name, device, passed, skipped, failed, messages, seconds, cpu]: [&str; 8]| {
        let _ = writeln!(
            text,
            "{name:<12} {device:<42} {passed:>6} {skipped:>14} {failed:>6} {messages:>9} {seconds:>9} {cpu:>6}"
        );
    };
    row(["driver", "device", "passed", "cases skipped", "failed", "messages", "seconds", "CPU"]);
    for (name, Ran { device, said, seconds, processor_seconds, .. }) in results {
        let time = |seconds: &Option<f64>| seconds.map_or("-".into(), |seconds| format!("{seconds:.0}"));
        let failed = said.failed.map_or("-".into(), |failed| failed.to_string());
        let numbers =
            [said.passed.to_string(), said.cases_skipped.to_string(), failed, said.messages.to_string()];
        let [passed, skipped, failed, messages] = &numbers;
        row([name, device, passed, skipped, failed, messages, &time(seconds), &time(processor_seconds)]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
stages::scores: skipped, too long to compile
running 2 tests
device `full`: SwiftShader Device (Subzero), f16: false
device `core`: another, f16: false
gpu: skipped 3 cases f16, which `full` has not: a, b, c
masks: skipped 2 cases f16, which `full` has not: d, e
masks: skipped 10 cases on `core`, Fused: 9 buffers: f
recording: skipped, nothing of it runs on this adapter
test result: ok. 25 passed; 1 failed; 0 ignored; 0 measured; 400 filtered out; finished in 2.00s
unexplained validation message in x: y
";

    #[test]
    fn logs_are_parsed() {
        let device = Some("SwiftShader Device (Subzero)".into());
        let expected = Said { device, passed: 25, failed: Some(1), messages: 1, cases_skipped: 15 };
        assert_eq!(Said::of(LOG), expected);
        assert_eq!(Said::of("error: could not compile\n"), Said::default());
    }

    #[test]
    fn skipped_cases_are_listed() {
        assert_eq!(
            skipped(LOG),
            [
                "10 cases on `core`, Fused: 9 buffers",
                "5 cases f16, which `full` has not",
                "stages::scores: skipped, too long to compile",
                "recording: skipped, nothing of it runs on this adapter",
            ]
        );
    }

    #[test]
    fn why_it_failed() {
        let text = "a\nthread 'x' panicked at y\n1\n2\n3\n4\n";
        assert!(why(text).starts_with("thread 'x' panicked at y\n1\n2\n3\na\n"));
    }

    #[test]
    fn few_cases_where_compiling_is_slow() {
        let filters = |name| RUNS.iter().find(|run| run.name == name).map(Run::filters).unwrap();
        let (run, left_out) = filters("lavapipe-25");
        assert_eq!((run.len(), run.len() + left_out.len()), (10, SMALL.len()));
        assert_eq!(filters("swiftshader").0.len(), SMALL.len());
        assert!(filters("validation").0.contains(&"validation::"));
    }

    #[test]
    fn names_of_no_test() {
        let mut tests: String = SMALL.iter().map(|case| format!("{}_and_more: test\n", case.test)).collect();
        assert_eq!(unknown(&tests), WITH_VALIDATION);
        tests += "validation::a: test\nbiases::sink_takes: benchmark\n";
        assert_eq!(unknown(&tests), ["biases::sink_takes"]);
    }

    #[test]
    fn rows_of_the_table() {
        let said = Said::of(LOG);
        let device = said.device.clone().unwrap();
        let ran = Ran { device, said, seconds: Some(12.4), ..Ran::default() };
        let expected = "\
driver       device                                     passed  cases skipped failed  messages   seconds    CPU
swiftshader  SwiftShader Device (Subzero)                   25             15      1         1        12      -
";
        assert_eq!(table(&[("swiftshader", ran)]), expected);
    }
}
