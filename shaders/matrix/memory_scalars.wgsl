// What fragments are loaded from and stored to, as arrays of scalars: Metal takes nothing else.
//
// Constants: HALVES, FLOATS (elements).

var<workgroup> halves: array<f16, HALVES>;
var<workgroup> floats: array<f32, FLOATS>;

fn halves_store4(o: u32, x: vec4<f16>) {
    halves[o] = x.x;
    halves[o + 1u] = x.y;
    halves[o + 2u] = x.z;
    halves[o + 3u] = x.w;
}

fn floats_store4(o: u32, x: vec4<f32>) {
    floats[o] = x.x;
    floats[o + 1u] = x.y;
    floats[o + 2u] = x.z;
    floats[o + 3u] = x.w;
}

fn floats_at4(o: u32) -> vec4<f32> {
    return vec4<f32>(floats[o], floats[o + 1u], floats[o + 2u], floats[o + 3u]);
}

// Fragments of rows `step` apart; transposed: of what lies there so.
fn left_at(o: u32, step: u32) -> Left {
    return coopLoadT<Left>(&halves[o], step);
}

fn right_at(o: u32, step: u32) -> Right {
    return coopLoadT<Right>(&halves[o], step);
}

fn right_transposed_at(o: u32, step: u32) -> Right {
    return coopLoad<Right>(&halves[o], step);
}

fn sums_at(o: u32, step: u32) -> Sums {
    return coopLoadT<Sums>(&floats[o], step);
}

fn sums_store(o: u32, step: u32, x: Sums) {
    coopStoreT(x, &floats[o], step);
}
