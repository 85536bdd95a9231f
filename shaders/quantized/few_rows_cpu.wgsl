// Few rows on a software driver: an invocation has a column, whose blocks it unpacks once for all rows; what it reads of x is the
// same in all invocations.
//
// Needs: BLOCK_BYTES, COLUMNS, IN_FOURS, ROWS; p; block_fours, view_at, x_at4, y_of, y_store.
// Gives: main.

var<private> acc: array<vec4<f32>, ROWS>;

@compute @workgroup_size(COLUMNS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let row0 = group.x * ROWS;
    let last_row = p.rows - 1u;
    let x = view_at(p.x, group.z, 0u, 0u, 0u);
    let x_row = p.x.strides.z;
    let x_k = select(p.x.strides.w, 1u, IN_FOURS);
    let features = p.features;
    for (var col = group.y * COLUMNS + index; col < p.cols; col += p.step) {
        var byte = p.w + col * p.row_bytes;
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            acc[r] = vec4<f32>();
        }
        for (var k0 = 0u; k0 < features; k0 += 32u) {
            /* unrolled */ for (var n = 0u; n < 4u; n++) {
                let weights = block_fours(byte, n);
                let k = k0 + n * 4u;
                /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                    let o = x + min(row0 + r, last_row) * x_row;
                    let low = x_at4(o + k * x_k, x_k, features - k);
                    let high = x_at4(o + (k + 16u) * x_k, x_k, features - k - 16u);
                    acc[r] += weights[0] * low + weights[1] * high;
                }
            }
            byte += BLOCK_BYTES;
        }
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            if row0 + r <= last_row {
                let sum = acc[r];
                y_store(y_of(group.z, row0 + r, col), (sum.x + sum.y) + (sum.z + sum.w));
            }
        }
    }
}
