// The positions of tokens in a cache that can remove tokens. Each row of keys has the position of
// its token after its scales. A head's positions rise from row to row.
//
// Needs: p.cache; cached_len, cached_shift, key_extra, row_of_token, rows_of.
// Gives: cached_position, token_at.

// The position of the t-th stored token.
fn cached_position(b: u32, kv_head: u32, t: u32) -> u32 {
    let row = row_of_token(rows_of(b, kv_head), t);
    return key_extra(p.cache.k_scales + row * p.cache.k_groups + p.cache.k_groups - 1u);
}

// The number of stored tokens before position j. No token has moved back by more than the number of
// removed tokens, which bounds the search.
fn token_at(b: u32, kv_head: u32, j: u32) -> u32 {
    let removed = cached_shift(b);
    var first = max(j, removed) - removed;
    var end = min(j, cached_len(b) - removed);
    while first < end {
        let middle = (first + end) / 2u;
        if cached_position(b, kv_head, middle) < j {
            first = middle + 1u;
        } else {
            end = middle;
        }
    }
    return first;
}
