//! Caches of keys and values. After any calls, attention equals that of a plain model's tokens.

mod beams;
mod compaction;
mod full;
mod growing;
pub mod hadamard;
mod hostile;
mod latent;
mod masks;
mod random;
mod rings;
mod rotation;
mod rows;
mod steps;
mod walks;

use wgpu_attention::cache::{CacheLayout, CacheStorage, ScaleGroup};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, TensorView, wgpu};

use crate::harness::{FORMS, Profile, planned_by_name};

pub const STORAGES: [CacheStorage; 13] = [
    CacheStorage::F32,
    CacheStorage::F16,
    CacheStorage::Q8(ScaleGroup::Of(32)),
    CacheStorage::Q8(ScaleGroup::Row),
    CacheStorage::Q4(ScaleGroup::Of(32)),
    CacheStorage::Q4(ScaleGroup::Row),
    CacheStorage::BF16,
    CacheStorage::Q8_0,
    CacheStorage::Q4_0,
    CacheStorage::E4M3(ScaleGroup::Of(32)),
    CacheStorage::E5M2(ScaleGroup::Row),
    CacheStorage::Gaussian4(ScaleGroup::Row),
    CacheStorage::Gaussian4(ScaleGroup::Of(32)),
];

/// The device with the kernels for GPUs, which move rows in another way than those for software
/// drivers.
pub fn as_gpu() -> &'static Profile {
    planned_by_name("a GPU").expect("a profile")
}

/// A tensor of one sequence, in f32.
pub fn view(buffer: &wgpu::Buffer, heads: usize, rows: usize, dim: usize) -> TensorView<'_> {
    TensorView::new(buffer, DType::F32, [1, heads, rows, dim])
}

/// Returns the usual target and splits of a storage in a layout, so that tests share kernels.
/// Shares run the other target.
pub fn usual(storage: usize, layout: usize) -> (Target, Option<usize>) {
    (FORMS[(storage + layout) % 2], [None, Some(3)][(storage / 2 + layout) % 2])
}

/// Channel counts that are neither 32 nor a multiple of it.
pub const DIMS: [usize; 2] = [40, 24];

/// Layouts with a capacity. The ring's capacity is soon exceeded.
pub const LAYOUTS: [(CacheLayout, usize); 3] = [
    (CacheLayout::Contiguous, 80),
    (CacheLayout::Ring { sink_tokens: 3 }, 24),
    (CacheLayout::Paged { page: 16, pages: 12 }, 80),
];
