fn mask_left_permits(s: Site) -> bool {
    return distance(s) >= -p.mask.left;
}

fn mask_left_range(r: vec2<i32>, b: u32, h: u32, first: u32, last: u32) -> vec2<i32> {
    return vec2<i32>(max(r.x, i32(first) + p.mask.diagonal - p.mask.left), r.y);
}
