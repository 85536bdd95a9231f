// A tree of drafts: of the draft keys, a query sees only those of its branch.
//
// Needs: p.mask; Query; key_distance, tree_at, view_at.
// Gives: tree_mask_mod.

// True if query q's draft follows from key j, or if key j is not a draft.
fn tree_mask_mod(q: Query, j: u32) -> bool {
    let own = key_distance(q, j) + i32(q.i);
    return own < 0 || own >= i32(p.mask.q_len) || tree_at(view_at(p.mask.tree, q.b, q.h, q.i, u32(own)));
}
