// The first step of a radix sort pass: the count of each digit in each block of a row.
//
// keys, before [batch, heads, rows, length]   counts [batch, heads, rows, DIGITS, blocks], dense
//
// Bindings (declared by the host): keys; before if HAS_BEFORE; counts.
// Reads keys and the previous order once; one addition per key.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    let h = group.y / p.rows;
    let row = group.y % p.rows;
    count_digits(b, h, row, (group.x * WORKGROUP + lane) * KEYS, lane);
    workgroupBarrier();
    if lane < DIGITS {
        var sum = 0u;
        for (var n = 0u; n < WORKGROUP; n++) {
            sum += digit_counts[lane * WORKGROUP + n];
        }
        counts_store(((b * p.heads * p.rows + group.y) * DIGITS + lane) * p.blocks + group.x, sum);
    }
}
