//! Figures in files of JSON lines: one object a line, without absent fields. Benches,
//! `benches/sdpa.py` and visits to machines write them. Reports are made from them.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A figure with its description.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Row {
    /// The bench: `check`, `tune`, `ceilings`, `kernels`, `record`, `scaling`, `decode`, `matrix`,
    /// `torch`, `peer`. Rows of a visit have `visit`, `facts`, `part`, `tests`.
    pub bench: String,
    /// The measured operation: `fused`, `copy`, `sdpa flash`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub what: String,
    /// `batch × heads × length × head_dim`, for readers.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub shape: String,
    /// Sequences of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// Heads of queries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<usize>,
    /// Heads of keys and values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_heads: Option<usize>,
    /// Queries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub q_len: Option<usize>,
    /// Keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_len: Option<usize>,
    /// Width of queries and keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Width of values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_dim: Option<usize>,
    /// `none`, `causal`, `window 256`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask: Option<String>,
    /// `f32`, `f16` or `bf16`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<String>,
    /// Median time on the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ms: Option<f64>,
    /// The larger of the two least times: of arithmetic and of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor_ms: Option<f64>,
    /// The limit that sets the floor: `arithmetic` or `memory`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<String>,
    /// The floor over the time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Time of a recording on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_us: Option<f64>,
    /// Allocations of a recording on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocations: Option<f64>,
    /// Memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<f64>,
    /// A ceiling, an exponent, a count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// The unit of `value`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// The adapter's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The driver's name and version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// wgpu's backend, or PyTorch's `cuda` or `cpu`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// True if the device had no robust access to buffers. Never compare such a row with rows of
    /// devices that have it, except to say what robust access costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unchecked: Option<bool>,
    /// For `facts`: the device type as wgpu names it. `Cpu` is a software driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_type: Option<String>,
    /// For `facts`: the subgroup sizes, as in `32 to 32` invocations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subgroups: Option<String>,
    /// For `facts`: the products of cooperative matrices that the adapter lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matrices: Option<Vec<String>>,
    /// For `visit`: the date.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    /// For `visit`: the commit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// For `visit`: true if the tree had uncommitted changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty: Option<bool>,
    /// For `visit`: true if the benches ran only to show that they work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quick: Option<bool>,
    /// A name or a reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// The problem of a row. Rows with the same problem can be compared.
pub type Problem<'a> = ([Option<usize>; 7], &'a str, &'a str);

impl Row {
    /// Returns `None` if the row is not about attention alone.
    pub fn problem(&self) -> Option<Problem<'_>> {
        if self.what == "layer" {
            return None;
        }
        self.q_len?;
        let sizes = [
            self.batch,
            self.heads,
            self.kv_heads.or(self.heads),
            self.q_len,
            self.kv_len.or(self.q_len),
            self.head_dim,
            self.value_dim.or(self.head_dim),
        ];
        Some((sizes, self.mask(), self.dtype()))
    }

    /// Returns the mask, or `none`.
    pub fn mask(&self) -> &str {
        self.mask.as_deref().unwrap_or("none")
    }

    /// Returns the dtype, or `f32`.
    pub fn dtype(&self) -> &str {
        self.dtype.as_deref().unwrap_or("f32")
    }

    /// Returns the floor over the time.
    pub fn share(&self) -> Option<f64> {
        self.share.or_else(|| Some(self.floor_ms? / self.ms?))
    }

    /// Returns the shape, with the mask and a dtype other than f32 if its text lacks them.
    pub fn title(&self) -> String {
        let mut title = self.shape.clone();
        for word in [self.mask(), self.dtype()] {
            if !["none", "f32"].contains(&word) && !title.contains(word) {
                title = format!("{title} {word}");
            }
        }
        title
    }

    /// Appends a line to `file`, which it creates if needed. A NaN or infinite number is an error,
    /// because JSON cannot represent it.
    pub fn append(&self, file: &Path) -> io::Result<()> {
        let row = serde_json::to_value(self)?;
        if let Some((field, _)) =
            row.as_object().and_then(|row| row.iter().find(|(_, value)| value.is_null()))
        {
            return Err(io::Error::other(format!("{field} is no number")));
        }
        let mut file = OpenOptions::new().create(true).append(true).open(file)?;
        file.write_all(format!("{row}\n").as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_survive_a_round_trip() {
        let row = Row { bench: "kernels".into(), q_len: Some(3), ms: Some(0.5), ..Row::default() };
        let file = std::env::temp_dir().join(format!("rows-{}.jsonl", std::process::id()));
        row.append(&file).expect("a file");
        row.append(&file).expect("a file");
        let text = std::fs::read_to_string(&file).expect("the file");
        std::fs::remove_file(&file).expect("the file");
        assert_eq!(text, "{\"bench\":\"kernels\",\"ms\":0.5,\"q_len\":3}\n".repeat(2));
        let read: Row = serde_json::from_str(text.lines().next().expect("a line")).expect("a row");
        assert_eq!(read, row);
    }

    #[test]
    fn non_finite_numbers_are_not_written() {
        let file = std::env::temp_dir().join(format!("rows-nan-{}.jsonl", std::process::id()));
        let error = Row { ms: Some(f64::NAN), ..Row::default() }.append(&file).expect_err("no number");
        assert_eq!(error.to_string(), "ms is no number");
        assert!(!file.exists());
    }
}
