// Workgroup memory of fused_matrix.wgsl as arrays of scalars, which is what Metal's fragments load and store.

var<workgroup> halves: array<f16, HALVES>;
var<workgroup> scores: array<f32, SCORES>;

fn halves_put(o: u32, x: vec4<f16>) {
    halves[o] = x.x;
    halves[o + 1u] = x.y;
    halves[o + 2u] = x.z;
    halves[o + 3u] = x.w;
}

fn scores_put4(o: u32, x: vec4<f32>) {
    scores[o] = x.x;
    scores[o + 1u] = x.y;
    scores[o + 2u] = x.z;
    scores[o + 3u] = x.w;
}

fn scores_at4(o: u32) -> vec4<f32> {
    return vec4<f32>(scores[o], scores[o + 1u], scores[o + 2u], scores[o + 3u]);
}

// A fragment of rows of `step`; `down`: of what lies there transposed.
fn halves_left(o: u32, step: u32) -> Left {
    return coopLoadT<Left>(&halves[o], step);
}

fn halves_right(o: u32, step: u32) -> Right {
    return coopLoadT<Right>(&halves[o], step);
}

fn halves_down(o: u32, step: u32) -> Right {
    return coopLoad<Right>(&halves[o], step);
}

fn scores_sums(o: u32, step: u32) -> Sums {
    return coopLoadT<Sums>(&scores[o], step);
}

fn scores_put(x: Sums, o: u32, step: u32) {
    coopStoreT(x, &scores[o], step);
}
