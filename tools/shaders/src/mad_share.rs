//! How much of a kernel's inner loops multiplies and adds.

use crate::assembly::{Block, Counts, Kind, loops};

/// A basic block is an inner loop if it has so many multiply-adds, or matrix instructions.
const MULTIPLY_ADDS: u64 = 32;
const MATRIX: u64 = 8;

/// Whether most of what a block is for are multiply-adds, or matrix instructions.
pub fn is_inner(block: &Block) -> bool {
    block.counts.of(Kind::MultiplyAdd) >= MULTIPLY_ADDS || block.counts.of(Kind::Matrix) >= MATRIX
}

/// Multiply-adds, or matrix instructions, of a hundred instructions of the basic blocks that have
/// many; none: there is no such block.
pub fn of(blocks: &[Block]) -> Option<f64> {
    let loops = blocks.iter().filter(|block| is_inner(block));
    let (these, all) = loops.fold((0, 0), |(these, all), block| {
        let counts = &block.counts;
        (these + counts.sum(&[Kind::MultiplyAdd, Kind::Matrix]), all + counts.all())
    });
    (all > 0).then(|| 100.0 * these as f64 / all as f64)
}

/// The basic blocks with a fourth or more of the multiply-adds, or matrix instructions, of the
/// block that has most of them; and all of the innermost loops around them, or the blocks
/// themselves where they are in none.
pub fn inner_loops(blocks: &[Block]) -> Option<(Counts, Counts)> {
    let loops = loops(blocks);
    let matrix = |block: &Block| block.counts.of(Kind::Matrix);
    let most = blocks.iter().map(|block| (matrix(block), block.counts.products)).max()?;
    let heavy = |block: &Block| match most {
        (0, products) => products > 0 && 4 * block.counts.products >= products,
        (most, _) => 4 * matrix(block) >= most,
    };
    let (mut these, mut inside) = (Counts::default(), vec![false; blocks.len()]);
    for n in (0..blocks.len()).filter(|n| heavy(&blocks[*n])) {
        let around = loops.iter().filter(|l| l.body.contains(&n)).min_by_key(|l| l.body.len());
        inside[n] = true;
        around.into_iter().flat_map(|l| &l.body).for_each(|n| inside[*n] = true);
        these = these.plus(&blocks[n].counts);
    }
    let inside = blocks.iter().zip(inside).filter(|(_, inside)| *inside);
    let sum = inside.fold(Counts::default(), |sum, (block, _)| sum.plus(&block.counts));
    (sum.products + sum.of(Kind::Matrix) > 0).then_some((these, sum))
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

    #[test]
    fn loops_are_counted_whole() {
        let inner_loops = |text: &str| inner_loops(&blocks(Driver::Radv, text));
        let (add, other) = ("\tv_fma_f32 v0, v1, v2, v3\n", "\ts_nop 0\n");
        let products = add.repeat(8);
        // Around the loop BB2 … BB3 is another; in BB1 are few.
        let text = format!(
            "BB0:\n{other}BB1:\n{add}BB2:\n{products}BB3:\n{other}\ts_cbranch_scc0 BB2 ; 0\n{other}\ts_branch BB1 ; 0\n"
        );
        let (blocks, loops) = inner_loops(&text).expect("a loop");
        assert_eq!((blocks.products, blocks.all()), (8, 8));
        assert_eq!((loops.products, loops.all()), (8, 10));
        // Without a loop the block.
        let text = format!("BB0:\n{other}BB1:\n{products}{other}");
        let (_, loops) = inner_loops(&text).expect("a block");
        assert_eq!((loops.products, loops.all()), (8, 9));
        assert_eq!(inner_loops(other), None);
    }
}
