//! The share of multiply-adds in a kernel's inner loops.

use crate::assembly::{Block, Counts, Kind, loops};

/// A basic block with at least this many multiply-adds, or matrix instructions, is an inner loop.
const MULTIPLY_ADDS: u64 = 32;
const MATRIX: u64 = 8;

/// True if a block has enough multiply-adds or matrix instructions for an inner loop.
pub fn is_inner(block: &Block) -> bool {
    block.counts.of(Kind::MultiplyAdd) >= MULTIPLY_ADDS || block.counts.of(Kind::Matrix) >= MATRIX
}

/// Returns the multiply-adds, or matrix instructions, per hundred instructions of the inner-loop
/// blocks. Returns `None` if there is no such block.
pub fn of(blocks: &[Block]) -> Option<f64> {
    let loops = blocks.iter().filter(|block| is_inner(block));
    let (these, all) = loops.fold((0, 0), |(these, all), block| {
        let counts = &block.counts;
        (these + counts.sum(&[Kind::MultiplyAdd, Kind::Matrix]), all + counts.all())
    });
    (all > 0).then(|| 100.0 * these as f64 / all as f64)
}

/// Returns two counts. First, the basic blocks with at least a fourth of the multiply-adds, or
/// matrix instructions, of the largest block. Second, the innermost loops around them, or the
/// blocks themselves if they are in no loop.
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
        // Another loop is around the loop BB2 … BB3. BB1 has few multiply-adds.
        let text = format!(
            "BB0:\n{other}BB1:\n{add}BB2:\n{products}BB3:\n{other}\ts_cbranch_scc0 BB2 ; 0\n{other}\ts_branch BB1 ; 0\n"
        );
        let (blocks, loops) = inner_loops(&text).expect("a loop");
        assert_eq!((blocks.products, blocks.all()), (8, 8));
        assert_eq!((loops.products, loops.all()), (8, 10));
        // Without a loop, the block counts.
        let text = format!("BB0:\n{other}BB1:\n{products}{other}");
        let (_, loops) = inner_loops(&text).expect("a block");
        assert_eq!((loops.products, loops.all()), (8, 9));
        assert_eq!(inner_loops(other), None);
    }
}
