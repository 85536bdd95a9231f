//! Attentions that have names, as mods: what FlexAttention's examples and papers call them, ready
//! for
//! [`Mask::mask_mod`](crate::Mask::mask_mod) and [`Mask::score_mod`](crate::Mask::score_mod).
//! [docs/guide/masks.md](https://docs.rs/crate/wgpu-attention/latest/source/docs/guide/masks.md) has a picture of each.
//!
//! A preset is a value with both sides: a text for the device, and a closure that says the same for
//! the reference. Its text is a constant; numbers lie in the text's `Uniforms`, tables in captured
//! tensors, so that other ones compile nothing.
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
//! In what follows `j` is the key and `p` the key at which the query stands,
//! [`At::position`](crate::mask::At::position), as the mask's alignment, query offsets, packed
//! sequences or the cache say: FlexAttention's `q_idx` with
//! [`Alignment::TopLeft`](crate::Alignment::TopLeft), and in self-attention whatever the alignment
//! is. Places in a grid, a prompt or a prefix count from the first key of the query's sequence.
//! Tables that have a row for each query are read at the query's own row,
//! [`At::query`](crate::mask::At::query), called `i`; those that have an entry for each token, at
//! `p` and `j`. Where a query stands at no token of these, it sees none.
//!
//! Tables repeat along axes of 1. One that is shorter than the call's tensors counts as if its last
//! entry went on.
//!
//! Presets combine by `or`, `and` and `then`, rules of [`Mask`](crate::Mask) by `and` alone. Some
//! presets therefore say what a rule says. Where the rule is enough, it is faster: it says which
//! keys need not be looked at. Without one, a block
//! map ([`Attention::classify`](crate::Attention::classify)) says so. Tables' gradients are
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
