// Stores up to four columns of a row of a result.
//
// Needs: IN_FOURS; p.accumulates, p.written; component, row_end, view_at, written_at, written_at4,
// written_store, written_store4.
// Gives: store_row.

fn store_row(b: u32, h: u32, i: u32, c: u32, value: vec4<f32>) {
    let o = view_at(p.written, b, h, i, c);
    if IN_FOURS {
        var sum = value;
        if p.accumulates != 0u {
            sum += written_at4(o, 1u, 4u);
        }
        written_store4(o, sum);
    } else {
        for (var n = 0u; n < min(4u, row_end() - c); n++) {
            var sum = component(value, n);
            if p.accumulates != 0u {
                sum += written_at(o + n * p.written.strides.w);
            }
            written_store(o + n * p.written.strides.w, sum);
        }
    }
}
