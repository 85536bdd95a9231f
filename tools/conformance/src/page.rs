//! The page of results.

use std::fmt::Write;

use wgpu_attention::Gpu;

use crate::section::Section;

pub fn text(gpu: &Gpu, sections: &[Section]) -> String {
    let info = gpu.device().adapter_info();
    let mut text = String::from(INTRODUCTION);
    let _ = writeln!(text, "\nThese runs were on {}, {} {}.", info.name, info.driver, info.driver_info);
    text += "\n| suite | package | cases | passed | under one tolerance only | refused | failed |\n|---|---|--:|--:|--:|--:|--:|\n";
    for section in sections {
        let [cases, passed, disputed, refused, failed] = section.counts();
        let (title, package) = (section.suite.title, &section.package);
        let _ = writeln!(
            text,
            "| {title} | {package} | {cases} | {passed} | {disputed} | {refused} | {failed} |"
        );
    }
    for section in sections {
        text += &section.text();
    }
    text
}

const INTRODUCTION: &str = "\
<!-- Written by `scripts/conformance`. -->
# Other projects' tests

This page has the results of tests that other projects wrote for their own code. `scripts/conformance` installs their packages, makes the cases, runs them
through the public interface, and writes the page. None of their code or data is in this repository.

A case must pass under two tolerances. One is its suite's. The other is [this project's](internals/testing.md#truth-and-tolerance): at most twice the error of
the suite's output, plus a small floor. It is measured from an output in f64. For f32 the second is usually stricter, for f16 and bf16 the first.
";
