fn mask_right_permits(s: Site) -> bool {
    return distance(s) <= p.mask.right;
}

fn mask_right_range(r: vec2<i32>, b: u32, h: u32, first: u32, last: u32) -> vec2<i32> {
    return vec2<i32>(r.x, min(r.y, i32(last) + p.mask.diagonal + p.mask.right + 1));
}
