//! Rows of figures for programs to read. They are appended to the file that `WGPU_ATTENTION_ROWS`
//! names; without it nothing is written.

use std::path::Path;

use rows::Row;
use wgpu_attention::{DType, Gpu, Shape, wgpu};

use super::settings;
use super::share::Share;

/// Returns a row for `gpu`.
#[must_use]
pub fn row(gpu: &Gpu, bench: &str, what: &str) -> Row {
    let unchecked = settings::unchecked().then_some(true);
    Row { what: what.into(), unchecked, ..of_adapter(&gpu.device().adapter_info(), bench) }
}

/// Returns a row for an adapter, which need not provide a device.
#[must_use]
pub fn of_adapter(info: &wgpu::AdapterInfo, bench: &str) -> Row {
    Row {
        bench: bench.into(),
        device: Some(info.name.clone()),
        driver: Some(format!("{} {}", info.driver, info.driver_info).trim().into()),
        backend: Some(info.backend.to_str().into()),
        ..Row::default()
    }
}

/// Adds an attention call to a row.
#[must_use]
pub fn of_attention(row: Row, shape: Shape, mask: &str, dtype: DType) -> Row {
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
    Row {
        shape: shape_name(shape, "×"),
        batch: Some(batch),
        heads: Some(heads),
        kv_heads: Some(kv_heads),
        q_len: Some(q_len),
        kv_len: Some(kv_len),
        head_dim: Some(head_dim),
        value_dim: Some(value_dim),
        mask: Some(mask.into()),
        dtype: Some(dtype_name(dtype).into()),
        ..row
    }
}

/// Adds a device time and its floors to a row.
#[must_use]
pub fn of_share(row: Row, share: &Share) -> Row {
    Row {
        ms: Some(share.ms),
        floor_ms: Some(share.floor()),
        bound: Some(share.bound().into()),
        share: Some(share.floor() / share.ms),
        ..row
    }
}

pub fn append(row: &Row) {
    let Some(file) = std::env::var_os("WGPU_ATTENTION_ROWS") else { return };
    let file = Path::new(&file);
    row.append(file).unwrap_or_else(|error| panic!("WGPU_ATTENTION_ROWS, {}: {error}", file.display()));
}

/// Returns `batch × heads × length × head_dim`. Heads of keys and values, the number of keys and
/// the width of values are added where they differ. `1×32(8)×1×4096×128` is one query against 4096
/// keys.
pub fn shape_name(shape: Shape, times: &str) -> String {
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
    let heads = if heads == kv_heads { heads.to_string() } else { format!("{heads}({kv_heads})") };
    let length = if q_len == kv_len { q_len.to_string() } else { format!("{q_len}{times}{kv_len}") };
    let dim = if head_dim == value_dim { head_dim.to_string() } else { format!("{head_dim}/{value_dim}") };
    [batch.to_string(), heads, length, dim].join(times)
}

pub fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        _ => "f32",
    }
}
