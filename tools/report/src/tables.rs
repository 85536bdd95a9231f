//! The tables of `benches/RESULTS.md`: one section for each visit.

use std::fmt::Write;

use rows::Row;

use super::figure::{digits, memory};
use super::visit::{Visit, forward_problem};

const HEAD: &str = "# Results

What visits to machines with a GPU gave, the latest first. Made by `cargo run -p report` from `benches/rows`, which
`scripts/gpu-report` fills; do not edit. \"Of ceiling\" is the time that the device's own measured rates allow at
least, as a share of the time taken; \"of product\" is the rate of arithmetic over that of this crate's product of two
large matrices, with the same type and units; \"of PyTorch\" is how fast a kernel is beside PyTorch's fastest `scaled_dot_product_attention` of the
same problem on the same device: above 1.00 it is faster.
";

/// Returns the tables of all visits. `software` includes visits to software drivers.
pub fn results(visits: &[Visit], software: bool) -> String {
    let mut text = HEAD.to_string();
    // Rows of peers have no device facts and no ceilings.
    let measured = |visit: &&Visit| visit.kernels().next().is_some() || visit.of("tests").next().is_some();
    let mut visits: Vec<&Visit> =
        visits.iter().filter(measured).filter(|visit| software || !visit.is_software()).collect();
    visits.sort_by_key(|visit| std::cmp::Reverse(visit.first(|row| row.date.as_deref()).unwrap_or("")));
    if visits.is_empty() {
        text.push_str("\nNo GPU has been visited yet.\n");
    }
    visits.iter().for_each(|visit| text.push_str(&section(visit)));
    text
}

fn section(visit: &Visit) -> String {
    let date = visit.first(|row| row.date.as_deref()).unwrap_or("undated");
    let driver = visit.first(|row| row.driver.as_deref()).unwrap_or("unknown");
    let backend = visit.first(|row| row.backend.as_deref()).unwrap_or("unknown");
    let commit = visit.first(|row| row.commit.as_deref()).unwrap_or("unknown");
    let dirty = if visit.first(|row| row.dirty) == Some(true) { " with uncommitted changes" } else { "" };
    let mut text = format!("\n## {date}: {}\n\n", visit.device());
    if visit.is_software() {
        text.push_str("**Software, says nothing about GPUs.**\n\n");
    }
    if visit.first(|row| row.quick) == Some(true) {
        text.push_str("**Quick: the times say nothing, they show only that the benches work.**\n\n");
    }
    let _ = writeln!(text, "Driver {driver}, {backend}, commit {commit}{dirty}.");
    for facts in visit.of("facts") {
        let matrices = match facts.matrices.as_deref() {
            None | Some([]) => "none".into(),
            Some(matrices) => matrices.join(", "),
        };
        let _ = writeln!(
            text,
            "Subgroups of {}; cooperative matrices: {matrices}.",
            facts.subgroups.as_deref().unwrap_or("?")
        );
    }
    tests(visit, &mut text);
    checked(visit, &mut text);
    tuned(visit, &mut text);
    ceilings(visit, &mut text);
    kernels(visit, &mut text);
    unchecked(visit, &mut text);
    recording(visit, &mut text);
    text
}

fn tests(visit: &Visit, text: &mut String) {
    let counts: Vec<String> =
        visit.of("tests").filter_map(|row| Some(format!("{} {}", row.value? as usize, row.what))).collect();
    if !counts.is_empty() {
        let _ = writeln!(text, "\nTests: {}.", counts.join(", "));
    }
    for row in visit.of("tests") {
        if let Some(name) = &row.detail {
            let _ = writeln!(text, "- {}: `{name}`", row.what);
        }
    }
    let parts = visit.of("part").filter(|row| row.detail.as_deref() != Some("ok"));
    for row in parts {
        let _ = writeln!(text, "- not complete: {} ({})", row.what, row.detail.as_deref().unwrap_or("?"));
    }
}

