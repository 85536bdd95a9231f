//! The page of results.

use std::collections::BTreeMap;
use std::fmt::Write;

use wgpu_attention::Gpu;

use crate::case::{Case, Errors};

/// The result of a case.
pub enum Verdict {
    /// Errors of the outputs, and expected outputs that the library does not have.
    Computed(Errors, Vec<String>),
    Refused(&'static str),
    Failed(String),
}

impl Verdict {
    pub fn of(case: &Case, outputs: &BTreeMap<&'static str, Vec<f64>>) -> Self {
        let mut worst = Errors::default();
        let mut left_out = Vec::new();
        for output in &case.outputs {
            match outputs.get(output.name.as_str()) {
                Some(got) => {
                    let errors = case.errors(output, got);
                    worst.of_suite = worst.of_suite.max(errors.of_suite);
                    worst.of_project = worst.of_project.max(errors.of_project);
                    worst.of_expected = worst.of_expected.max(errors.of_expected);
                }
                None => left_out.push(output.name.clone()),
            }
        }
        if left_out.len() == case.outputs.len() {
            return Verdict::Failed("no output was compared".into());
        }
        Verdict::Computed(worst, left_out)
    }
}

/// The cases of an operator.
#[derive(Default)]
struct Group {
    cases: usize,
    passed: usize,
    worst: Errors,
}

pub struct Page {
    device: String,
    version: String,
    groups: BTreeMap<String, Group>,
    /// Cases that pass under one of the tolerances, with both errors.
    disputed: Vec<(String, Errors)>,
    refused: Vec<(String, &'static str)>,
    failed: Vec<(String, String)>,
    /// Expected outputs that the library does not have, with the number of cases.
    left_out: BTreeMap<(String, String), usize>,
}

impl Page {
    pub fn new(gpu: &Gpu) -> Self {
        let info = gpu.device().adapter_info();
        Page {
            device: format!("{}, {} {}", info.name, info.driver, info.driver_info),
            version: String::new(),
            groups: BTreeMap::new(),
            disputed: Vec::new(),
            refused: Vec::new(),
            failed: Vec::new(),
            left_out: BTreeMap::new(),
        }
    }

    pub fn add(&mut self, case: &Case, verdict: Verdict) {
        self.version.clone_from(&case.version);
        let group = self.groups.entry(case.operator.clone()).or_default();
        group.cases += 1;
        match verdict {
            Verdict::Refused(why) => self.refused.push((case.name.clone(), why)),
            Verdict::Failed(why) => self.failed.push((case.name.clone(), why)),
            Verdict::Computed(errors, left_out) => {
                for output in left_out {
                    *self.left_out.entry((case.operator.clone(), output)).or_default() += 1;
                }
                match (errors.of_suite <= 1.0, errors.of_project <= 1.0) {
                    (true, true) => {
                        group.passed += 1;
                        group.worst.of_suite = group.worst.of_suite.max(errors.of_suite);
                        group.worst.of_project = group.worst.of_project.max(errors.of_project);
                    }
                    (false, false) => {
                        let why = format!(
                            "off by {} of ONNX's tolerance, {} of this project's",
                            number(errors.of_suite),
                            number(errors.of_project)
                        );
                        self.failed.push((case.name.clone(), why));
                    }
                    _ => self.disputed.push((case.name.clone(), errors)),
                }
            }
        }
    }

    pub fn failures(&self) -> usize {
        self.failed.len()
    }

    fn cases(&self) -> usize {
        self.groups.values().map(|group| group.cases).sum()
    }

    fn passed(&self) -> usize {
        self.groups.values().map(|group| group.passed).sum()
    }

    pub fn summary(&self) -> String {
        let mut text = format!(
            "ONNX {}: {} cases, {} passed, {} under one tolerance only, {} refused, {} failed\n",
            self.version,
            self.cases(),
            self.passed(),
            self.disputed.len(),
            self.refused.len(),
            self.failed.len()
        );
        for (name, why) in &self.failed {
            let _ = writeln!(text, "FAILED {name}: {why}");
        }
        for (name, errors) in &self.disputed {
            let _ = writeln!(
                text,
                "one tolerance: {name}: {} {}",
                number(errors.of_suite),
                number(errors.of_project)
            );
        }
        for (name, why) in &self.refused {
            let _ = writeln!(text, "refused {name}: {why}");
        }
        text
    }

    pub fn text(&self) -> String {
        let mut text = String::from(INTRODUCTION);
        let _ = writeln!(
            text,
            "\n## ONNX's node cases\n\nPackage `onnx` {}, on {}.\n",
            self.version, self.device
        );
        text += "| operator | cases | passed | their worst error, of ONNX's tolerance | of this project's |\n|---|--:|--:|--:|--:|\n";
        for (operator, group) in &self.groups {
            let Group { cases, passed, worst } = group;
            let (a, b) = (number(worst.of_suite), number(worst.of_project));
            let _ = writeln!(text, "| {operator} | {cases} | {passed} | {a} | {b} |");
        }
        let _ = writeln!(text, "| all | {} | {} | | |", self.cases(), self.passed());
        if !self.left_out.is_empty() {
            text += "\nOutputs that the library does not have, and that are not compared:\n\n| operator | output | cases |\n|---|---|--:|\n";
            for ((operator, output), cases) in &self.left_out {
                let _ = writeln!(text, "| {operator} | {output} | {cases} |");
            }
        }
        if !self.disputed.is_empty() {
            text += "\nCases that pass under one tolerance only, and do not count as passed. The last column is the error of the output that ONNX expects, from the output in f64:\n\n| case | error, of ONNX's tolerance | of this project's | of the expected output, of ONNX's |\n|---|--:|--:|--:|\n";
            for (name, errors) in &self.disputed {
                let (a, b) = (number(errors.of_suite), number(errors.of_project));
                let _ = writeln!(text, "| {name} | {a} | {b} | {} |", number(errors.of_expected));
            }
        }
        if !self.refused.is_empty() {
            text += "\nRefused cases:\n\n| case | why |\n|---|---|\n";
            for (name, why) in &self.refused {
                let _ = writeln!(text, "| {name} | {why} |");
            }
        }
        if !self.failed.is_empty() {
            text += "\nFailed cases:\n\n| case | why |\n|---|---|\n";
            for (name, why) in &self.failed {
                let _ = writeln!(text, "| {name} | {why} |");
            }
        }
        text
    }
}

/// Returns a share with two decimals, a large one with none.
fn number(x: f64) -> String {
    if x >= 100.0 { format!("{x:.0}") } else { format!("{x:.2}") }
}

const INTRODUCTION: &str = "\
<!-- Written by `scripts/conformance`. -->
# Other projects' tests

This page has the results of tests that other projects wrote for their own code. `scripts/conformance` fetches their packages, runs their cases
through the public interface, and writes the page. None of their code or data is in this repository.

A case must pass under two tolerances. One is its suite's, from the output that the suite expects. The other is [this
project's](internals/testing.md#truth-and-tolerance): at most twice the error of the expected output, plus a small floor. It is measured from what the suite's
own implementation computes in f64. For f32 the second is usually stricter, for f16 and bf16 the first.
";
