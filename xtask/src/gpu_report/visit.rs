//! `FOLDER/run`: runs facts, ceilings, benches, tests and PyTorch on this machine, each with a time
//! limit.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf, absolute};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, str};

use serde_json::{Value, json};

use super::pack::{PAYLOAD, Version};
use super::{Options, Part, rows, say};
use crate::error::{At, Error, Result, refused};
use crate::files::Temporary;
use crate::gpu::machine;
use crate::process::{self, Outcome};

/// Benches that run first; the others follow by name.
const FIRST: [&str; 7] = ["doctor", "tune", "kernels", "matrix", "scaling", "record", "decode"];

/// Benches that run again without robust access, with their arguments. The calls are few, because
/// the visit's other parts need the time.
const UNCHECKED: [(&str, &[&str]); 2] =
    [("kernels", &["kernels/(fused|matrix)/"]), ("decode", &["--only", "tensors"])];

/// Programs that are separate parts.
const NO_BENCHES: [&str; 4] = ["facts", "ceilings", "report", "tests"];

/// The place of NVIDIA's driver file in containers. Loaders do not look there.
const NVIDIA: &str = "/usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json";

/// The least time to try a part.
const LEAST: Duration = seconds(3);

/// The exit status of `sdpa.py` if there is no device for it.
const SKIPPED: Outcome = Outcome::Failed(3);

const fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

pub struct Visit<'a> {
    pub options: &'a Options,
    out: PathBuf,
    rows: PathBuf,
    log: PathBuf,
    /// The folder of the packed files, and a folder for temporary ones.
    root: PathBuf,
    pub work: PathBuf,
    end: Instant,
    /// The time that is reserved for parts after the tests.
    pub reserve: Duration,
    runner: Option<OsString>,
    variables: Vec<(&'static str, OsString)>,
    problems: Vec<Problem>,
    software: bool,
    quick: bool,
}

struct Problem {
    text: String,
    /// Lines of output with the reason.
    why: Vec<String>,
}

/// Runs the test suite.
pub type Suite = fn(&mut Visit) -> Result;

/// Runs the visit that is packed in `folder`.
pub fn run(folder: &Path, options: &Options, suite: Suite) -> Result {
    run_by(env::var_os("WGPU_ATTENTION_RUNNER").filter(|runner| !runner.is_empty()), folder, options, suite)
}

/// Unpacks an archive into a folder. Some machines have tar without xz, but Python.
fn unpack(payload: &Path, root: &Path) -> Result {
    let tar = process::run(Command::new("tar").arg("-C").arg(root).arg("-xJf").arg(payload));
    if tar.is_ok() {
        return Ok(());
    }
    let program = "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='tar')";
    process::run(Command::new("python3").args(["-c", program]).arg(payload).arg(root))
}

/// Runs the visit, with programs started through `runner`.
fn run_by(runner: Option<OsString>, folder: &Path, options: &Options, suite: Suite) -> Result {
    let end = Instant::now() + seconds((60 * options.minutes).saturating_sub(10));
    let version = Version::read(folder)?;
    let out = absolute(options.out.clone().unwrap_or_else(|| folder.join("out")))?;
    fs::create_dir_all(&out).at(&out)?;
    for file in ["visit.jsonl", "log.txt", "summary.txt", "RESULTS.md"] {
        let _ = fs::remove_file(out.join(file));
    }
    for plot in ["share", "growth", "peers"] {
        let _ = fs::remove_file(out.join(format!("{plot}-visit.svg")));
    }
    let work = Temporary::new(&env::temp_dir(), "gpu-report")?;
    let root = work.0.join("root");
    fs::create_dir(&root).at(&root)?;
    unpack(&folder.join(PAYLOAD), &root)?;

    let (rows, log) = (out.join("visit.jsonl"), out.join("log.txt"));
    // Variables of the programs: the places of their data, their figures and criterion's records.
    let variables = vec![
        ("CARGO_MANIFEST_DIR", root.join("tests").into()),
        ("WGPU_ATTENTION_ROWS", rows.clone().into()),
        ("CRITERION_HOME", work.0.join("criterion").into()),
    ];
    let mut visit = Visit {
        options,
        out,
        rows,
        log,
        root,
        work: work.0.clone(),
        end,
        reserve: Duration::ZERO,
        runner,
        variables,
        problems: Vec::new(),
        software: false,
        quick: options.quick == Some(true),
    };
    visit.find_drivers();
    visit.start(&version)?;
    visit.parts(suite)?;
    let summary = visit.summary(&version)?;
    let path = visit.out.join("summary.txt");
    fs::write(&path, &summary).at(&path)?;
    print!("{summary}");
    if visit.problems.is_empty() { Ok(()) } else { Err(Error { status: 1, text: String::new() }) }
}

