// The factor of the products of rows with directions.
//
// Needs: IS_UNIT; p.head_dim, p.rows, p.scale, rows_at, view_at.
// Gives: factor_of, square_of.

fn square_of(b: u32, h: u32, i: u32) -> f32 {
    var square = 0.0;
    for (var d = 0u; d < p.head_dim; d++) {
        let x = rows_at(view_at(p.rows, b, h, i, d));
        square += x * x;
    }
    return square;
}

// Returns the factor of a row with the squared length `square`: 1 / length, or head_dim^−¼.
fn factor_of(square: f32) -> f32 {
    if IS_UNIT {
        return select(0.0, 1.0 / sqrt(square), square > 0.0);
    } else {
        return p.scale;
    }
}
