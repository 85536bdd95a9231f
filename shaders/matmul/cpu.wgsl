// C = A · B by tiles, for drivers that run on a CPU: no workgroup memory, no barriers. An
// invocation computes ROWS rows of four columns. The rows depend only on workgroup_id, so loads of
// A are uniform: the compiler broadcasts them instead of gathering.
//
// Constants: ROWS, LANES, B_ALONG_N, RAGGED, REPAIRS.
// The stage gives:
//   struct Tile { rows, cols, ... }       the product's size, and fields of the stage
//   tile_of(z) -> Tile                    from workgroup_id.z
//   tile_needed(t, row, rows, col, cols)  true if this part of C is needed
//   tile_inner(t, row, rows) -> vec2      first k and end of k for these rows
//   tile_a4(t, row, k) -> vec4            A[row, k..k+4]
//   tile_b4(t, k, col) -> vec4            B[k, col..col+4] if B_ALONG_N, else B[k..k+4, col]
//   tile_store4(t, row, col, value)         C[row, col..col+4]
//   tile_repair(t, row, col)              the same again, if REPAIRS and it is not finite
//
// Needs: B_ALONG_N, LANES, RAGGED, REPAIRS, ROWS; Tile; all_finite, tile_a4, tile_b4, tile_inner,
// tile_needed, tile_of, tile_repair, tile_store4.
// Gives: main.

// Rows whose stores are unrolled.
const STORED: u32 = min(ROWS, 4u);

// B[k..k+4, col..col+4], a column of the matrix per k.
fn block_b(t: Tile, k: u32, col: u32) -> mat4x4<f32> {
    if B_ALONG_N {
        return mat4x4<f32>(
            tile_b4(t, k, col),
            tile_b4(t, min(k + 1u, t.inner - 1u), col),
            tile_b4(t, min(k + 2u, t.inner - 1u), col),
            tile_b4(t, min(k + 3u, t.inner - 1u), col),
        );
    } else {
        let last = t.cols - 1u;
        return transpose(mat4x4<f32>(
            tile_b4(t, k, col),
            tile_b4(t, k, min(col + 1u, last)),
            tile_b4(t, k, min(col + 2u, last)),
            tile_b4(t, k, min(col + 3u, last)),
        ));
    }
}

// sum + a · b, where a is a row of A and b a block of B. It is written as a matrix product, because
// software drivers have no fused multiply-add. Sums of products also shorten the dependency chain.
fn add_product(sum: vec4<f32>, a: vec4<f32>, b: mat4x4<f32>) -> vec4<f32> {
    return sum + b * a;
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let t = tile_of(group.z);
    let row0 = group.x * ROWS;
    let col0 = group.y * LANES * 4u;
    let col = col0 + lane * 4u;
    if row0 >= t.rows || col >= t.cols {
        return;
    }
    let rows = min(ROWS, t.rows - row0);
    if !tile_needed(t, row0, rows, col0, min(LANES * 4u, t.cols - col0)) {
        return;
    }
    let inner = tile_inner(t, row0, rows);

    var acc: array<vec4<f32>, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        acc[r] = vec4<f32>();
    }
    let whole = vec2<u32>((inner.x + 3u) & ~3u, inner.y & ~3u);
    for (var k = whole.x; k < whole.y; k += 4u) {
        let b = block_b(t, k, col);
        for (var r = 0u; r < ROWS; r++) {
            acc[r] = add_product(acc[r], tile_a4(t, min(row0 + r, t.rows - 1u), k), b);
        }
    }
    // The partial vectors at the ends of the range. Elements outside the range may have any value,
    // even NaN.
    for (var end = 0u; RAGGED && end < 2u; end++) {
        let k = select(whole.y, inner.x & ~3u, end == 0u);
        let ragged = select(inner.y > whole.y && whole.y >= whole.x, inner.x < whole.x, end == 0u);
        if ragged {
            var b = block_b(t, k, col);
            for (var c = 0u; c < 4u; c++) {
                if k + c < inner.x || k + c >= inner.y {
                    b[c] = vec4<f32>();
                }
            }
            let ks = vec4<u32>(k) + vec4<u32>(0u, 1u, 2u, 3u);
            let within = (ks >= vec4<u32>(inner.x)) & (ks < vec4<u32>(inner.y));
            for (var r = 0u; r < ROWS; r++) {
                let a = select(vec4<f32>(), tile_a4(t, min(row0 + r, t.rows - 1u), k), within);
                acc[r] = add_product(acc[r], a, b);
            }
        }
    }
    // The loop rotates the sums through the first of them, so that the code of a store exists few
    // times.
    var broken = false;
    for (var r0 = 0u; r0 < rows; r0 += STORED) {
        /* unrolled */ for (var r = 0u; r < STORED; r++) {
            if r0 + r < rows {
                tile_store4(t, row0 + r0 + r, col, acc[r]);
                broken = broken || !all_finite(acc[r]);
            }
        }
        /* unrolled */ for (var r = 0u; r < ROWS - STORED; r++) {
            acc[r] = acc[r + STORED];
        }
    }
    if REPAIRS && broken {
        for (var r = 0u; r < rows; r++) {
            tile_repair(t, row0 + r, col);
        }
    }
}
