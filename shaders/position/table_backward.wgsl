// The gradient of a learned table of positions. Each row of the table sums the d_out of all rows at
// its position. The order is batch entry by batch entry, row by row, head by head.
//
// d_out [batch, heads, length, dim]   d_table [1, 1, rows, dim]
//
// A workgroup computes LANES channels of a row of the table. If positions follow one another, it
// computes which rows have the position of the table's row. If a tensor holds every position, it
// searches that tensor, WORDS · 32 positions at a time.
//
// Bindings (declared by the host): d_out, d_table; positions if HAS_POSITIONS. ACCUMULATES: the
// kernel adds to d_table. It reads d_out once, and positions once for every row of the table and
// LANES channels.

// A bit for each position of a search: 1 if it is the row's.
var<workgroup> found: array<atomic<u32>, WORDS>;

fn heads_sum(b: u32, i: u32, d: u32) -> f32 {
    var sum = 0.0;
    for (var h = 0u; h < p.heads; h++) {
        sum += d_out_at(view_at(p.d_out, b, h, i, d));
    }
    return sum;
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    for (var n = group.x; n < p.work; n = next_item(n, p.work, p.step)) {
        let row = n / p.blocks;
        let d = n % p.blocks * LANES + lane;
        let within = min(d, p.dim - 1u);
        var sum = 0.0;
        for (var b = 0u; b < p.batch; b++) {
            if !HAS_POSITIONS || p.at.by_row == 1u {
                let first = position_of(p.at, b, 0u, 0u);
                if row >= first {
                    let start = row - first;
                    // Positions past the last row of the table count as the last row.
                    let end = select(min(start + 1u, p.length), p.length, row == p.at.last);
                    for (var i = start; i < end; i++) {
                        sum += heads_sum(b, i, within);
                    }
                }
            } else {
                for (var i0 = 0u; i0 < p.length; i0 += WORDS * 32u) {
                    if lane < WORDS {
                        atomicStore(&found[lane], 0u);
                    }
                    workgroupBarrier();
                    for (var j = lane; j < min(WORDS * 32u, p.length - i0); j += LANES) {
                        if position_of(p.at, b, 0u, i0 + j) == row {
                            atomicOr(&found[j / 32u], 1u << (j % 32u));
                        }
                    }
                    workgroupBarrier();
                    for (var w = 0u; w < WORDS; w++) {
                        var bits = atomicLoad(&found[w]);
                        while bits != 0u {
                            sum += heads_sum(b, i0 + w * 32u + countTrailingZeros(bits), within);
                            bits &= bits - 1u;
                        }
                    }
                    workgroupBarrier();
                }
            }
        }
        if d < p.dim {
            let o = view_at(p.d_table, 0u, 0u, row, d);
            if ACCUMULATES {
                sum += d_table_at(o);
            }
            d_table_store(o, sum);
        }
    }
}
