// The second step of a pass of the radix sort: an exclusive scan of the counts of a row. The order
// of the scan is digit by digit, then block by block. Each result is the place of the first key of
// that digit and block. A workgroup processes a row.
//
// counts [rows of all batch entries, length], dense; overwritten by the result
//
// Bindings (declared by the host): counts.
// Reads twice and writes once; two additions per count.

// The sum of each invocation's part of the row.
var<workgroup> sums: array<u32, WORKGROUP>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = (group.y * p.heads + group.x) * p.length;
    let part = (p.length + WORKGROUP - 1u) / WORKGROUP;
    let first = min(lane * part, p.length);
    let end = min(first + part, p.length);
    var sum = 0u;
    for (var n = first; n < end; n++) {
        sum += counts_at(row + n);
    }
    sums[lane] = sum;
    workgroupBarrier();
    var before = 0u;
    for (var n = 0u; n < lane; n++) {
        before += sums[n];
    }
    for (var n = first; n < end; n++) {
        let own = counts_at(row + n);
        counts_store(row + n, before);
        before += own;
    }
}
