// Few rows on a software driver: an invocation has COLUMNS columns, LANES apart, of all rows, so
// unpacking is vectorised. Each lane of a vector unpacks the weights of a column. All lanes load
// the same x, and invocations do not communicate.
//
// A load of W addresses as many rows as there are lanes, and processors cannot prefetch such loads.
// Therefore the kernel loads a word of each cache line of the next group of columns, in order.
// These loads only fill the cache.
//
// TOGETHER blocks of a row are processed at a time.
//
// Needs: BLOCK_BYTES, COLUMNS, IN_FOURS, LANES, PART_HIGH, PART_LOW, PART_STEP, ROWS, TOGETHER; p;
// block_part, block_place, block_scales, part_start, part_weights, view_at, w_at, x_at4, y_of,
// y_store.
// Gives: main.

const GROUP: u32 = LANES * COLUMNS;
const LINE_BYTES: u32 = 64u;
const LINES: u32 = (GROUP * BLOCK_BYTES * TOGETHER + 63u) / 64u;

var<private> first: array<u32, COLUMNS>;
var<private> x_low: array<vec4<f32>, ROWS>;
var<private> x_high: array<vec4<f32>, ROWS>;
var<private> x_sums: array<f32, ROWS>;
var<private> parts: array<f32, COLUMNS * ROWS>;
var<private> sums: array<f32, COLUMNS * ROWS>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row0 = group.x * ROWS;
    let last_row = p.rows - 1u;
    let x_k = select(p.x.strides.w, 1u, IN_FOURS);
    let x = view_at(p.x, group.z, 0u, 0u, 0u);
    let x_row = p.x.strides.z;
    let row_bytes = p.row_bytes;
    let blocks = p.features / 32u;
    let cols = p.cols;
    let last_word = p.last_word;
    var touched = 0u;
    for (var col0 = group.y * GROUP; col0 < cols; col0 += p.step) {
        let next = (p.first_byte + (col0 + GROUP) * row_bytes) / 4u;
        /* unrolled */ for (var c = 0u; c < COLUMNS; c++) {
            first[c] = p.first_byte + min(col0 + c * LANES + lane, cols - 1u) * row_bytes;
            /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                sums[c * ROWS + r] = 0.0;
            }
        }
        for (var block = 0u; block < blocks; block += TOGETHER) {
            let ahead = next + block * (GROUP * BLOCK_BYTES / 4u);
            /* unrolled */ for (var n = 0u; n < LINES; n++) {
                touched |= w_at(min(ahead + n * LINE_BYTES / 4u, last_word));
            }
            /* unrolled */ for (var b = 0u; b < TOGETHER; b++) {
                /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                    x_sums[r] = 0.0;
                    /* unrolled */ for (var c = 0u; c < COLUMNS; c++) {
                        parts[c * ROWS + r] = 0.0;
                    }
                }
                /* unrolled */ for (var n = 0u; n < 4u; n++) {
                    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                        let o = x + min(row0 + r, last_row) * x_row + ((block + b) * 32u + part_start(n)) * x_k;
                        let low = x_at4(o, x_k, 4u);
                        let high = x_at4(o + PART_STEP * x_k, x_k, 4u);
                        let both = low + high;
                        x_sums[r] += (both.x + both.y) + (both.z + both.w);
                        x_low[r] = low * PART_LOW;
                        x_high[r] = high * PART_HIGH;
                    }
                    /* unrolled */ for (var c = 0u; c < COLUMNS; c++) {
                        let weights = part_weights(block_part(block_place(first[c], block, b), n));
                        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                            parts[c * ROWS + r] += dot(weights[0], x_low[r]) + dot(weights[1], x_high[r]);
                        }
                    }
                }
                /* unrolled */ for (var c = 0u; c < COLUMNS; c++) {
                    let scales = block_scales(block_place(first[c], block, b));
                    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                        sums[c * ROWS + r] += scales.x * parts[c * ROWS + r] + scales.y * x_sums[r];
                    }
                }
            }
        }
        /* unrolled */ for (var c = 0u; c < COLUMNS; c++) {
            let col = col0 + c * LANES + lane;
            if col < cols {
                /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                    if row0 + r <= last_row {
                        // `touched & p.none` is 0, but the driver cannot know that. Without this
                        // use it would remove the loads that fill the cache.
                        let value = bitcast<f32>(bitcast<u32>(sums[c * ROWS + r]) | (touched & p.none));
                        y_store(y_of(group.z, row0 + r, col), value);
                    }
                }
            }
        }
    }
}
