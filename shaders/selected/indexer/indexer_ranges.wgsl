// The keys that each query of an indexer may see. The mask's rules only bound ranges of keys.
//
// ranges [batch, queries, 2]: the first key and the end
//
// Constants: WORKGROUP
//
// Bindings (declared by the host): ranges, the mask's. An invocation processes a query.
// Bytes: 8 written for each query.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = group.x * WORKGROUP + lane;
    if i >= p.mask.q_len {
        return;
    }
    let q = query_of(group.y, 0u, i);
    let o = 2u * (group.y * p.mask.q_len + i);
    ranges_store(o, q.first);
    ranges_store(o + 1u, q.end);
}
