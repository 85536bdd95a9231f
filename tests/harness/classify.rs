//! Block maps that a device makes.

use wgpu_attention::mask::Blocks;
use wgpu_attention::{Attention, Config, DType, Error, Shape, TensorView};

use super::case::Rules;
use super::device::Profile;
use super::run::{Layout, PlacedRules};

/// Returns the map of `rules` in blocks of `size`. `heads`: the map's batch and heads.
pub async fn classified(
    profile: &Profile,
    rules: &Rules,
    shape: &Shape,
    size: [usize; 2],
    heads: [usize; 2],
) -> Result<Vec<u32>, Error> {
    let gpu = &profile.gpu;
    let of_map = [heads[0], heads[1], shape.q_len.div_ceil(size[0]), shape.kv_len.div_ceil(size[1])];
    let count = of_map.iter().product();
    let buffer = gpu.upload(&vec![77u32; count])?;
    let blocks = Blocks::new(TensorView::new(&buffer, DType::U32, of_map), size);
    let placed = PlacedRules::new(profile, rules, DType::F32, Layout::Window(5));
    let config = Config::new(shape.heads, shape.head_dim).kv_heads(shape.kv_heads);
    let attention = Attention::with_pipelines(gpu.pipelines(), config)?;
    let lengths = [shape.batch, shape.q_len, shape.kv_len];
    gpu.submit(|e| attention.classify(e, &placed.mask(), lengths, &blocks))?;
    gpu.download_async(&buffer, count).await
}
