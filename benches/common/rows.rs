//! Figures for programs to read: JSON lines, appended to the file that `WGPU_ATTENTION_ROWS` names; none if it is not set.

use std::fs::OpenOptions;
use std::io::Write;

use serde_json::{Map, Value};
use wgpu_attention::{DType, Gpu, Shape, wgpu};

use super::share::Share;

/// What a row may say.
const FIELDS: &[&str] = &[
    "bench",
    "what",
    "shape",
    "batch",
    "heads",
    "kv_heads",
    "q_len",
    "kv_len",
    "head_dim",
    "value_dim",
    "mask",
    "dtype",
    // Median time on the device, and the larger of its floors: that of arithmetic or that of memory.
    "ms",
    "floor_ms",
    "bound",
    "share",
    // Time and allocations of a recording on the host.
    "host_us",
    "allocations",
    // Memory.
    "bytes",
    // A ceiling or an exponent.
    "value",
    "unit",
    "device",
    "driver",
    "backend",
    // Of an adapter.
    "device_type",
    "subgroups",
    "matrices",
];

/// One figure, and what it is the figure of.
#[must_use]
pub struct Row(Map<String, Value>);

impl Row {
    pub fn new(gpu: &Gpu, bench: &str, what: &str) -> Self {
        Row::of(&gpu.device().adapter_info(), bench).with("what", what)
    }

    /// Of an adapter, which need not give a device.
    pub fn of(info: &wgpu::AdapterInfo, bench: &str) -> Self {
        let driver = format!("{} {}", info.driver, info.driver_info);
        Row(Map::new())
            .with("bench", bench)
            .with("device", info.name.as_str())
            .with("driver", driver.trim())
            .with("backend", info.backend.to_str())
    }

    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        let value = value.into();
        assert!(FIELDS.contains(&field), "no row has a field {field}");
        assert!(!value.is_null(), "{field} is no number");
        self.0.insert(field.into(), value);
        self
    }

    /// Of an attention call.
    pub fn attention(self, shape: &Shape, mask: &str, dtype: DType) -> Self {
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = *shape;
        let sizes = [
            ("batch", batch),
            ("heads", heads),
            ("kv_heads", kv_heads),
            ("q_len", q_len),
            ("kv_len", kv_len),
            ("head_dim", head_dim),
            ("value_dim", value_dim),
        ];
        sizes
            .into_iter()
            .fold(self, |row, (field, n)| row.with(field, n))
            .with("shape", shape_name(shape, "×"))
            .with("mask", mask)
            .dtype(dtype)
    }

    pub fn dtype(self, dtype: DType) -> Self {
        self.with("dtype", dtype_name(dtype))
    }

    /// A time on the device beside its floors.
    pub fn share(self, share: &Share) -> Self {
        self.with("ms", share.ms)
            .with("floor_ms", share.floor())
            .with("bound", share.bound())
            .with("share", share.floor() / share.ms)
    }

    pub fn append(self) {
        let Some(path) = std::env::var_os("WGPU_ATTENTION_ROWS") else { return };
        let line = format!("{}\n", Value::from(self.0));
        let written = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(line.as_bytes()));
        written.unwrap_or_else(|error| panic!("WGPU_ATTENTION_ROWS, {}: {error}", path.display()));
    }
}

/// `batch × heads × length × head_dim`; with the heads of keys and values, the number of keys and the width of values where
/// those differ: `1×32(8)×1×4096×128` is one query against 4096 keys.
pub fn shape_name(shape: &Shape, times: &str) -> String {
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = *shape;
    let heads = if heads == kv_heads { heads.to_string() } else { format!("{heads}({kv_heads})") };
    let length = if q_len == kv_len { q_len.to_string() } else { format!("{q_len}{times}{kv_len}") };
    let dim = if head_dim == value_dim { head_dim.to_string() } else { format!("{head_dim}/{value_dim}") };
    [batch.to_string(), heads, length, dim].join(times)
}

pub fn dtype_name(dtype: DType) -> &'static str {
    if dtype == DType::F16 { "f16" } else { "f32" }
}
