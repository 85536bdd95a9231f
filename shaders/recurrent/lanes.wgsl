// The columns and the first row of an invocation in a kernel whose workgroup computes all rows of
// some columns.
//
// Needs: COLUMN_LANES, ROWS, WORKGROUP.
// Gives: Lane; STEP; lane_of.

struct Lane {
    column: u32,
    row: u32,
}

// Rows of all invocations with the same columns.
const STEP: u32 = WORKGROUP / COLUMN_LANES * ROWS;

fn lane_of(group: u32, index: u32) -> Lane {
    // This condition shows a software driver that all lanes of a vector have the same rows.
    var row = 0u;
    if WORKGROUP != COLUMN_LANES {
        row = index / COLUMN_LANES * ROWS;
    }
    return Lane((group * COLUMN_LANES + index % COLUMN_LANES) * 4u, row);
}
