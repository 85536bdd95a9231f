//! `scripts/size`: measures programs, and compares them with the numbers in CHANGELOG.md.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::browser::{Log, Program, TRIPLE, Toolchain, build};
use crate::error::{At, Result, failed};
use crate::repo::{Repo, executables};
use crate::{files, process};

const USAGE: &str = "\
scripts/size: measures the bytes that the library adds to programs.

The section \"Sizes\" of CHANGELOG.md has a line for each. The check fails if one is more than 5 % larger than its line, or
if it has no line: then change the line, which tells users. A program that cannot be built is skipped, with a message.
";

/// The measured sizes, in the words of CHANGELOG.md.
const NATIVE: &str = "A native program with `Attention`, stripped, over one with wgpu alone";
const WASM: &str = "A WebAssembly program with `Attention`";
const WASM_OVER: &str = "A WebAssembly program with `Attention`, over one with wgpu alone";
const PAGE: &str = "The WebAssembly of `examples/web`";

const PROGRAMS: [&str; 2] = ["size_of_wgpu", "size_of_attention"];
const OF_PAGE: Program = Program { cargo: &["--release", "-p", "web", "--bin", "web"], place: "size" };

pub fn main(repo: &Repo, words: Vec<OsString>) -> Result {
    if !words.is_empty() {
        print!("{USAGE}");
        return Ok(());
    }
    let started = Instant::now();
    let path = repo.root.join("CHANGELOG.md");
    let changelog = fs::read_to_string(&path).at(&path)?;
    let mut sizes = native(repo)?;
    sizes.extend(wasm(repo)?);
    let mut larger = Vec::new();
    for (what, bytes) in &sizes {
        let recorded = recorded(&changelog, what);
        let share = recorded.map_or(f64::INFINITY, |recorded| *bytes as f64 / recorded as f64);
        println!("{what}: {} bytes, {share:.3} of CHANGELOG.md's", grouped(*bytes));
        if share > 1.05 {
            larger.push(*what);
        }
    }
    println!("{} s", started.elapsed().as_secs());
    if larger.is_empty() {
        Ok(())
    } else {
        Err(failed(format!("CHANGELOG.md must say: {}", larger.join("; "))))
    }
}

/// Measures the native programs, stripped.
fn native(repo: &Repo) -> Result<Vec<(&'static str, u64)>> {
    let mut cargo = repo.cargo();
    cargo.args([
        "build",
        "--release",
        "--locked",
        "-p",
        "size",
        "--message-format",
        "json-render-diagnostics",
    ]);
    let built = executables(&process::output(&mut cargo)?);
    let folder = repo.folder("size")?;
    let mut sizes = Vec::new();
    for name in PROGRAMS {
        let (_, path) = built.iter().find(|(built, _)| built == name).ok_or_else(|| failed(name))?;
        let stripped = folder.join(name);
        if process::quiet_output(Command::new("strip").arg("-o").arg(&stripped).arg(path)).is_none() {
            println!("skipped: native programs, there is no strip");
            return Ok(Vec::new());
        }
        sizes.push(bytes(&stripped)?);
    }
    Ok(vec![(NATIVE, sizes[1].saturating_sub(sizes[0]))])
}

/// Measures the WebAssembly programs, and the page's after wasm-bindgen's tool.
fn wasm(repo: &Repo) -> Result<Vec<(&'static str, u64)>> {
    let folder = repo.folder("browser")?;
    let log = Log::new(folder.join("log.size"))?;
    let Some(toolchain) = Toolchain::get(repo, TRIPLE, &log)? else { return Ok(Vec::new()) };
    let mut cargo = repo.cargo();
    cargo.envs(toolchain.variables()).args([
        "build",
        "--release",
        "--locked",
        "-p",
        "size",
        "--target",
        TRIPLE,
    ]);
    let built = executables(&process::output(cargo.args(["--message-format", "json-render-diagnostics"]))?);
    let size = |name: &str| -> Result<u64> {
        let (_, path) = built.iter().find(|(built, _)| built == name).ok_or_else(|| failed(name))?;
        bytes(path)
    };
    let [wgpu, attention] = [size(PROGRAMS[0])?, size(PROGRAMS[1])?];
    build(repo, &folder, &toolchain, OF_PAGE)?;
    let page = files::ending(&folder.join(OF_PAGE.place), ".wasm").pop();
    let page = page.ok_or_else(|| failed("the page has no WebAssembly"))?;
    Ok(vec![(WASM, attention), (WASM_OVER, attention.saturating_sub(wgpu)), (PAGE, bytes(&page)?)])
}

fn bytes(path: &Path) -> Result<u64> {
    Ok(fs::metadata(path).at(path)?.len())
}

/// Returns the bytes that the changelog has for a program.
fn recorded(changelog: &str, what: &str) -> Option<u64> {
    let line = changelog.lines().find_map(|line| line.strip_prefix(&format!("- {what}: ")))?;
    line.split(' ').next()?.replace(',', "").parse().ok()
}

/// Returns a number with commas.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_the_changelog() {
        let text = format!("## 0.1.0\n- {WASM_OVER}: 7\n- {WASM}: 1,234,567 bytes\n");
        assert_eq!(
            [WASM, WASM_OVER, PAGE].map(|what| recorded(&text, what)),
            [Some(1_234_567), Some(7), None]
        );
        assert_eq!([7, 1000, 1_234_567].map(grouped), ["7", "1,000", "1,234,567"]);
    }
}
