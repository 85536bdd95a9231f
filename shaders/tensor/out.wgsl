// Stores four channels of out from col on, without those past the last channel.
//
// Needs: p.out, p.value_dim; OUT_IN_FOURS; component, out_store, out_store4, view_at.
// Gives: store_out.

fn store_out(b: u32, h: u32, i: u32, col: u32, value: vec4<f32>) {
    let o = view_at(p.out, b, h, i, col);
    if OUT_IN_FOURS {
        out_store4(o, value);
    } else {
        for (var c = 0u; c < min(4u, p.value_dim - col); c++) {
            out_store(o + c * p.out.strides.w, component(value, c));
        }
    }
}
