// Lengths: a query sees the first keys of its sequence, up to a length.
//
// Needs: p.mask; lengths_at, view_at.
// Gives: lengths_key_range.

// keys: the keys of the query's sequence. Unless alone, only a length that all queries share bounds
// them.
fn lengths_key_range(r: vec2<i32>, keys: vec2<i32>, b: u32, h: u32, i: u32, alone: bool) -> vec2<i32> {
    if p.mask.lengths.strides.z != 0u && !alone {
        return r;
    } else {
        let n = i32(min(lengths_at(view_at(p.mask.lengths, b, h, i, 0u)), p.mask.masked_len));
        return vec2<i32>(r.x, min(r.y, keys.x + n));
    }
}
