// Stores four channels of a row of out, without channels past the last one.
//
// Needs: p.out; IN_FOURS; component, out_store, out_store4.
// Gives: store_four.

// o is the element of the first channel. The row has `within` channels from there on.
fn store_four(o: u32, within: u32, value: vec4<f32>) {
    if IN_FOURS {
        out_store4(o, value);
    } else {
        for (var c = 0u; c < min(4u, within); c++) {
            out_store(o + c * p.out.strides.w, component(value, c));
        }
    }
}
