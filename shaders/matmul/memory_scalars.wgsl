// The workgroup memory of fragments as arrays of scalars, the only kind that Metal supports.
//
// Constants: F16_LEN, F32_LEN (elements).
//
// Needs: F16_LEN, F32_LEN; Left, Right, Sums.
// Gives: acc_at, acc_store, acc_store_transposed, f16_store4, f32_at4, f32_store, f32_store4,
// left_at, left_transposed_at, right_at, right_transposed_at.

var<workgroup> tile_f16: array<f16, F16_LEN>;
var<workgroup> tile_f32: array<f32, F32_LEN>;

fn f16_store4(o: u32, x: vec4<f16>) {
    tile_f16[o] = x.x;
    tile_f16[o + 1u] = x.y;
    tile_f16[o + 2u] = x.z;
    tile_f16[o + 3u] = x.w;
}

fn f32_store(o: u32, x: f32) {
    tile_f32[o] = x;
}

fn f32_store4(o: u32, x: vec4<f32>) {
    tile_f32[o] = x.x;
    tile_f32[o + 1u] = x.y;
    tile_f32[o + 2u] = x.z;
    tile_f32[o + 3u] = x.w;
}

fn f32_at4(o: u32) -> vec4<f32> {
    return vec4<f32>(tile_f32[o], tile_f32[o + 1u], tile_f32[o + 2u], tile_f32[o + 3u]);
}

// Fragments with rows `step` apart. The transposed variants load the transpose of the stored
// fragment.
fn left_at(o: u32, step: u32) -> Left {
    return coopLoadT<Left>(&tile_f16[o], step);
}

fn left_transposed_at(o: u32, step: u32) -> Left {
    return coopLoad<Left>(&tile_f16[o], step);
}

fn right_at(o: u32, step: u32) -> Right {
    return coopLoadT<Right>(&tile_f16[o], step);
}

fn right_transposed_at(o: u32, step: u32) -> Right {
    return coopLoad<Right>(&tile_f16[o], step);
}

fn acc_at(o: u32, step: u32) -> Sums {
    return coopLoadT<Sums>(&tile_f32[o], step);
}

fn acc_store(o: u32, step: u32, x: Sums) {
    coopStoreT(x, &tile_f32[o], step);
}

fn acc_store_transposed(o: u32, step: u32, x: Sums) {
    coopStore(x, &tile_f32[o], step);
}
