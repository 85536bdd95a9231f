// Stores a result of a top-k. A result without an element has the value −∞.
//
// Constants: NONE   the index of such a result
//
// Needs: p.indices, p.neg_inf, p.values, p.x; HAS_VALUES, NONE; Place; indices_store, values_store,
// view_at, x_at.
// Gives: store_result.

fn store_result(row: Place, n: u32, column: u32) {
    indices_store(view_at(p.indices, row.b, row.h, row.i, n), column);
    if HAS_VALUES {
        var value = p.neg_inf;
        if column != NONE {
            value = x_at(view_at(p.x, row.b, row.h, row.i, column));
        }
        values_store(view_at(p.values, row.b, row.h, row.i, n), value);
    }
}
