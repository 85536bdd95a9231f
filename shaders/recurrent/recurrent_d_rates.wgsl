// The gradients of β: keys times the gradients of suffix_keys.
//
// d_beta [batch, value_heads, length, 1]
// memory: keys and d_suffix_keys [features] of each row
//
// Bindings (declared by the host): chunks, memory, d_beta. Floors: features multiply-adds and 8 ·
// features bytes read a row. A workgroup computes a chunk.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let z = group.z;
    let chunk = chunk_of(z, group.y);
    if index >= chunk.rows {
        return;
    }
    var sum = 0.0;
    if index < chunk.count {
        let at = (row_at(z, group.y) + index) * p.features;
        for (var f = 0u; f < p.features; f++) {
            sum += memory_at(p.keys + at + f) * memory_at(p.d_suffix_keys + at + f);
        }
    }
    let to = view_at(p.d_beta, z / p.value_heads, z % p.value_heads, chunk.first + index, 0u);
    if p.accumulates != 0u {
        sum += d_beta_at(to);
    }
    d_beta_store(to, sum);
}
