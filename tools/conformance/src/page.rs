//! The page of results.

use std::fmt::Write;
use std::path::Path;
use std::{fs, io};

use wgpu_attention::Gpu;

use crate::section::Section;
use crate::suites::SUITES;

/// The name of the file, in a suite's folder of cases, with its results.
const RESULTS: &str = "results.md";

/// Stores the results of a suite: a row of the page's table, and the suite's section.
pub fn store(cases: &Path, section: &Section) -> io::Result<()> {
    let [cases_run, passed, disputed, refused, failed] = section.counts();
    let (title, package) = (section.suite.title, &section.package);
    let row =
        format!("| {title} | {package} | {cases_run} | {passed} | {disputed} | {refused} | {failed} |\n");
    fs::write(cases.join(section.suite.folder).join(RESULTS), row + &section.text())
}

/// Returns the page with the last results of each suite that has run.
pub fn text(gpu: &Gpu, cases: &Path) -> String {
    let info = gpu.device().adapter_info();
    let mut text = String::from(INTRODUCTION);
    let _ = writeln!(text, "\nThese runs were on {}, {} {}.", info.name, info.driver, info.driver_info);
    text += "\n| suite | package | cases | passed | under one tolerance only | refused | failed |\n|---|---|--:|--:|--:|--:|--:|\n";
    let mut sections = String::new();
    for suite in SUITES {
        let results = fs::read_to_string(cases.join(suite.folder).join(RESULTS)).unwrap_or_default();
        if let Some((row, section)) = results.split_once('\n') {
            text += &format!("{row}\n");
            sections += section;
        }
    }
    text + &sections
}

const INTRODUCTION: &str = "\
<!-- Written by `scripts/conformance`. -->
# Other projects' tests

This page has the results of other projects' tests. ONNX's package has its cases; for the other suites the cases cover the parameters of a project's tests.
`scripts/conformance` installs the packages and computes the expected outputs with them. It runs the cases through the public interface, and writes the page.
No code or data of these projects is in this repository.

A case must pass under two tolerances. One is its suite's. The other is [this project's](internals/testing.md#truth-and-tolerance): at most twice the error of
the suite's output, plus a small floor. It is measured from an output in f64. For f32 the second is usually stricter, for f16 and bf16 the first.
";
