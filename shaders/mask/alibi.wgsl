// ALiBi: a slope times the distance of a key from its query.
//
// Needs: p.mask; Query; key_distance.
// Gives: alibi_distance.

// The distance is negative before the query's position. If symmetric, it is negative on both sides.
fn alibi_distance(q: Query, j: u32) -> f32 {
    return f32(select(key_distance(q, j), -abs(key_distance(q, j)), p.mask.symmetric != 0u));
}