impl Visit<'_> {
    fn wants(&self, part: Part) -> bool {
        self.options.parts.contains(&part)
    }

    /// Finds the packed Vulkan loader and NVIDIA's driver, on machines where they must be named.
    fn find_drivers(&mut self) {
        let lib = self.root.join("lib");
        if self.runner.is_none() && lib.is_dir() && !machine::Libraries::installed().has("libvulkan.so.1") {
            say("no Vulkan loader here: using the packed one");
            let mut path = lib.into_os_string();
            if let Some(more) = env::var_os("LD_LIBRARY_PATH").filter(|more| !more.is_empty()) {
                path.push(":");
                path.push(more);
            }
            self.variables.push(("LD_LIBRARY_PATH", path));
        }
        let chosen = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"]
            .iter()
            .any(|name| !env::var(name).unwrap_or_default().is_empty());
        if !chosen && File::open(NVIDIA).is_ok() && !loaders_see_nvidia() {
            say(format!("VK_DRIVER_FILES={NVIDIA}"));
            self.variables.push(("VK_DRIVER_FILES", NVIDIA.into()));
        }
    }

    /// Writes the facts that are known before anything runs.
    fn start(&mut self, version: &Version) -> Result {
        let date =
            |format| process::quiet_output(Command::new("date").args(["-u", format])).unwrap_or_default();
        let Version { commit, dirty } = version;
        self.row(json!({"bench": "visit", "date": date("+%F").trim(), "commit": commit, "dirty": dirty}))?;
        let names: Vec<&str> =
            super::PARTS.iter().filter(|(_, part)| self.wants(*part)).map(|&(name, _)| name).collect();
        let minutes = self.options.minutes;
        self.log(&format!(
            "commit {commit}, uncommitted changes: {dirty}, {} UTC, parts {}, {minutes} minutes\n",
            date("+%F %T").trim(),
            names.join(",")
        ))?;
        for words in [&["uname", "-srm"][..], &["nproc"], &["nvidia-smi"]] {
            let mut command = Command::new(words[0]);
            if let Err(error) = self.logged(seconds(20), command.args(&words[1..])) {
                self.log(&format!("{}: {error}\n", words[0]))?;
            }
        }
        if self.wants(Part::Torch) {
            self.reserve = seconds(70);
        }
        Ok(())
    }

    fn parts(&mut self, suite: Suite) -> Result {
        if self.wants(Part::Facts) {
            let facts = self.program("facts");
            if !self.part("facts", self.limit(seconds(60), seconds(5)), facts)? {
                // Nothing can run without a device.
                self.problem("no device: nothing else was tried".into(), Vec::new());
                return self.report();
            }
        }
        self.software = self.rows.exists() && rows::of_software(&rows::read(&self.rows)?);
        self.quick |= self.software && self.options.quick.is_none();
        if self.quick {
            self.variables.push(("WGPU_ATTENTION_BENCH_QUICK", "1".into()));
            self.row(json!({"bench": "visit", "quick": true}))?;
        }
        if self.wants(Part::Ceilings) {
            let mut ceilings = self.program("ceilings");
            ceilings.arg("--bench");
            self.part("ceilings", self.limit(seconds(90), seconds(5)), ceilings)?;
        }
        if self.wants(Part::Benches) {
            self.benches()?;
        }
        if self.wants(Part::Unchecked) {
            self.unchecked()?;
        }
        self.report()?;
        if self.wants(Part::Tests) {
            suite(self)?;
        }
        if self.wants(Part::Torch) {
            self.torch()?;
        }
        self.report()
    }

    fn benches(&mut self) -> Result {
        // Tests get half of the time.
        let rest = if self.wants(Part::Tests) { self.left() / 2 } else { Duration::ZERO };
        let bin = self.root.join("bin");
        let mut here = BTreeSet::new();
        for entry in fs::read_dir(&bin).at(&bin)? {
            here.extend(entry.at(&bin)?.file_name().to_str().map(str::to_owned));
        }
        let wanted = &self.options.benches;
        if let Some(name) = wanted.iter().find(|name| !here.contains(*name)) {
            return Err(refused(format!("there is no bench {name}")));
        }
        here.retain(|name| {
            !NO_BENCHES.contains(&name.as_str()) && (wanted.is_empty() || wanted.contains(name))
        });
        let first: Vec<String> = FIRST.iter().filter_map(|&name| here.take(name)).collect();
        for name in first.into_iter().chain(here) {
            self.part(&name, self.limit(seconds(150), rest + self.reserve), self.bench(&name))?;
        }
        Ok(())
    }

    fn bench(&self, name: &str) -> Command {
        let mut bench = self.program(name);
        bench.arg("--bench");
        if name == "kernels" && !self.quick {
            // Medians of some tens of runs: there are more than a hundred kernels, with less than
            // half a second each.
            bench.args(["--warm-up-time", "0.1", "--measurement-time", "0.3", "--nresamples", "1000"]);
        }
        bench
    }

    /// Runs a share of benches on a device without robust access.
    fn unchecked(&mut self) -> Result {
        let rows = if self.rows.exists() { rows::read(&self.rows)? } else { Vec::new() };
        if let Some(backend) = rows::text(&rows, "facts", "backend").filter(|backend| *backend != "vulkan") {
            let detail = format!("skipped: {backend} is not Vulkan");
            say(format!("unchecked: {detail}"));
            return self.row(json!({"bench": "part", "what": "unchecked", "detail": detail}));
        }
        let rest = if self.wants(Part::Tests) { self.left() / 2 } else { Duration::ZERO };
        for (name, arguments) in UNCHECKED {
            let mut bench = self.bench(name);
            bench.args(arguments).env("WGPU_ATTENTION_UNCHECKED", "1");
            let limit = self.limit(seconds(50), rest + self.reserve);
            self.part(&format!("{name} without robust access"), limit, bench)?;
        }
        Ok(())
    }

    fn torch(&mut self) -> Result {
        if process::quiet_output(Command::new("python3").arg("--version")).is_none() {
            self.row(json!({"bench": "part", "what": "torch", "detail": "skipped: no python3"}))?;
            say("torch: skipped: no python3");
            return Ok(());
        }
        let limit = self.limit(seconds(100), seconds(5));
        let mut python = Command::new("python3");
        python.arg("-u").arg(self.root.join("benches/sdpa.py")).arg(&self.rows);
        python.args(["--seconds", &limit.saturating_sub(seconds(10)).as_secs().to_string()]);
        python.args(self.software.then_some("--cpu")).envs(self.variables.iter().cloned());
        self.part("torch", limit, python)?;
        Ok(())
    }

    /// Makes tables and plots of the rows so far.
    fn report(&mut self) -> Result {
        let mut report = self.program("report");
        report.arg(&self.rows).arg("--results").arg(self.out.join("RESULTS.md"));
        report.arg("--plots").arg(&self.out).arg("--software");
        if !matches!(self.logged(seconds(60), &mut report), Ok(Outcome::Ok)) {
            self.problem(format!("report: could not be made of {}", self.rows.display()), Vec::new());
        }
        Ok(())
    }

    fn summary(&self, version: &Version) -> Result<String> {
        let mut text = format!("==== summary: {version}\n");
        for (n, problem) in self.problems.iter().enumerate() {
            if n == 20 {
                let _ = writeln!(text, "FAILED  and {} more, see log.txt", self.problems.len() - 20);
                break;
            }
            let _ = writeln!(text, "FAILED  {}", problem.text);
            for line in problem.why.iter().filter(|_| n < 6) {
                let _ = writeln!(text, "    {line}");
            }
        }
        if self.problems.is_empty() {
            text += "nothing failed\n";
        }
        let _ = writeln!(text, "{}", parts_of(&rows::read(&self.rows)?));
        if self.software {
            text += "a software driver: the figures say nothing about GPUs\n";
        }
        if self.quick {
            text += "quick: the times say nothing, they show only that the benches work\n";
        }
        let brief =
            process::quiet_output(self.program("report").arg(&self.rows).arg("--brief")).unwrap_or_default();
        for line in brief.lines().take(28) {
            text.extend(line.chars().take(150));
            text.push('\n');
        }
        let _ = writeln!(text, "results: {}", self.out.display());
        Ok(text)
    }

    // ---- for all parts

    /// Returns the command for a packed program.
    pub fn program(&self, name: &str) -> Command {
        let program = self.root.join("bin").join(name);
        let mut command = match &self.runner {
            Some(runner) => {
                let mut command = Command::new(runner);
                command.arg(program);
                command
            }
            None => Command::new(program),
        };
        command.envs(self.variables.iter().cloned());
        command
    }

    fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Returns the remaining time, at most `wanted`, if other parts get `rest`.
    pub fn limit(&self, wanted: Duration, rest: Duration) -> Duration {
        self.left().saturating_sub(rest).min(wanted)
    }

    pub fn row(&self, row: Value) -> Result {
        rows::append(&self.rows, &row)
    }

    pub fn problem(&mut self, text: String, why: Vec<String>) {
        self.problems.push(Problem { text, why });
    }

    pub fn open_log(&self) -> Result<File> {
        OpenOptions::new().create(true).append(true).open(&self.log).at(&self.log)
    }

    pub fn log(&self, text: &str) -> Result {
        self.open_log()?.write_all(text.as_bytes()).at(&self.log)
    }

    /// Runs `command` with its output in the log.
    fn logged(&self, limit: Duration, command: &mut Command) -> Result<Outcome> {
        let log = self.open_log()?;
        Ok(process::within(limit, command.stdout(log.try_clone()?).stderr(log))?)
    }

    /// Runs `command` with its output in the log, and adds a row with the outcome. Returns true if
    /// it succeeded or had nothing to do.
    fn part(&mut self, name: &str, limit: Duration, mut command: Command) -> Result<bool> {
        if limit < LEAST {
            self.row(json!({"bench": "part", "what": name, "detail": "no time was left"}))?;
            self.problem(format!("{name}: no time was left"), Vec::new());
            return Ok(false);
        }
        self.log(&format!("\n==== {name}\n"))?;
        let from = fs::metadata(&self.log).at(&self.log)?.len() as usize;
        let start = Instant::now();
        let outcome = self.logged(limit, &mut command);
        let took = start.elapsed().as_secs();
        let log = fs::read(&self.log).at(&self.log)?;
        let said = String::from_utf8_lossy(log.get(from..).unwrap_or_default());
        let words = match &outcome {
            Ok(SKIPPED) if name == "torch" => why_skipped(&said).unwrap_or_else(|| SKIPPED.to_string()),
            Ok(outcome) => outcome.to_string(),
            Err(error) => error.to_string(),
        };
        self.row(json!({"bench": "part", "what": name, "value": took, "unit": "s", "detail": words}))?;
        say(format!("{name}: {words}, {took} s"));
        let fine = words == "ok" || words.starts_with("skipped");
        if !fine {
            self.problem(format!("{name}: {words}"), telling(&said));
        }
        Ok(fine)
    }
}

