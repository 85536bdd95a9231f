//! Caches of keys and values: whatever was done to them, attention is that of a plain model's tokens.

mod full;
mod hostile;
mod masks;
mod random;
mod rotation;
mod steps;

use wgpu_attention::{CacheLayout, Group, Storage};

pub const STORAGES: [Storage; 6] = [
    Storage::F32,
    Storage::F16,
    Storage::Q8(Group::Of(32)),
    Storage::Q8(Group::Row),
    Storage::Q4(Group::Of(32)),
    Storage::Q4(Group::Row),
];

/// Layouts with a capacity: the ring's is soon too little.
pub const LAYOUTS: [(CacheLayout, usize); 3] = [
    (CacheLayout::Contiguous, 80),
    (CacheLayout::Ring { sinks: 3 }, 24),
    (CacheLayout::Paged { page: 16, pages: 12 }, 80),
];
