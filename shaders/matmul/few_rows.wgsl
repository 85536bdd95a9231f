// C = A · B for few rows of A, on GPUs. LANES invocations share four columns of C, and each of them
// sums over a part of the inner axis. FOURS such groups share a workgroup. The kernel adds the sums
// of the lanes in a fixed order.
//
// Constants: ROWS, LANES, FOURS, B_ALONG_N.
// The stage gives: tile_of, tile_inner, tile_a4, tile_b4, tile_store4 (see matmul/cpu.wgsl). The
// inner range begins at 0.
//
// Loads of B coalesce: neighbours load neighbouring parts of the inner axis, or neighbouring
// columns if B_ALONG_N. Each element of B is loaded once. This is the lower bound of bytes, because
// A and C are small.
//
// Needs: B_ALONG_N, FOURS, LANES, ROWS; tile_a4, tile_b4, tile_inner, tile_of, tile_store4.
// Gives: main.

var<workgroup> lane_sums: array<vec4<f32>, ROWS * FOURS * LANES>;

var<private> acc: array<vec4<f32>, ROWS>;

// Four elements of B for each of four columns, or four columns for each of four elements.
var<private> b: array<vec4<f32>, 4>;

@compute @workgroup_size(LANES * FOURS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let t = tile_of(group.z);
    let row0 = group.x * ROWS;
    let col0 = group.y * (4u * FOURS);
    if row0 >= t.rows || col0 >= t.cols {
        return;
    }
    let lane = select(index % LANES, index / FOURS, B_ALONG_N);
    let four = select(index / LANES, index % FOURS, B_ALONG_N);
    let col = col0 + 4u * four;
    let last_col = t.cols - 1u;
    let last_row = t.rows - 1u;
    let inner = tile_inner(t, row0, ROWS).y;
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        acc[r] = vec4<f32>();
    }
    for (var k = 4u * lane; k < inner; k += 4u * LANES) {
        // Columns past the last one may have any value, because they are not stored. Elements past
        // the end of the inner axis are zeros, in A and in B.
        /* unrolled */ for (var c = 0u; c < 4u; c++) {
            if B_ALONG_N {
                let four_columns = vec4<f32>(tile_b4(t, min(k + c, inner - 1u), min(col, last_col & ~3u)));
                b[c] = select(vec4<f32>(), four_columns, k + c < inner);
            } else {
                b[c] = vec4<f32>(tile_b4(t, k, min(col + c, last_col)));
            }
        }
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            let a = vec4<f32>(tile_a4(t, min(row0 + r, last_row), k));
            if B_ALONG_N {
                acc[r] += a.x * b[0] + a.y * b[1] + a.z * b[2] + a.w * b[3];
            } else {
                acc[r] += vec4<f32>(dot(a, b[0]), dot(a, b[1]), dot(a, b[2]), dot(a, b[3]));
            }
        }
    }
    let place = four * LANES + lane;
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        lane_sums[r * FOURS * LANES + place] = acc[r];
    }
    workgroupBarrier();
    for (var n = LANES / 2u; n > 0u; n /= 2u) {
        if lane < n {
            /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                let o = r * FOURS * LANES + place;
                lane_sums[o] += lane_sums[o + n];
            }
        }
        workgroupBarrier();
    }
    // A lane stores a row.
    let row = row0 + lane;
    if lane < ROWS && row < t.rows && col < t.cols {
        tile_store4(t, row, col, lane_sums[(lane * FOURS + four) * LANES]);
    }
}
