// The tile of an invocation in registers: ROWS rows by four columns. COLUMN_LANES invocations share
// the same rows.
//
// Needs: COLUMN_LANES, ROWS, WORKGROUP.
// Gives: Tile; clear_sums, row_of, sums, tile_of.

struct Tile {
    row: u32,             // the first
    column: u32,          // the first
}

var<private> sums: array<vec4<f32>, ROWS>;

fn tile_of(group: u32, index: u32, columns: u32) -> Tile {
    let column_groups = (columns + 4u * COLUMN_LANES - 1u) / (4u * COLUMN_LANES);
    // This condition shows a software driver that all lanes of a vector have the same rows.
    var rows_before = 0u;
    if WORKGROUP != COLUMN_LANES {
        rows_before = index / COLUMN_LANES;
    }
    let row_tile = group / column_groups * (WORKGROUP / COLUMN_LANES) + rows_before;
    let column = (group % column_groups * COLUMN_LANES + index % COLUMN_LANES) * 4u;
    return Tile(row_tile * ROWS, column);
}

fn clear_sums() {
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        sums[r] = vec4<f32>();
    }
}

// Returns a row to load: rows past the last are replaced by the last.
fn row_of(row: u32, count: u32) -> u32 {
    return min(row, count - 1u);
}
