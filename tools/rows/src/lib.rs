//! Figures in files of JSON lines: one object a line, without the fields that do not apply.
//! Benches, `benches/sdpa.py` and visits to machines write them, reports are made of them.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A figure, and what it is the figure of.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Row {
    /// The bench: `check`, `tune`, `ceilings`, `kernels`, `record`, `scaling`, `decode`, `matrix`,
    /// `torch`, `peer`; of a visit `visit`, `facts`, `part`, `tests`.
    pub bench: String,
    /// What was measured: `fused`, `copy`, `sdpa flash`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub what: String,
    /// `batch × heads × length × head_dim`, for readers.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub shape: String,
    /// Sequences of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// Of queries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<usize>,
    /// Of keys and values.
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
    /// The larger of the least times that arithmetic and memory take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor_ms: Option<f64>,
    /// What sets that: `arithmetic` or `memory`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<String>,
    /// The floor over the time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Time of a recording on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_us: Option<f64>,
    /// Of a recording on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocations: Option<f64>,
    /// Memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<f64>,
    /// A ceiling, an exponent, a count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// Of `value`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// The adapter's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Its name and version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// wgpu's, or `cuda` or `cpu` of PyTorch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// Of `facts`, as wgpu names it: `Cpu` is a software driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_type: Option<String>,
    /// Of `facts`: `32 to 32` invocations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subgroups: Option<String>,
    /// Of `facts`: the products of cooperative matrices that the adapter lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matrices: Option<Vec<String>>,
    /// Of `visit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    /// Of `visit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Of `visit`: the tree held changes that are in no commit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty: Option<bool>,
    /// Of `visit`: benches did as little as shows that they work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quick: Option<bool>,
    /// A name or a reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// The problem of a row: rows with the same one can be compared.
pub type Problem<'a> = ([Option<usize>; 7], &'a str, &'a str);

impl Row {
    /// `None` of a row that is not of attention alone.
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

    /// `none` where none is named.
    pub fn mask(&self) -> &str {
        self.mask.as_deref().unwrap_or("none")
    }

    /// `f32` where none is named.
    pub fn dtype(&self) -> &str {
        self.dtype.as_deref().unwrap_or("f32")
    }

    /// The floor over the time.
    pub fn share(&self) -> Option<f64> {
        self.share.or_else(|| Some(self.floor_ms? / self.ms?))
    }

    /// The shape with what its text does not say of the mask and of a type other than f32.
    pub fn title(&self) -> String {
        let mut title = self.shape.clone();
        for word in [self.mask(), self.dtype()] {
            if !["none", "f32"].contains(&word) && !title.contains(word) {
                title = format!("{title} {word}");
            }
        }
        title
    }

    /// Adds a line to `file`, which need not be there yet. An error too if a number is none: JSON
    /// has no word for it.
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
    fn what_is_written_is_what_is_read() {
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
    fn what_is_no_number_is_not_written() {
        let file = std::env::temp_dir().join(format!("rows-nan-{}.jsonl", std::process::id()));
        let error = Row { ms: Some(f64::NAN), ..Row::default() }.append(&file).expect_err("no number");
        assert_eq!(error.to_string(), "ms is no number");
        assert!(!file.exists());
    }
}
