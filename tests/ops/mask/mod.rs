//! Masks, block maps and custom functions.

pub mod block_maps;
pub mod flex;
pub mod mask_pages;
pub mod masks;
pub mod masks_sparse;
pub mod mods;
pub mod patterns;
pub mod presets;
