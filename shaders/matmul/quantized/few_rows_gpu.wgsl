// Few rows on a GPU: LANES neighbours share a column and COLUMNS columns a workgroup, so that what
// is read coalesces. The kernel adds the sums of the lanes in a fixed order.
//
// Needs: BLOCK_BYTES, COLUMNS, IN_FOURS, LANES, ROWS; p; block_fours, view_at, x_at4, y_of,
// y_store.
// Gives: main.

var<workgroup> lane_sums: array<f32, LANES * COLUMNS * ROWS>;

var<private> acc: array<f32, ROWS>;

@compute @workgroup_size(LANES * COLUMNS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let lane = index % LANES;
    let row0 = group.x * ROWS;
    let rows = min(ROWS, p.rows - row0);
    let last_row = p.rows - 1u;
    let x = view_at(p.x, group.z, 0u, 0u, 0u);
    let x_row = p.x.strides.z;
    let x_k = select(p.x.strides.w, 1u, IN_FOURS);
    let features = p.features;
    // Each step processes eight weights.
    let items = features / 8u;
    for (var col0 = group.y * COLUMNS; col0 < p.cols; col0 += p.step) {
        let col = col0 + index / LANES;
        let w = p.first_byte + min(col, p.cols - 1u) * p.row_bytes;
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            acc[r] = 0.0;
        }
        for (var n = lane; n < items; n += LANES) {
            let weights = block_fours(w + n / 4u * BLOCK_BYTES, n % 4u);
            let k = n / 4u * 32u + n % 4u * 4u;
            /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                let o = x + min(row0 + r, last_row) * x_row;
                let low = x_at4(o + k * x_k, x_k, features - k);
                let high = x_at4(o + (k + 16u) * x_k, x_k, features - k - 16u);
                acc[r] += dot(weights[0], low) + dot(weights[1], high);
            }
        }
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            lane_sums[r * LANES * COLUMNS + index] = acc[r];
        }
        workgroupBarrier();
        for (var n = LANES / 2u; n > 0u; n /= 2u) {
            if lane < n {
                /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                    lane_sums[r * LANES * COLUMNS + index] += lane_sums[r * LANES * COLUMNS + index + n];
                }
            }
            workgroupBarrier();
        }
        if lane == 0u && col < p.cols {
            for (var r = 0u; r < rows; r++) {
                y_store(y_of(group.z, row0 + r, col), lane_sums[r * LANES * COLUMNS + index]);
            }
        }
        // A barrier, because every invocation must read its sum before the next column's sums are
        // stored.
        workgroupBarrier();
    }
}
