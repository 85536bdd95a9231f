// The tiles that a block map lets the fused kernel skip.
//
// Needs: p.group, p.mask; DIFFER; Query; blocks_at, blocks_state, column_state, view_at.
// Gives: block_of_row, map_row, tile_column_state, tile_state.

// The state of the blocks of packed rows first ..= last and keys from_key ..= to_key. It is DIFFER
// if the blocks do not share one state.
fn tile_state(b: u32, kv_head: u32, first: u32, last: u32, from_key: u32, to_key: u32) -> u32 {
    // Appended keys are not in the map.
    if to_key >= p.mask.masked_len {
        return DIFFER;
    } else {
        let heads = select(1u, p.group, p.mask.blocks.strides.y != 0u);
        var state = blocks_state(b, kv_head * p.group, first / p.group, last / p.group, from_key, to_key);
        for (var g = 1u; g < heads && state != DIFFER; g++) {
            let other = blocks_state(b, kv_head * p.group + g, first / p.group, last / p.group, from_key, to_key);
            state = select(DIFFER, state, other == state);
        }
        return state;
    }
}

// The map row of query i.
fn map_row(i: u32) -> u32 {
    return i / p.mask.block.x;
}

// The state of the block of a query in a column of the map.
fn block_of_row(q: Query, row: u32, col: u32) -> u32 {
    return blocks_at(view_at(p.mask.blocks, q.b, q.h, row, col));
}

// The tile_state of keys in one column of the map, where to_key is the last key.
fn tile_column_state(b: u32, kv_head: u32, rows: vec2<u32>, col: u32, to_key: u32) -> u32 {
    if to_key >= p.mask.masked_len {
        return DIFFER;
    } else {
        let heads = select(1u, p.group, p.mask.blocks.strides.y != 0u);
        var state = column_state(b, kv_head * p.group, rows, col);
        for (var g = 1u; g < heads; g++) {
            state = select(DIFFER, state, column_state(b, kv_head * p.group + g, rows, col) == state);
        }
        return state;
    }
}
