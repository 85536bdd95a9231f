// ALiBi: a slope is multiplied by how far a key is from its query.
//
// Needs: p.mask; Query; key_distance.
// Gives: alibi_distance.

// Negative before the query's own position; symmetric, on both sides.
fn alibi_distance(q: Query, j: u32) -> f32 {
    return f32(select(key_distance(q, j), -abs(key_distance(q, j)), p.mask.symmetric != 0u));
}
