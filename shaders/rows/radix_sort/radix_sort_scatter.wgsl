// The last step of a pass of the radix sort. It stores each key's index at its place, after the
// earlier keys with the same digit. The tensor `counts` holds the place of a block's first key of
// each digit (radix_sort_scan.wgsl). Within the block, invocations have consecutive places.
//
// keys, before, order, ranks [batch, heads, rows, length]
//
// counts [batch, heads, rows, DIGITS, blocks], dense
//
// order: the index of the key at each place; ranks: the place of each key
//
// Bindings (declared by the host): keys; before if HAS_BEFORE; counts, order; ranks if HAS_RANKS.
// Reads keys twice, the previous order twice and counts once; writes order and ranks once.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    let h = group.y / p.rows;
    let row = group.y % p.rows;
    let first = (group.x * WORKGROUP + lane) * KEYS;
    count_digits(b, h, row, first, lane);
    workgroupBarrier();
    if lane < DIGITS {
        var place = counts_at(((b * p.heads * p.rows + group.y) * DIGITS + lane) * p.blocks + group.x);
        for (var n = 0u; n < WORKGROUP; n++) {
            let own = digit_counts[lane * WORKGROUP + n];
            digit_counts[lane * WORKGROUP + n] = place;
            place += own;
        }
    }
    workgroupBarrier();
    for (var s = first; s < min(first + KEYS, p.length); s++) {
        let position = position_before(b, h, row, s);
        let digit = digit_of(b, h, row, position);
        let place = digit_counts[digit * WORKGROUP + lane];
        digit_counts[digit * WORKGROUP + lane] = place + 1u;
        order_store(view_at(p.order, b, h, row, place), position);
        ranks_store(view_at(p.ranks, b, h, row, position), place);
    }
}
