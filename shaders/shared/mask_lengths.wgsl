fn length_at(b: u32, h: u32, i: u32) -> u32 {
    return lengths_at(view_at(p.mask.lengths, b, h, i, 0u));
}

fn mask_lengths_permits(s: Site) -> bool {
    return s.j < length_at(s.b, s.h, s.i);
}

// Only a length that these queries share bounds them all.
fn mask_lengths_range(r: vec2<i32>, b: u32, h: u32, first: u32, last: u32) -> vec2<i32> {
    if p.mask.lengths.strides.z != 0u && first != last {
        return r;
    }
    return vec2<i32>(r.x, min(r.y, i32(min(length_at(b, h, first), p.mask.masked_len))));
}
