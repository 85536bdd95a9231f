// Draws one map of attention weights as a picture, a pixel for each pair.
// `largest` runs first, in one workgroup. `draw` runs in a workgroup for each 8 x 8 pixels.

struct Map {
    rows: u32,    // queries
    columns: u32, // keys
    first: u32,   // the element of `weights` at which the map begins
}

@group(0) @binding(0) var<uniform> map: Map;
@group(0) @binding(1) var<storage, read> weights: array<f32>;
@group(0) @binding(2) var<storage, read> palette: array<u32, 256>;
@group(0) @binding(3) var<storage, read_write> most: array<f32, 1>;
@group(0) @binding(4) var picture: texture_storage_2d<rgba8unorm, write>;

const SIZE = 256u;
const NAN_COLOUR = vec4<f32>(1.0, 0.0, 1.0, 1.0);

var<workgroup> partial: array<f32, SIZE>;

// Compares bits, because compilers may assume that no value is NaN.
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }

@compute @workgroup_size(SIZE)
fn largest(@builtin(local_invocation_index) lane: u32) {
    var of_lane = 0.0;
    for (var n = lane; n < map.rows * map.columns; n += SIZE) {
        let weight = weights[map.first + n];
        if !is_nan(weight) { of_lane = max(of_lane, weight); }
    }
    partial[lane] = of_lane;
    workgroupBarrier();
    for (var half = SIZE / 2u; half > 0u; half /= 2u) {
        if lane < half { partial[lane] = max(partial[lane], partial[lane + half]); }
        workgroupBarrier();
    }
    if lane == 0u { most[0] = partial[0]; }
}

@compute @workgroup_size(8, 8)
fn draw(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.y >= map.rows || id.x >= map.columns { return; }
    let weight = weights[map.first + id.y * map.columns + id.x];
    // Square roots show small weights too.
    let share = sqrt(weight / max(most[0], 1e-30));
    let shade = u32(clamp(share, 0.0, 1.0) * 255.0 + 0.5);
    let colour = unpack4x8unorm(palette[min(shade, 255u)]);
    textureStore(picture, id.xy, select(colour, NAN_COLOUR, is_nan(weight)));
}
