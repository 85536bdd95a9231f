// Blocks of Q4_1 (q4_1.wgsl) in parts of eight weights, for kernels whose neighbours process the
// same part of different rows.
//
// Needs: half_at, w_at.
// Gives: PART_HIGH, PART_LOW, PART_STEP; block_part, block_place, block_scales, part_start,
// part_weights.

// The first word of block `block + b` of the row that starts at byte `row`. Blocks are whole words.
fn block_place(row: u32, block: u32, b: u32) -> vec2<u32> {
    return vec2<u32>(row / 4u + (block + b) * 5u, 0u);
}

fn block_scales(place: vec2<u32>) -> vec2<f32> {
    let scales = w_at(place.x);
    return vec2<f32>(half_at(scales), half_at(scales >> 16u));
}

// The word of the four weights from part_start(n) on and of the four weights PART_STEP later, n
// below 4.
fn block_part(place: vec2<u32>, n: u32) -> vec2<u32> {
    return vec2<u32>(w_at(place.x + 1u + n), 0u);
}

// The weights of a part before scaling. They are not shifted, so each weight is multiplied by a
// power of two. The factor of the input (PART_LOW, PART_HIGH) divides by it, which is exact. Only
// the uppermost weight is shifted, because it would otherwise become the sign.
fn part_weights(part: vec2<u32>) -> mat2x4<f32> {
    let low = vec4<u32>(part.x) & vec4<u32>(0xfu, 0xf00u, 0xf0000u, 0xf000000u);
    let high = vec4<u32>(part.x & 0xf0u, part.x & 0xf000u, part.x & 0xf00000u, part.x >> 28u);
    return mat2x4<f32>(vec4<f32>(bitcast<vec4<i32>>(low)), vec4<f32>(bitcast<vec4<i32>>(high)));
}

fn part_start(n: u32) -> u32 {
    return 4u * n;
}

const PART_STEP: u32 = 16u;
const PART_LOW: vec4<f32> = vec4<f32>(1.0, 0x1p-8, 0x1p-16, 0x1p-24);
const PART_HIGH: vec4<f32> = vec4<f32>(0x1p-4, 0x1p-12, 0x1p-20, 1.0);
