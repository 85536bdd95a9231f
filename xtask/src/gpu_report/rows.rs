//! Rows of figures: JSON lines, as `benches/common/rows.rs` writes them.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use serde_json::Value;

use crate::error::{At, Result, failed};

pub fn read(path: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(path).at(path)?;
    let parse = |(n, line)| {
        serde_json::from_str(line)
            .map_err(|error| failed(format!("{}, line {}: {error}", path.display(), n + 1)))
    };
    text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(parse).collect()
}

pub fn append(path: &Path, row: &Value) -> Result {
    let mut file = OpenOptions::new().create(true).append(true).open(path).at(path)?;
    file.write_all(format!("{row}\n").as_bytes()).at(path)
}

/// True if the rows are from a software driver.
pub fn of_software(rows: &[Value]) -> bool {
    rows.iter().any(|row| row["device_type"] == "Cpu")
}

/// Returns `field` of the first row that has it.
pub fn text<'a>(rows: &'a [Value], bench: &str, field: &str) -> Option<&'a str> {
    rows.iter().filter(|row| row["bench"] == bench).find_map(|row| row[field].as_str())
}
