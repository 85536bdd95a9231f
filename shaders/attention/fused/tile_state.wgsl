// Which tiles of the fused kernel the block map lets it skip.
//
// Needs: p.group, p.mask; DIFFER; Query; blocks_at, blocks_state, column_state, view_at.
// Gives: block_of_row, map_row, tile_column_state, tile_state.

// What the block map says of packed rows first ..= last and keys from_key ..= to_key: the state of
// all, or DIFFER.
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

// The row of the map that query i is in.
fn map_row(i: u32) -> u32 {
    return i / p.mask.block.x;
}

// The state of a query's block in a column of the map.
fn block_of_row(q: Query, row: u32, col: u32) -> u32 {
    return blocks_at(view_at(p.mask.blocks, q.b, q.h, row, col));
}

// What tile_state says of keys of one column of the map, the last of which is to_key.
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
