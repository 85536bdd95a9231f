// Few rows on a software driver: eight invocations share a column, each with a weight of eight that follow each other, so that
// loads of W are the same in all and none is gathered. What each needs of x it has loaded before the first column. The sums of the
// lanes are added in a fixed order.
//
// BLOCKS of a row at a time, a divisor of their number.
//
// Needs: BLOCKS, BLOCK_BYTES, COLUMNS, IN_FOURS, LANES, ROWS; p; block_scales, block_shift, block_weight, block_words, view_at, x_at,
// y_of, y_store.
// Gives: main.

const_assert LANES == 8u;

var<private> x_own: array<f32, BLOCKS * 4u * ROWS>;

var<workgroup> lane_sums: array<f32, COLUMNS * ROWS * LANES>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row0 = group.x * ROWS;
    let last_row = p.rows - 1u;
    let x_k = select(p.x.strides.w, 1u, IN_FOURS);
    let x = view_at(p.x, group.z, 0u, 0u, 0u) + (lane % 4u + lane / 4u * 16u) * x_k;
    let x_row = p.x.strides.z;
    let w = p.w;
    let row_bytes = p.row_bytes;
    let blocks = p.features / 32u;
    let cols = p.cols;
    let shift = block_shift(lane);
    for (var col0 = group.y * COLUMNS; col0 < cols; col0 += p.step) {
        let columns = min(COLUMNS, cols - col0);
        for (var block0 = 0u; block0 < blocks; block0 += BLOCKS) {
            /* unrolled */ for (var b = 0u; b < BLOCKS; b++) {
                /* unrolled */ for (var n = 0u; n < 4u; n++) {
                    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                        let row = min(row0 + r, last_row);
                        x_own[(b * 4u + n) * ROWS + r] = x_at(x + row * x_row + ((block0 + b) * 32u + n * 4u) * x_k);
                    }
                }
            }
            for (var c = 0u; c < columns; c++) {
                let first = w + (col0 + c) * row_bytes + block0 * BLOCK_BYTES;
                var sums: array<f32, ROWS>;
                /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                    sums[r] = 0.0;
                }
                /* unrolled */ for (var b = 0u; b < BLOCKS; b++) {
                    let byte = first + b * BLOCK_BYTES;
                    let scales = block_scales(byte);
                    let words = block_words(byte, lane);
                    var part: array<f32, ROWS>;
                    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                        part[r] = 0.0;
                    }
                    /* unrolled */ for (var n = 0u; n < 4u; n++) {
                        let weight = block_weight(scales, words[n], shift);
                        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                            part[r] += weight * x_own[(b * 4u + n) * ROWS + r];
                        }
                    }
                    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                        sums[r] += part[r];
                    }
                }
                /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                    let o = (c * ROWS + r) * LANES + lane;
                    lane_sums[o] = select(lane_sums[o], 0.0, block0 == 0u) + sums[r];
                }
            }
        }
        workgroupBarrier();
        for (var item = lane; item < columns * ROWS; item += LANES) {
            let row = row0 + item % ROWS;
            if row <= last_row {
                var sum = 0.0;
                for (var n = 0u; n < LANES; n++) {
                    sum += lane_sums[item * LANES + n];
                }
                y_store(y_of(group.z, row, col0 + item / ROWS), sum);
            }
        }
        // All have been read before the next columns' sums.
        workgroupBarrier();
    }
}
