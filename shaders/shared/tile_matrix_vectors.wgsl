// The memory of tile_matrix.wgsl in vectors: an invocation stages one at once. Strides count vectors.

var<workgroup> tile_a: array<vec4<f16>, STAGED / 4u>;
var<workgroup> tile_b: array<vec4<f16>, STAGED / 4u>;
var<workgroup> results: array<vec4<f32>, RESULTS / 4u>;

fn stage_a(o: u32, v: vec4<f16>) {
    tile_a[o / 4u] = v;
}

fn stage_b(o: u32, v: vec4<f16>) {
    tile_b[o / 4u] = v;
}

fn left(o: u32) -> Left {
    let at = o / 4u;
    let stride = ROW / 4u;
    return coopLoadT<Left>(&tile_a[at], stride);
}

fn right(o: u32) -> Right {
    let at = o / 4u;
    if B_ALONG_N {
        let stride = ROW_N / 4u;
        return coopLoadT<Right>(&tile_b[at], stride);
    }
    let stride = ROW / 4u;
    return coopLoad<Right>(&tile_b[at], stride);
}

fn leave(sums: Sums, o: u32) {
    let at = o / 4u;
    let stride = RESULT_ROW / 4u;
    coopStoreT(sums, &results[at], stride);
}

fn result(o: u32) -> vec4<f32> {
    return results[o / 4u];
}
