use wgpu_attention::mask::{Captured, DeviceMask, MaskMod, ScoreMod};
use wgpu_attention::{Error, Mask, TensorView};

/// A learned bias for each distance up to 31, and a mask of blocks. A query sees the `block` keys
/// of its block. `table` is `[1, heads, 1, 32]`.
pub fn mask(table: TensorView<'_>, block: u32) -> Result<DeviceMask<'_>, Error> {
    let bias = ScoreMod::capturing(
        "fn score_mod(score: f32, at: At) -> f32 {
            return score + table_at(0u, at.head, 0u, min(u32(abs(at.position - i32(at.key))), 31u));
        }",
        &[Captured::float("table")],
    )?;
    let near = MaskMod::new(
        "struct Uniforms { block: u32 }
        fn mask_mod(at: At) -> bool { return at.key / uniforms().block == at.query / uniforms().block; }",
    )?;
    Ok(Mask::none().score_mod(bias.with(&[table])).mask_mod(near.uniforms(&block.to_ne_bytes())))
}