fn why_skipped(said: &str) -> Option<String> {
    said.lines()
        .find_map(|line| line.strip_prefix("sdpa: ").filter(|why| why.starts_with("skipped")))
        .map(str::to_owned)
}

/// Returns three lines that explain a failure, mostly the program's last ones.
fn telling(said: &str) -> Vec<String> {
    let tells = |line: &str| {
        ["panicked", "computes something else"].iter().any(|word| line.contains(word))
            || line.starts_with("error")
            || line.starts_with("Error")
    };
    let lines: Vec<&str> = said.lines().collect();
    let told = (0..lines.len()).filter(|&n| tells(lines[n]) || (n > 0 && tells(lines[n - 1])));
    let told: Vec<String> = told.map(|n| lines[n].to_owned()).collect();
    told[told.len().saturating_sub(3)..].to_vec()
}

/// Returns a line with the outcomes of the parts.
fn parts_of(rows: &[Value]) -> String {
    let part = |row: &Value| Some(format!("{}: {}", row["what"].as_str()?, row["detail"].as_str()?));
    let parts: Vec<String> = rows.iter().filter(|row| row["bench"] == "part").filter_map(part).collect();
    parts.join("; ")
}

/// True if NVIDIA's driver is at a place that loaders read.
fn loaders_see_nvidia() -> bool {
    let tops = fs::read_dir("/").into_iter().flatten().flatten().map(|entry| entry.path());
    tops.chain(["/usr/share".into()]).any(|top| {
        let drivers = fs::read_dir(top.join("vulkan/icd.d")).into_iter().flatten().flatten();
        drivers.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with("nvidia"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_of_failures_are_found() {
        let said = "device X\nthread 'main' panicked at benches/kernels.rs:3:\nfused differs\nnote: run with\n\
            error: bench failed\n";
        assert_eq!(
            telling(said),
            ["thread 'main' panicked at benches/kernels.rs:3:", "fused differs", "error: bench failed"]
        );
        assert_eq!(telling("all is well\n"), Vec::<String>::new());
        assert_eq!(telling("Error: 1\nError: 2\nError: 3\nError: 4\n"), ["Error: 2", "Error: 3", "Error: 4"]);
    }

    #[test]
    fn why_torch_was_skipped() {
        let said = "==== torch\nsdpa: skipped: torch 2.5 finds no CUDA device\n";
        assert_eq!(why_skipped(said).as_deref(), Some("skipped: torch 2.5 finds no CUDA device"));
        assert_eq!(why_skipped("sdpa: done\n"), None);
    }

    /// Returns a packed folder of scripts.
    fn packed(programs: &[(&str, &str)]) -> Temporary {
        let folder = Temporary::new(&env::temp_dir(), "xtask-test-visit").unwrap();
        let bin = folder.0.join("bin");
        fs::create_dir(&bin).unwrap();
        for (name, script) in programs {
            crate::files::replace(&bin.join(name), &format!("#!/bin/sh\n{script}\n"), true).unwrap();
        }
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(&folder.0).arg("-cJf").arg(folder.0.join(PAYLOAD)).arg("bin");
        process::run(&mut tar).unwrap();
        fs::write(folder.0.join("version"), "commit=abc\ndirty=false\n").unwrap();
        folder
    }

    fn visit(folder: &Temporary, options: &str) -> (Result, Vec<Value>, String) {
        let words = options.split(' ').map(OsString::from);
        let result =
            run_by(None, &folder.0, &Options::parse(words).unwrap().unwrap(), super::super::suite::run);
        let out = folder.0.join("out");
        (
            result,
            rows::read(&out.join("visit.jsonl")).unwrap(),
            fs::read_to_string(out.join("summary.txt")).unwrap(),
        )
    }

    const FACTS: &str = r#"echo '{"bench":"facts","device_type":"Cpu"}' >>"$WGPU_ATTENTION_ROWS""#;
    const REPORT: &str = r#"case $2 in --brief) echo "a ceiling" ;; esac"#;

    #[test]
    fn a_visit_with_what_fails() {
        let tests = r#"case "$*" in
            --list*) printf 'a::%s: test\n' good bad shy lost slow crash; exit ;;
            --exact*bad) echo "thread panicked at a.rs:1:"; echo "not equal"; exit 101 ;;
            --exact*crash) kill -s SEGV $$ ;;
            --exact*) exit ;;
            esac
            printf 'test a::good ... ok\ntest a::bad ... FAILED\ntest a::shy ... FAILED\ntest a::slow ... ignored\n'
            exit 134"#;
        let kernels = r#"[ "$WGPU_ATTENTION_BENCH_QUICK" = 1 ] || exit 1; [ "$*" = --bench ]"#;
        let programs = [
            ("facts", FACTS),
            ("report", REPORT),
            ("tests", tests),
            ("kernels", kernels),
            ("another", "echo 'error: of a bench'; exit 1"),
        ];
        let folder = packed(&programs);
        let (_, rows, _) = visit(&folder, "--minutes 1 --parts facts,benches --benches kernels");
        assert!(rows.iter().all(|row| row["what"] != "another"), "{rows:?}");
        let refused = run_by(
            None,
            &folder.0,
            &Options::parse(["--benches=fast".into()]).unwrap().unwrap(),
            super::super::suite::run,
        );
        assert_eq!(refused.unwrap_err().text, "there is no bench fast");
        let (result, rows, summary) = visit(&folder, "--minutes 1 --parts facts,benches,tests");
        assert_eq!(result.unwrap_err().status, 1);
        let results = folder.0.join("out");
        let expected = format!(
            "==== summary: commit abc\n\
             FAILED  another: failed, status 1\n    error: of a bench\n\
             FAILED  tests: all in one process: crashed, signal 6; those that had not finished ran again alone\n\
             FAILED  test a::bad: failed\n    thread panicked at a.rs:1:\n    not equal\n\
             FAILED  test a::shy: failed, but passes alone\n\
             FAILED  test a::crash: crashed, signal 11\n\
             facts: ok; kernels: ok; another: failed, status 1\n\
             a software driver: the figures say nothing about GPUs\n\
             quick: the times say nothing, they show only that the benches work\n\
             a ceiling\nresults: {}\n",
            results.display()
        );
        assert_eq!(summary, expected);
        let tests = |what: &str| rows.iter().find(|row| row["bench"] == "tests" && row["what"] == what);
        assert_eq!(tests("failed, but passes alone").unwrap()["detail"], "a::shy");
        let counts = ["passed", "ignored"].map(|what| tests(what).unwrap()["value"].as_u64().unwrap());
        assert_eq!(counts, [2, 1]);
        assert!(rows.contains(&json!({"bench": "tests", "what": "failed", "value": 3, "unit": "tests"})));
        assert!(rows.contains(&json!({"bench": "visit", "quick": true})));
        assert_eq!(rows[0]["commit"], "abc");
        let log = fs::read_to_string(results.join("log.txt")).unwrap();
        assert!(log.contains("---- a::bad: failed\nthread panicked"));
    }

    #[test]
    fn benches_without_robust_access() {
        let bench = r#"echo "{\"bench\":\"ran\",\"what\":\"$WGPU_ATTENTION_UNCHECKED $*\"}" >>"$WGPU_ATTENTION_ROWS""#;
        let opengl = FACTS.replace("device_type", "backend\":\"gl\",\"device_type");
        for (facts, expected) in
            [(FACTS, &["1 --bench kernels/(fused|matrix)/", "1 --bench --only tensors"][..]), (&opengl, &[])]
        {
            let folder =
                packed(&[("facts", facts), ("report", REPORT), ("kernels", bench), ("decode", bench)]);
            let (result, rows, _) = visit(&folder, "--minutes 1 --parts facts,unchecked");
            result.unwrap();
            let ran = rows.iter().filter(|row| row["bench"] == "ran");
            let ran: Vec<_> = ran.filter_map(|row| row["what"].as_str()).collect();
            assert_eq!(ran, expected);
        }
    }

    #[test]
    fn a_visit_without_a_device() {
        let folder = packed(&[
            ("facts", "echo 'error: no adapter'; exit 1"),
            ("report", REPORT),
            ("kernels", "exit 0"),
        ]);
        let (result, rows, summary) = visit(&folder, "--minutes 1");
        assert_eq!(result.unwrap_err().status, 1);
        let start = "==== summary: commit abc\nFAILED  facts: failed, status 1\n    error: no adapter\n\
            FAILED  no device: nothing else was tried\nfacts: failed, status 1\na ceiling\n";
        assert!(summary.starts_with(start), "{summary}");
        assert_eq!(rows.len(), 2);
    }

    #[test]
    fn a_visit_without_time() {
        let folder = packed(&[("facts", FACTS), ("report", REPORT)]);
        let (result, rows, _) = visit(&folder, "--minutes 0 --parts facts");
        assert_eq!(result.unwrap_err().status, 1);
        assert!(rows.contains(&json!({"bench": "part", "what": "facts", "detail": "no time was left"})));
    }

    #[test]
    fn parts_in_a_line() {
        let rows = [
            json!({"bench": "part", "what": "facts", "value": 1, "unit": "s", "detail": "ok"}),
            json!({"bench": "kernels", "what": "fused", "ms": 1}),
            json!({"bench": "part", "what": "torch", "detail": "skipped: \"no\" python3"}),
        ];
        assert_eq!(parts_of(&rows), "facts: ok; torch: skipped: \"no\" python3");
    }
}
