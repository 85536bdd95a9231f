// The token of a head at a position, which a ring may have overwritten or a compaction removed.
//
// Needs: p.cache; COMPACTS, LAYOUT_KIND, RING; Rows; cached_len, cached_position, cached_shift,
// row_of_position, row_of_token, token_at.
// Gives: is_kept, row_at.

// True if a head has a token at position j.
fn is_kept(b: u32, kv_head: u32, j: u32) -> bool {
    let length = cached_len(b);
    if COMPACTS {
        let t = token_at(b, kv_head, j);
        return j < length && t < length - cached_shift(b) && cached_position(b, kv_head, t) == j;
    } else {
        return j < length && (LAYOUT_KIND != RING || j < p.cache.sinks || j - p.cache.sinks >= cached_shift(b));
    }
}

// The row of a token that a head has at position j.
fn row_at(b: u32, kv_head: u32, r: Rows, j: u32) -> u32 {
    if COMPACTS {
        return row_of_token(r, token_at(b, kv_head, j));
    } else {
        return row_of_position(r, j);
    }
}
