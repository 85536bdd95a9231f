//! How much of a kernel's inner loops multiplies and adds.

use crate::assembly::{Block, Kind};

/// A basic block is an inner loop if it has so many multiply-adds, or matrix instructions.
const MULTIPLY_ADDS: u64 = 32;
const MATRIX: u64 = 8;

/// Whether most of what a block is for are multiply-adds, or matrix instructions.
pub fn is_inner(block: &Block) -> bool {
    block.counts.of(Kind::MultiplyAdd) >= MULTIPLY_ADDS || block.counts.of(Kind::Matrix) >= MATRIX
}

/// Multiply-adds, or matrix instructions, of a hundred instructions of the basic blocks that have many; none: there is no
/// such block.
pub fn of(blocks: &[Block]) -> Option<f64> {
    let loops = blocks.iter().filter(|block| is_inner(block));
    let (these, all) = loops.fold((0, 0), |(these, all), block| {
        let counts = &block.counts;
        (these + counts.sum(&[Kind::MultiplyAdd, Kind::Matrix]), all + counts.all())
    });
    (all > 0).then(|| 100.0 * these as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assembly::blocks;
    use crate::gpus::Driver;

    #[test]
    fn only_blocks_with_many_count() {
        let of = |text: &str| of(&blocks(Driver::Radv, text));
        let few = "\tv_fma_f32 v0, v1, v2, v3\n".repeat(31);
        assert_eq!(of(&format!("BB0:\n{few}BB1:\n{few}")), None);
        let many = format!("{few}\tv_fma_f32 v0, v1, v2, v3\n{}", "\ts_nop 0\n".repeat(32));
        assert_eq!(of(&format!("BB0:\n{few}BB1:\n{many}")), Some(50.0));
    }
}
