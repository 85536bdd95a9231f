// A prefix that queries see even if the band hides it (prefix-LM).
//
// Needs: p.mask; prefix_at, view_at.
// Gives: prefix_end, prefix_key_range.

fn prefix_end(keys: vec2<i32>, b: u32, h: u32, i: u32) -> i32 {
    return min(keys.x + i32(min(prefix_at(view_at(p.mask.prefix, b, h, i, 0u)), p.mask.masked_len)), keys.y);
}

fn prefix_key_range(r: vec2<i32>, keys: vec2<i32>, b: u32, h: u32, i: u32, alone: bool) -> vec2<i32> {
    if p.mask.prefix.strides.z != 0u && !alone {
        return keys;
    } else {
        let end = prefix_end(keys, b, h, i);
        if end == keys.x {
            return r;
        } else {
            return vec2<i32>(keys.x, max(r.y, end));
        }
    }
}
