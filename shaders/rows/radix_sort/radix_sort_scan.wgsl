// The second step of a pass of the radix sort: of each count of a row the sum of those before it,
// digit by digit and block by block, which is where the first key of that digit and block goes. A
// workgroup has a row.
//
// counts [rows of all, length], dense; replaced
//
// Bindings (declared by the host): counts.
// Reads twice and writes once; adds twice for each.

// What each invocation's part of the row adds up to.
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
