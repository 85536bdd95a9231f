// True if a sequence has a token at position j, and a ring has not overwritten it.
//
// Needs: p.cache; LAYOUT_KIND, RING; cached_len, cached_shift.
// Gives: is_kept.

fn is_kept(b: u32, j: u32) -> bool {
    let length = cached_len(b);
    return j < length && (LAYOUT_KIND != RING || j < p.cache.sinks || j - p.cache.sinks >= cached_shift(b));
}
