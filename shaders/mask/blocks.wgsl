// The states of pairs in the map of the mask's blocks (classify.wgsl).
//
// Needs: p.mask; KNOWS_BLOCKS; Query; blocks_at, view_at.
// Gives: DIFFER, FULL, HIDDEN; block_at, blocks_state, column_state.

const HIDDEN: u32 = 0u;
const FULL: u32 = 2u;
// The state of several blocks that differ.
const DIFFER: u32 = 3u;

fn block_at(q: Query, j: u32) -> u32 {
    // A kernel that traverses the map column by column has stored the block.
    if KNOWS_BLOCKS {
        return q.block;
    } else {
        return blocks_at(view_at(p.mask.blocks, q.b, q.h, q.i / p.mask.block.x, j / p.mask.block.y));
    }
}

// Returns the state of a column of the map in rows.x ..= rows.y, or DIFFER.
fn column_state(b: u32, h: u32, rows: vec2<u32>, col: u32) -> u32 {
    var all = blocks_at(view_at(p.mask.blocks, b, h, rows.x, col));
    for (var row = rows.x + 1u; row <= rows.y; row++) {
        all = select(DIFFER, all, blocks_at(view_at(p.mask.blocks, b, h, row, col)) == all);
    }
    return all;
}

// Returns the state of all blocks that hold a pair of queries first ..= last and keys from ..= to,
// or DIFFER.
fn blocks_state(b: u32, h: u32, first: u32, last: u32, from_key: u32, to_key: u32) -> u32 {
    let rows = vec2<u32>(first, last) / p.mask.block.x;
    let cols = vec2<u32>(from_key, to_key) / p.mask.block.y;
    var all = column_state(b, h, rows, cols.x);
    for (var col = cols.x + 1u; col <= cols.y; col++) {
        all = select(DIFFER, all, column_state(b, h, rows, col) == all);
    }
    return all;
}
