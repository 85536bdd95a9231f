// The keys of each query in a list. Each batch entry of the call is one query. The element j of a
// list stands for the key j of kernels without lists.
//
// The lists are in the tensor of the lengths rule (KeyLists, kernels/key_lists.rs). The words of a
// batch entry are the lengths of its query heads, then the lists of its key/value heads.
//
// Needs: p.key_batches, p.key_lists; lengths_at.
// Gives: key_batch, key_head, list_of, listed.

// The batch entry of the keys.
fn key_batch(b: u32) -> u32 {
    return p.key_batches.x + b / p.key_batches.y;
}

// The head of the keys.
fn key_head(kv_head: u32) -> u32 {
    return kv_head / p.key_lists.w;
}

// The first element of a list.
fn list_of(b: u32, kv_head: u32) -> u32 {
    return b * p.key_lists.x + p.key_lists.y + kv_head * p.key_lists.z;
}

// The key of an element.
fn listed(list: u32, n: u32) -> u32 {
    return lengths_at(list + n);
}
