// Stores up to four channels of a row, or adds them to its contents if ACCUMULATES.
//
// Needs: p, component, y_at4, y_store, y_store4, ACCUMULATES, IN_FOURS.
// Gives: store_row.

fn store_row(o: u32, rest: u32, x: vec4<f32>) {
    var sum = x;
    if ACCUMULATES {
        sum += y_at4(o, p.y.strides.w, rest);
    }
    if IN_FOURS {
        y_store4(o, sum);
    } else {
        for (var c = 0u; c < min(4u, rest); c++) {
            y_store(o + c * p.y.strides.w, component(sum, c));
        }
    }
}
