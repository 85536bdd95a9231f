// Products of arrays in memory, added to the sums of a tile. `left` and `right` are the first
// elements of the tile's rows and columns.
//
// Needs: ROWS; memory_at4, sums.
// Gives: add_columns, add_dots, add_rows, at4.

fn at4(o: u32) -> vec4<f32> {
    return memory_at4(o, 1u, 4u);
}

// The left rows times a matrix of `depth` rows, a multiple of four.
fn add_rows(left: u32, left_stride: u32, right: u32, right_stride: u32, depth: u32) {
    for (var k = 0u; k < depth; k += 4u) {
        let o = right + k * right_stride;
        let rows = mat4x4<f32>(
            at4(o),
            at4(o + right_stride),
            at4(o + 2u * right_stride),
            at4(o + 3u * right_stride),
        );
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            sums[r] += rows * at4(left + r * left_stride + k);
        }
    }
}

// The left columns, from row `begin` to row `end`, times the right rows.
fn add_columns(left: u32, left_stride: u32, right: u32, right_stride: u32, begin: u32, end: u32) {
    for (var k = begin; k < end; k++) {
        let row = at4(right + k * right_stride);
        /* unrolled */ for (var r = 0u; r < ROWS; r += 4u) {
            let factors = at4(left + k * left_stride + r);
            sums[r] += factors.x * row;
            sums[r + 1u] += factors.y * row;
            sums[r + 2u] += factors.z * row;
            sums[r + 3u] += factors.w * row;
        }
    }
}

// The scalar products of the left rows with four right rows.
fn add_dots(left: u32, left_stride: u32, right: u32, right_stride: u32, depth: u32) {
    for (var k = 0u; k < depth; k += 4u) {
        let o = right + k;
        let columns = mat4x4<f32>(
            at4(o),
            at4(o + right_stride),
            at4(o + 2u * right_stride),
            at4(o + 3u * right_stride),
        );
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            sums[r] += at4(left + r * left_stride + k) * columns;
        }
    }
}
