//! A figure, as benches write it: one JSON object a line, without the fields that do not apply.

use serde::Deserialize;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Row {
    /// The bench: `ceilings`, `kernels`, `record`, `scaling`, `decode`, `matrix`, `torch`, `peer`; of a visit `visit`,
    /// `facts`, `part`, `tests`.
    pub bench: String,
    /// What was measured: `fused`, `copy`, `sdpa flash`.
    pub what: String,
    pub shape: String,
    pub batch: Option<usize>,
    pub heads: Option<usize>,
    pub kv_heads: Option<usize>,
    pub q_len: Option<usize>,
    pub kv_len: Option<usize>,
    pub head_dim: Option<usize>,
    pub value_dim: Option<usize>,
    pub mask: Option<String>,
    pub dtype: Option<String>,
    pub ms: Option<f64>,
    pub floor_ms: Option<f64>,
    /// What sets the floor: `arithmetic` or `memory`.
    pub bound: Option<String>,
    pub share: Option<f64>,
    pub host_us: Option<f64>,
    pub allocations: Option<f64>,
    pub bytes: Option<f64>,
    pub value: Option<f64>,
    pub unit: Option<String>,
    pub device: Option<String>,
    pub driver: Option<String>,
    pub backend: Option<String>,
    /// Of `facts`, as wgpu names it: `Cpu` is a software driver.
    pub device_type: Option<String>,
    /// Of `facts`.
    pub subgroups: Option<String>,
    /// Of `facts`: the products of cooperative matrices that the adapter lists.
    pub matrices: Option<Vec<String>>,
    /// Of `visit`.
    pub date: Option<String>,
    /// Of `visit`.
    pub commit: Option<String>,
    /// Of `visit`: the tree held changes that are in no commit.
    pub dirty: Option<bool>,
    /// Of `visit`: benches did as little as shows that they work.
    pub quick: Option<bool>,
    /// A name or a reason.
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
        Some((sizes, self.mask(), self.dtype.as_deref().unwrap_or("f32")))
    }

    pub fn mask(&self) -> &str {
        self.mask.as_deref().unwrap_or("none")
    }

    pub fn share(&self) -> Option<f64> {
        self.share.or_else(|| Some(self.floor_ms? / self.ms?))
    }

    /// The shape with what its text does not say of the mask and of a type other than f32.
    pub fn title(&self) -> String {
        let mut title = self.shape.clone();
        for word in [self.mask(), self.dtype.as_deref().unwrap_or("f32")] {
            if !["none", "f32"].contains(&word) && !title.contains(word) {
                title = format!("{title} {word}");
            }
        }
        title
    }
}

/// Three significant digits, all of the integer part.
pub fn digits(x: f64) -> String {
    let whole = if x.abs() > 0.0 && x.is_finite() { x.abs().log10().floor() as i32 } else { 0 };
    format!("{x:.*}", (2 - whole).clamp(0, 6) as usize)
}

pub fn memory(bytes: f64) -> String {
    if bytes == 0.0 {
        return "none".into();
    }
    let (scale, unit) = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")]
        .into_iter()
        .find(|(scale, _)| bytes >= *scale)
        .unwrap_or((1.0, "B"));
    format!("{} {unit}", digits(bytes / scale))
}
