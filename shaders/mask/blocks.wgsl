// What the map of the mask's blocks (classify.wgsl) says of pairs.
//
// Needs: p.mask; Query; blocks_at, view_at.
// Gives: FULL, HIDDEN; block_at, blocks_state.

const HIDDEN: u32 = 0u;
const FULL: u32 = 2u;

fn block_at(q: Query, j: u32) -> u32 {
    return blocks_at(view_at(p.mask.blocks, q.b, q.h, q.i / p.mask.block.x, j / p.mask.block.y));
}

// What all blocks have in common that hold a pair of queries first ..= last and keys from ..= to: HIDDEN, FULL,
// or 1 if they differ or must be asked.
fn blocks_state(b: u32, h: u32, first: u32, last: u32, from_key: u32, to_key: u32) -> u32 {
    let rows = vec2<u32>(first, last) / p.mask.block.x;
    let cols = vec2<u32>(from_key, to_key) / p.mask.block.y;
    var all_hidden = true;
    var all_full = true;
    for (var row = rows.x; row <= rows.y; row++) {
        for (var col = cols.x; col <= cols.y; col++) {
            let state = blocks_at(view_at(p.mask.blocks, b, h, row, col));
            all_hidden = all_hidden && state == HIDDEN;
            all_full = all_full && state == FULL;
        }
    }
    return select(select(1u, FULL, all_full), HIDDEN, all_hidden);
}
