// Copies the rows of one page of a cache to another page. A sequence that writes into a shared page
// gets a copy of it first.
//
// Bindings (declared by the host): rows, the keys or the values.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    // A workgroup copies one row.
    let row = group.y * p.page_len + group.x;
    for (var n = lane; n < p.words; n += 64u) {
        rows_store((p.dst + row) * p.words + n, rows_at((p.src + row) * p.words + n));
    }
    for (var n = lane; n < p.groups; n += 64u) {
        rows_store(p.scales + (p.dst + row) * p.groups + n, rows_at(p.scales + (p.src + row) * p.groups + n));
    }
}
