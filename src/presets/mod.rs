//! Presets: named attentions from FlexAttention's examples and from papers, as mods.
//!
//! Use them with [`Mask::mask_mod`](crate::Mask::mask_mod) and
//! [`Mask::score_mod`](crate::Mask::score_mod).
//! [docs/guide/masks.md](https://docs.rs/crate/wgpu-attention/latest/source/docs/guide/masks.md)
//! has a picture of each.
//!
//! A preset has a text for the device and an equivalent closure for the reference. The text is a
//! constant. Numbers lie in its `Uniforms` and tables in captured tensors, so that new values
//! compile nothing.
//!
//! ```no_run
//! use wgpu_attention::{Gpu, HostTensor, Shape, presets};
//! use wgpu_attention::mask::{DeviceMask, HostMask};
//!
//! let gpu = Gpu::new()?;
//! // Without tables.
//! let window = presets::natten([16, 16], [5, 5], [1, 1])?;
//! let device = DeviceMask::none().mask_mod(&window);
//! let host = HostMask::none().mask_fn(window.mask_fn());
//! gpu.compare_masks(&device, &host, Shape::new(1, 8, 256, 64), 0.0)?;
//!
//! // With tables.
//! let ids: Vec<u32> = (0..256).map(|token| token / 100).collect();
//! let documents = presets::documents(HostTensor::new(&ids, [1, 1, 1, 256]))?;
//! let tables = gpu.upload_tables(documents.tables())?;
//! let device = DeviceMask::none().mask_mod(documents.bound(&tables));
//! # let _ = device;
//! # Ok::<(), wgpu_attention::Error>(())
//! ```
//!
//! Below, `j` is the key and `p` is the key at which the query is,
//! [`At::position`](crate::mask::At::position). The mask's alignment, query offsets, packed
//! sequences or the cache define `p`. It equals FlexAttention's `q_idx` with
//! [`Alignment::TopLeft`](crate::Alignment::TopLeft), and in self-attention with any alignment.
//! Positions in a grid, a prompt or a prefix count from the first key of the query's sequence.
//!
//! Tables with a row for each query are indexed by the query's row `i`,
//! [`At::query`](crate::mask::At::query). Tables with an entry for each token are indexed by `p`
//! and `j`. A query whose `p` is no token of the table sees none.
//!
//! A table's axis of 1 broadcasts. A table shorter than the call's tensors repeats its last entry.
//!
//! Presets combine with `or`, `and` and `then`. Rules of [`Mask`](crate::Mask) combine only with
//! `and`. So some presets have the same meaning as a rule. If the rule is enough, use it: it is
//! faster, because kernels know the keys to skip. For a preset they know them only from a block map
//! ([`Attention::classify`](crate::Attention::classify)). For the gradients of tables see
//! [`Backward::d_captured`](crate::Backward::d_captured).

mod grids;
mod masks;
mod preset;
mod scores;

pub use grids::{morton_natten, natten, shifted_windows, sliding_tiles, tiled_natten};
pub use masks::{
    block_diffusion, causal, dilated, documents, draft_blocks, flamingo, global_sliding, local,
    picture_intervals, prefix_lm, selected_tiles, shared_prefix, sliding, svg_spatial, svg_temporal, tree,
};
pub use preset::{MaskPreset, ScorePreset, Table, TableData};
pub use scores::{
    alibi, alibi_slopes, gelu, graphormer, graphormer_edges, relative, relative_2d, relu, sandwich,
    shortest_paths, sigmoid, softcap, squared_relu, t5,
};
