//! The results of a suite.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::case::{Case, Errors};
use crate::outcome::{Failed, Outcome, Ran};
use crate::suites::Suite;

/// The result of a case.
pub enum Verdict {
    /// Errors of the outputs, and expected outputs that the library does not have.
    Computed(Worst, Vec<String>),
    Refused(&'static str),
    Failed(String),
}

impl Verdict {
    pub fn of(case: &Case, ran: Ran) -> Self {
        match ran {
            Ok(Outcome::Refused(why)) => Verdict::Refused(why),
            Ok(Outcome::Computed(outputs)) => Verdict::of_outputs(case, &outputs),
            Err(Failed(why)) => Verdict::Failed(why),
        }
    }

    fn of_outputs(case: &Case, outputs: &BTreeMap<&'static str, Vec<f64>>) -> Self {
        let mut worst = Worst::default();
        let mut left_out = Vec::new();
        for output in &case.outputs {
            match outputs.get(output.name.as_str()) {
                Some(got) => worst.include(&output.name, case.errors(output, got)),
                None => left_out.push(output.name.clone()),
            }
        }
        if left_out.len() == case.outputs.len() {
            return Verdict::Failed("no output was compared".into());
        }
        Verdict::Computed(worst, left_out)
    }
}

/// The largest errors of a case, and the outputs that exceed a tolerance.
#[derive(Default)]
pub struct Worst {
    errors: Errors,
    outputs: Vec<String>,
}

impl Worst {
    fn include(&mut self, output: &str, errors: Errors) {
        self.errors.include(errors);
        if errors.of_suite > 1.0 || errors.of_project > 1.0 {
            self.outputs.push(output.into());
        }
    }
}

/// The cases of an operator.
#[derive(Default)]
struct Group {
    cases: usize,
    passed: usize,
    worst: Errors,
}

/// The results of a suite.
pub struct Section {
    pub suite: &'static Suite,
    /// The package with the suite's implementation, and its version.
    pub package: String,
    groups: BTreeMap<String, Group>,
    /// Cases that pass under one of the tolerances, with both errors.
    disputed: Vec<(String, Errors)>,
    refused: Vec<(String, &'static str)>,
    failed: Vec<(String, String)>,
    /// Expected outputs that the library does not have, with the number of cases.
    left_out: BTreeMap<(String, String), usize>,
}

impl Section {
    pub fn new(suite: &'static Suite) -> Self {
        Section {
            suite,
            package: String::new(),
            groups: BTreeMap::new(),
            disputed: Vec::new(),
            refused: Vec::new(),
            failed: Vec::new(),
            left_out: BTreeMap::new(),
        }
    }

    pub fn add(&mut self, case: &Case, verdict: Verdict) {
        self.package.clone_from(&case.package);
        let group = self.groups.entry(case.operator.clone()).or_default();
        group.cases += 1;
        match verdict {
            Verdict::Refused(why) => self.refused.push((case.name.clone(), why)),
            Verdict::Failed(why) => self.failed.push((case.name.clone(), why)),
            Verdict::Computed(Worst { errors, outputs }, left_out) => {
                let name = || format!("{} ({})", case.name, outputs.join(", "));
                for output in left_out {
                    *self.left_out.entry((case.operator.clone(), output)).or_default() += 1;
                }
                match (errors.of_suite <= 1.0, errors.of_project <= 1.0) {
                    (true, true) => {
                        group.passed += 1;
                        group.worst.include(errors);
                    }
                    (false, false) => {
                        let why = format!(
                            "off by {} of the suite's tolerance, {} of this project's",
                            number(errors.of_suite),
                            number(errors.of_project)
                        );
                        self.failed.push((name(), why));
                    }
                    _ => self.disputed.push((name(), errors)),
                }
            }
        }
    }

    pub fn failures(&self) -> usize {
        self.failed.len()
    }

    /// Returns the numbers of all cases, and of those passed, passed under one tolerance only,
    /// refused, failed.
    pub fn counts(&self) -> [usize; 5] {
        let groups = self.groups.values();
        let (cases, passed) =
            groups.fold((0, 0), |(cases, passed), group| (cases + group.cases, passed + group.passed));
        [cases, passed, self.disputed.len(), self.refused.len(), self.failed.len()]
    }

    pub fn summary(&self) -> String {
        let [cases, passed, disputed, refused, failed] = self.counts();
        let mut text = format!(
            "{}: {cases} cases, {passed} passed, {disputed} under one tolerance only, {refused} refused, {failed} failed\n",
            self.suite.folder
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

    /// Returns the section of the page.
    pub fn text(&self) -> String {
        let Suite { title, about, .. } = self.suite;
        let mut text = format!("\n## {title}\n\n{about}\n");
        text += "\n| operator | cases | passed | their worst error, of the suite's tolerance | of this project's |\n|---|--:|--:|--:|--:|\n";
        for (operator, group) in &self.groups {
            let Group { cases, passed, worst } = group;
            let (a, b) = (number(worst.of_suite), number(worst.of_project));
            let _ = writeln!(text, "| {operator} | {cases} | {passed} | {a} | {b} |");
        }
        if !self.left_out.is_empty() {
            text += "\nOutputs that the library does not have, and that are not compared:\n\n| operator | output | cases |\n|---|---|--:|\n";
            for ((operator, output), cases) in &self.left_out {
                let _ = writeln!(text, "| {operator} | {output} | {cases} |");
            }
        }
        if !self.disputed.is_empty() {
            text += "\nCases that pass under one tolerance only, and do not count as passed. The last column is the error of the suite's output, from the output in f64:\n\n| case, outputs | error, of the suite's tolerance | of this project's | of the suite's output, of its tolerance |\n|---|--:|--:|--:|\n";
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