/// Writes a table, if it has rows.
fn table(text: &mut String, title: &str, columns: &[&str], rows: &[Vec<String>]) {
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(text, "\n### {title}\n\n| {} |\n|{}", columns.join(" | "), "---|".repeat(columns.len()));
    for row in rows {
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
}

/// Writes the check's verdicts on the families that plans use.
fn checked(visit: &Visit, text: &mut String) {
    let line = |row: &Row| vec![row.what.clone(), row.detail.clone().unwrap_or_default()];
    let rows: Vec<_> = visit.of("check").map(line).collect();
    table(text, "Families of kernels", &["", "check"], &rows);
}

/// Writes the results of tuning.
fn tuned(visit: &Visit, text: &mut String) {
    let line = |row: &Row| {
        let gain = row.value.map(digits);
        vec![
            row.what.clone(),
            or_dash(row.ms.map(digits)),
            or_dash(gain),
            row.detail.clone().unwrap_or_default(),
        ]
    };
    let rows: Vec<_> = visit.of("tune").map(line).collect();
    table(text, "KernelOptions", &["", "ms", "× the rules", "plan"], &rows);
}

fn ceilings(visit: &Visit, text: &mut String) {
    let line =
        |row: &Row| Some(vec![row.what.clone(), digits(row.value?), row.unit.clone().unwrap_or_default()]);
    let rows: Vec<_> = visit.of("ceilings").filter_map(line).collect();
    table(text, "Ceilings", &["", "rate", "unit"], &rows);
}

fn or_dash(x: Option<String>) -> String {
    x.unwrap_or_else(|| "–".into())
}

fn kernels(visit: &Visit, text: &mut String) {
    let torch = visit.torch();
    let line = |row: &Row| {
        let ms = row.ms?;
        let torch = forward_problem(row).and_then(|problem| torch.get(&problem));
        Some(vec![
            row.bench.clone(),
            row.what.clone(),
            row.title(),
            digits(ms),
            or_dash(row.floor_ms.map(digits)),
            or_dash(row.bound.clone()),
            or_dash(row.share().map(|share| format!("{:.0} %", 100.0 * share))),
            or_dash(visit.of_product(row).map(|ratio| format!("{ratio:.2}"))),
            or_dash(
                torch.map(|(ms, what)| format!("{} ({})", digits(*ms), what.trim_start_matches("sdpa "))),
            ),
            or_dash(torch.map(|(theirs, _)| format!("{:.2}", theirs / ms))),
            or_dash(row.bytes.map(memory)),
        ])
    };
    let rows: Vec<_> = visit.kernels().filter_map(line).collect();
    let figures = ["ms", "floor", "bound", "of ceiling", "of product", "PyTorch ms", "of PyTorch", "bytes"];
    let columns: Vec<_> = ["bench", "", "shape"].into_iter().chain(figures).collect();
    table(text, "Kernels, time on the device", &columns, &rows);
}

/// Writes the times without robust access, and the times of the same calls with it.
fn unchecked(visit: &Visit, text: &mut String) {
    let line = |(row, checked): (&Row, Option<&Row>)| {
        let ms = row.ms?;
        let with = checked.and_then(|checked| checked.ms);
        Some(vec![
            row.bench.clone(),
            row.what.clone(),
            row.title(),
            digits(ms),
            or_dash(with.map(digits)),
            or_dash(with.map(|with| format!("{:.2}", with / ms))),
        ])
    };
    let rows: Vec<_> = visit.unchecked().filter_map(line).collect();
    let columns = ["bench", "", "shape", "ms without", "ms with", "gain"];
    table(text, "Kernels without robust access to buffers", &columns, &rows);
}

fn recording(visit: &Visit, text: &mut String) {
    let line = |row: &Row| {
        Some(vec![
            row.what.clone(),
            row.title(),
            digits(row.host_us?),
            or_dash(row.allocations.map(|n| format!("{n:.0}"))),
        ])
    };
    let rows: Vec<_> = visit.of("record").filter_map(line).collect();
    table(text, "Recording a call, time on the host", &["", "shape", "µs", "allocations"], &rows);
}

/// Returns lines for a screen: one for each ceiling, and for each kernel except staged ones.
pub fn brief(visit: &Visit) -> String {
    let torch = visit.torch();
    let mut text = String::new();
    for row in visit.of("ceilings") {
        if let Some(value) = row.value {
            let _ = writeln!(
                text,
                "ceiling: {} {} {}",
                row.what,
                digits(value),
                row.unit.as_deref().unwrap_or("")
            );
        }
    }
    for row in visit.of("kernels").filter(|row| row.what != "staged") {
        let Some(ms) = row.ms else { continue };
        let _ = write!(text, "{:16} {:32} {:>8} ms", row.what, row.title(), digits(ms));
        if let Some(share) = row.share() {
            let _ = write!(text, ", {:.0} % of ceiling", 100.0 * share);
        }
        if let Some((theirs, what)) = forward_problem(row).and_then(|problem| torch.get(&problem)) {
            let _ = write!(text, ", {:.2} of PyTorch ({what})", theirs / ms);
        }
        text.push('\n');
    }
    text
}
