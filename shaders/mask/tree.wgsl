// A tree of drafts: a query sees, of the queries' own keys, those that it follows from.
//
// Needs: p.mask; Query; key_distance, tree_at, view_at.
// Gives: tree_mask_mod.

// Whether query q's draft follows from key j; keys before the queries' own are not asked.
fn tree_mask_mod(q: Query, j: u32) -> bool {
    let own = key_distance(q, j) + i32(q.i);
    return own < 0 || own >= i32(p.mask.q_len) || tree_at(view_at(p.mask.tree, q.b, q.h, q.i, u32(own)));
}
