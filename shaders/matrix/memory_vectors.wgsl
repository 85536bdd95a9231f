// What fragments are loaded from and stored to, as arrays of vectors of four: one access where scalars take four. Strides
// count vectors, and stand in variables of their own, without which naga fails.
//
// Constants: HALVES, FLOATS (elements).

var<workgroup> halves: array<vec4<f16>, HALVES / 4u>;
var<workgroup> floats: array<vec4<f32>, FLOATS / 4u>;

fn halves_store4(o: u32, x: vec4<f16>) {
    halves[o / 4u] = x;
}

fn floats_store4(o: u32, x: vec4<f32>) {
    floats[o / 4u] = x;
}

fn floats_at4(o: u32) -> vec4<f32> {
    return floats[o / 4u];
}

// Fragments of rows `step` apart; transposed: of what lies there so.
fn left_at(o: u32, step: u32) -> Left {
    let at = o / 4u;
    let vectors = step / 4u;
    return coopLoadT<Left>(&halves[at], vectors);
}

fn right_at(o: u32, step: u32) -> Right {
    let at = o / 4u;
    let vectors = step / 4u;
    return coopLoadT<Right>(&halves[at], vectors);
}

fn right_transposed_at(o: u32, step: u32) -> Right {
    let at = o / 4u;
    let vectors = step / 4u;
    return coopLoad<Right>(&halves[at], vectors);
}

fn sums_at(o: u32, step: u32) -> Sums {
    let at = o / 4u;
    let vectors = step / 4u;
    return coopLoadT<Sums>(&floats[at], vectors);
}

fn sums_store(o: u32, step: u32, x: Sums) {
    let at = o / 4u;
    let vectors = step / 4u;
    coopStoreT(x, &floats[at], vectors);
}
