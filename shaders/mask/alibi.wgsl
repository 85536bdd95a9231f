// ALiBi: a slope is multiplied by how far a key is from its query.
//
// Needs: p.mask; Query; distance.
// Gives: alibi_distance.

// Negative before the query's own position; symmetric, on both sides.
fn alibi_distance(q: Query, j: u32) -> f32 {
    return f32(select(distance(q, j), -abs(distance(q, j)), p.mask.symmetric != 0u));
}
