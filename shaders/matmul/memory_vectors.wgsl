// The workgroup memory of fragments as arrays of vec4: one access instead of four accesses to
// scalars. Strides count vectors. They are stored in separate variables, because naga fails without
// these.
//
// Constants: F16_LEN, F32_LEN (elements).
//
// Needs: F16_LEN, F32_LEN; Left, Right, Sums.
// Gives: acc_at, acc_store, acc_store_transposed, f16_store4, f32_at4, f32_store, f32_store4,
// left_at, left_transposed_at, right_at, right_transposed_at.

var<workgroup> tile_f16: array<vec4<f16>, F16_LEN / 4u>;
var<workgroup> tile_f32: array<vec4<f32>, F32_LEN / 4u>;

fn f16_store4(o: u32, x: vec4<f16>) {
    tile_f16[o / 4u] = x;
}

// Neighbours may store to different parts of the same vector. Compilers for Vulkan store only one
// part. Compilers for Metal and Direct3D store the whole vector, so this file is only for Vulkan.
fn f32_store(o: u32, x: f32) {
    tile_f32[o / 4u][o % 4u] = x;
}

fn f32_store4(o: u32, x: vec4<f32>) {
    tile_f32[o / 4u] = x;
}

fn f32_at4(o: u32) -> vec4<f32> {
    return tile_f32[o / 4u];
}

// Fragments with rows `step` apart. The transposed variants load the transpose of the stored
// fragment.
fn left_at(o: u32, step: u32) -> Left {
    let at = o / 4u;
    let vectors = step / 4u;
    return coopLoadT<Left>(&tile_f16[at], vectors);
}

fn left_transposed_at(o: u32, step: u32) -> Left {
    let at = o / 4u;
    let vectors = step / 4u;
    return coopLoad<Left>(&tile_f16[at], vectors);
}

fn right_at(o: u32, step: u32) -> Right {
    let at = o / 4u;
    let vectors = step / 4u;
    return coopLoadT<Right>(&tile_f16[at], vectors);
}

fn right_transposed_at(o: u32, step: u32) -> Right {
    let at = o / 4u;
    let vectors = step / 4u;
    return coopLoad<Right>(&tile_f16[at], vectors);
}

fn acc_at(o: u32, step: u32) -> Sums {
    let at = o / 4u;
    let vectors = step / 4u;
    return coopLoadT<Sums>(&tile_f32[at], vectors);
}

fn acc_store(o: u32, step: u32, x: Sums) {
    let at = o / 4u;
    let vectors = step / 4u;
    coopStoreT(x, &tile_f32[at], vectors);
}

fn acc_store_transposed(o: u32, step: u32, x: Sums) {
    let at = o / 4u;
    let vectors = step / 4u;
    coopStore(x, &tile_f32[at], vectors);
}
