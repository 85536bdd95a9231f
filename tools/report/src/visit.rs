//! The rows of one visit to a machine.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use rows::{Problem, Row};

pub struct Visit {
    /// The stem of the file.
    pub name: String,
    pub rows: Vec<Row>,
}

impl Visit {
    pub fn read(file: &Path) -> Result<Self, String> {
        let at = file.display();
        let text = fs::read_to_string(file).map_err(|e| format!("{at}: {e}"))?;
        let name = file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        Self::parse(name, &text).map_err(|e| format!("{at}:{e}"))
    }

    pub fn parse(name: String, text: &str) -> Result<Self, String> {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let rows = lines
            .map(|(n, line)| serde_json::from_str(line).map_err(|e| format!("{}: {e}", n + 1)))
            .collect::<Result<_, _>>()?;
        Ok(Visit { name, rows })
    }

    /// Returns the rows of a bench, except those of a device without robust access.
    pub fn of<'a>(&'a self, bench: &'a str) -> impl Iterator<Item = &'a Row> {
        self.checked().filter(move |row| row.bench == bench)
    }

    fn checked(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.unchecked != Some(true))
    }

    /// Returns the rows with a kernel's time on the device, except those of a device without robust
    /// access.
    pub fn kernels(&self) -> impl Iterator<Item = &Row> {
        self.checked().filter(|row| is_kernel(row))
    }

    /// Returns the rows with a kernel's time on a device without robust access. With each comes the
    /// row of the same call on a device that has it.
    pub fn unchecked(&self) -> impl Iterator<Item = (&Row, Option<&Row>)> {
        let call = |row: &Row| (row.bench.clone(), row.what.clone(), row.title());
        let same = move |row: &Row| self.kernels().find(|other| call(other) == call(row));
        let unchecked = self.rows.iter().filter(|row| row.unchecked == Some(true) && is_kernel(row));
        unchecked.map(move |row| (row, same(row)))
    }

    /// Returns the rate of an attention call over the best rate of this crate's products. Type and
    /// units are the same. Arithmetic limits both, so this is the ratio of their shares.
    pub fn of_product(&self, call: &Row) -> Option<f64> {
        let by_arithmetic = |row: &Row| row.bound.as_deref() == Some("arithmetic");
        if call.q_len.is_none() || !by_arithmetic(call) {
            return None;
        }
        let what = if call.what.starts_with("matrix") { "project, matrix" } else { "project" };
        let products = self.of("kernels").filter(|row| row.what == what && row.dtype() == call.dtype());
        let best = products.filter(|row| by_arithmetic(row)).filter_map(Row::share).reduce(f64::max)?;
        Some(call.share()? / best)
    }

    /// Returns the first value of a field among this crate's rows.
    pub fn first<'a, T>(&'a self, field: impl Fn(&'a Row) -> Option<T>) -> Option<T> {
        self.rows.iter().filter(|row| row.bench != "torch").find_map(field)
    }

    pub fn device(&self) -> &str {
        self.first(|row| row.device.as_deref()).unwrap_or("unknown device")
    }

    /// True if the driver computes on the processor.
    pub fn is_software(&self) -> bool {
        let named = ["llvmpipe", "SwiftShader", "lavapipe", "softpipe"];
        self.first(|row| row.device_type.as_deref()) == Some("Cpu")
            || named.iter().any(|name| self.device().contains(name))
    }

    /// Returns the warning that a plot must show about the origin of its figures.
    pub fn warning(&self) -> Option<String> {
        if self.first(|row| row.quick) == Some(true) {
            return Some("A quick run: the times say nothing.".into());
        }
        self.is_software().then(|| "A software driver: this says nothing about GPUs.".into())
    }

    /// Returns PyTorch's fastest kernel for each problem: on a GPU if this crate's figures are from
    /// a GPU.
    pub fn torch(&self) -> HashMap<Problem<'_>, (f64, &str)> {
        let wanted = if self.is_software() { "cpu" } else { "cuda" };
        let mut fastest = HashMap::new();
        for row in self.of("torch").filter(|row| row.backend.as_deref() == Some(wanted)) {
            if let (Some(problem), Some(ms)) = (row.problem(), row.ms) {
                let best = fastest.entry(problem).or_insert((ms, row.what.as_str()));
                if ms < best.0 {
                    *best = (ms, &row.what);
                }
            }
        }
        fastest
    }
}

fn is_kernel(row: &Row) -> bool {
    ["kernels", "matrix", "decode", "scaling"].contains(&row.bench.as_str()) && row.ms.is_some()
}

/// Returns the problem of a row that PyTorch's forward pass also solves. Rows of gradients have
/// none.
pub fn forward_problem(row: &Row) -> Option<Problem<'_>> {
    row.problem().filter(|_| !row.what.starts_with("backward"))
}
