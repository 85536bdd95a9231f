// Workgroup memory of fused_matrix.wgsl as arrays of vectors of four: one access where scalars take four.

var<workgroup> halves: array<vec4<f16>, HALVES / 4u>;
var<workgroup> scores: array<vec4<f32>, SCORES / 4u>;

fn halves_put(o: u32, x: vec4<f16>) {
    halves[o / 4u] = x;
}

fn scores_put4(o: u32, x: vec4<f32>) {
    scores[o / 4u] = x;
}

fn scores_at4(o: u32) -> vec4<f32> {
    return scores[o / 4u];
}

// A fragment of rows of `step`; `down`: of what lies there transposed.
fn halves_left(o: u32, step: u32) -> Left {
    let at = o / 4u;
    let vectors = step / 4u;
    return coopLoadT<Left>(&halves[at], vectors);
}

fn halves_right(o: u32, step: u32) -> Right {
    let at = o / 4u;
    let vectors = step / 4u;
    return coopLoadT<Right>(&halves[at], vectors);
}

fn halves_down(o: u32, step: u32) -> Right {
    let at = o / 4u;
    let vectors = step / 4u;
    return coopLoad<Right>(&halves[at], vectors);
}

fn scores_sums(o: u32, step: u32) -> Sums {
    let at = o / 4u;
    let vectors = step / 4u;
    return coopLoadT<Sums>(&scores[at], vectors);
}

fn scores_put(x: Sums, o: u32, step: u32) {
    let at = o / 4u;
    let vectors = step / 4u;
    coopStoreT(x, &scores[at], vectors);
}
