// C = A · B for few rows of A, on GPUs. LANES invocations share four columns of C, and each of them
// sums over a part of the inner axis. FOURS such groups share a workgroup. The kernel adds the sums
// of the lanes in a fixed order.
//
// Constants: ROWS, LANES, FOURS, SIDES, B_ALONG_N.
// The stage gives: tile_inner, tile_b4, tile_store4 (see matmul/cpu.wgsl), prepare_row, few_a4.
// All invocations call prepare_row first. Then few_a4 loads from the rows. The inner range begins
// at 0.
//
// With two SIDES the kernel multiplies the rows by two matrices of one shape. It gets their tiles
// from side_of. It passes both products to tile_store_gated4.
//
// Loads of B coalesce: neighbours load neighbouring parts of the inner axis, or neighbouring
// columns if B_ALONG_N. Each element of B is loaded once. This is the lower bound of bytes, because
// A and C are small.
//
// Needs: B_ALONG_N, FOURS, LANES, ROWS, SIDES; Tile; few_a4, prepare_row, side_of, tile_b4,
// tile_inner, tile_store4, tile_store_gated4.
// Gives: main.

var<workgroup> lane_sums: array<vec4<f32>, ROWS * FOURS * LANES>;

var<private> acc: array<vec4<f32>, ROWS>;

// Four elements of B for each of four columns, or four columns for each of four elements.
var<private> b: array<vec4<f32>, 4>;

@compute @workgroup_size(LANES * FOURS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let first = side_of(group.z, 0u);
    let row0 = group.x * ROWS;
    let col0 = group.y * (4u * FOURS);
    if row0 >= first.rows || col0 >= first.cols {
        return;
    }
    let lane = select(index % LANES, index / FOURS, B_ALONG_N);
    let four = select(index / LANES, index % FOURS, B_ALONG_N);
    let col = col0 + 4u * four;
    prepare_row(first, row0, index);
    // A lane stores a row.
    let row = row0 + lane;
    let stores = lane < ROWS && row < first.rows && col < first.cols;
    if SIDES == 1u {
        let sums = sums_of(first, row0, col, four, lane);
        if stores {
            tile_store4(first, row, col, sums);
        }
    } else {
        let second = side_of(group.z, 1u);
        let one = sums_of(first, row0, col, four, lane);
        // All invocations must read the sums before the next ones are stored.
        workgroupBarrier();
        let other = sums_of(second, row0, col, four, lane);
        if stores {
            tile_store_gated4(first, second, row, col, one, other);
        }
    }
}

// Four columns of the product's lane-th row.
fn sums_of(t: Tile, row0: u32, col: u32, four: u32, lane: u32) -> vec4<f32> {
    let last_col = t.cols - 1u;
    let last_row = t.rows - 1u;
    let inner = tile_inner(t, row0, ROWS).y;
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        acc[r] = vec4<f32>();
    }
    for (var k = 4u * lane; k < inner; k += 4u * LANES) {
        // Columns past the last one may have any value, because they are not stored. Elements of B
        // past the end of the inner axis are zeros.
        /* unrolled */ for (var c = 0u; c < 4u; c++) {
            if B_ALONG_N {
                let four_columns = vec4<f32>(tile_b4(t, min(k + c, inner - 1u), min(col, last_col & ~3u)));
                b[c] = select(vec4<f32>(), four_columns, k + c < inner);
            } else {
                b[c] = vec4<f32>(tile_b4(t, k, min(col + c, last_col)));
            }
        }
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            let a = few_a4(t, min(row0 + r, last_row), k);
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
    return lane_sums[(min(lane, ROWS - 1u) * FOURS + four) * LANES];
}
