// A bias per distance, from a table.
//
// Needs: p.mask; Query; key_distance, relative_at, view_at.
// Gives: relative_bias.

fn relative_bias(q: Query, j: u32) -> f32 {
    let place = clamp(key_distance(q, j), -p.mask.reach, p.mask.reach) + p.mask.reach;
    return relative_at(view_at(p.mask.relative, q.b, q.h, 0u, u32(place)));
}
