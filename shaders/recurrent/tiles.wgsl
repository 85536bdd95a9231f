// The number of tiles of a product.
//
// Needs: COLUMN_LANES, ROWS, WORKGROUP.
// Gives: tiles_of.

// Returns the workgroups of `rows` rows and `columns` columns.
fn tiles_of(rows: u32, columns: u32) -> u32 {
    let rows_each = WORKGROUP / COLUMN_LANES * ROWS;
    let columns_each = 4u * COLUMN_LANES;
    return (rows + rows_each - 1u) / rows_each * ((columns + columns_each - 1u) / columns_each);
}
