// The memory of tile_matrix.wgsl in scalars: Metal loads fragments from nothing else.

var<workgroup> tile_a: array<f16, STAGED>;
var<workgroup> tile_b: array<f16, STAGED>;
var<workgroup> results: array<f32, RESULTS>;

fn stage_a(o: u32, v: vec4<f16>) {
    tile_a[o] = v.x;
    tile_a[o + 1u] = v.y;
    tile_a[o + 2u] = v.z;
    tile_a[o + 3u] = v.w;
}

fn stage_b(o: u32, v: vec4<f16>) {
    tile_b[o] = v.x;
    tile_b[o + 1u] = v.y;
    tile_b[o + 2u] = v.z;
    tile_b[o + 3u] = v.w;
}

fn left(o: u32) -> Left {
    let stride = ROW;
    return coopLoadT<Left>(&tile_a[o], stride);
}

fn right(o: u32) -> Right {
    if B_ALONG_N {
        let stride = ROW_N;
        return coopLoadT<Right>(&tile_b[o], stride);
    }
    let stride = ROW;
    return coopLoad<Right>(&tile_b[o], stride);
}

fn leave(sums: Sums, o: u32) {
    let stride = RESULT_ROW;
    coopStoreT(sums, &results[o], stride);
}

fn result(o: u32) -> vec4<f32> {
    return vec4<f32>(results[o], results[o + 1u], results[o + 2u], results[o + 3u]);
}
