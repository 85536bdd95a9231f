// Which tiles of the fused kernel the block map lets it skip.
//
// Needs: p.group, p.mask; blocks_state.
// Gives: tile_state.

// What the block map says of packed rows first ..= last and keys from_key ..= to_key: HIDDEN, FULL, or 1 to ask.
fn tile_state(b: u32, kv_head: u32, first: u32, last: u32, from_key: u32, to_key: u32) -> u32 {
    // Appended keys are not in the map.
    if to_key >= p.mask.masked_len {
        return 1u;
    }
    let heads = select(1u, p.group, p.mask.blocks.strides.y != 0u);
    let state = blocks_state(b, kv_head * p.group, first / p.group, last / p.group, from_key, to_key);
    for (var g = 1u; g < heads; g++) {
        if blocks_state(b, kv_head * p.group + g, first / p.group, last / p.group, from_key, to_key) != state {
            return 1u;
        }
    }
    return state;
}
