// Blocks of Q8_0 (q8_0.wgsl) in parts of eight weights, for kernels whose neighbours process the
// same part of different rows.
//
// Needs: BLOCK_BYTES, TOGETHER; half_at, w_at.
// Gives: PART_HIGH, PART_LOW, PART_STEP; block_part, block_place, block_scales, part_start,
// part_weights.

// The word in which block `block + b` of the row that starts at byte `row` starts. The second
// component is 1 if it starts in the upper 16 bits. With two blocks at a time, this component is b.
fn block_place(row: u32, block: u32, b: u32) -> vec2<u32> {
    if TOGETHER == 2u {
        return vec2<u32>(row / 4u + block / 2u * 17u + b * 8u, b);
    } else {
        let byte = row + (block + b) * BLOCK_BYTES;
        return vec2<u32>(byte / 4u, byte % 4u / 2u);
    }
}

fn block_scales(place: vec2<u32>) -> vec2<f32> {
    return vec2<f32>(half_at(w_at(place.x) >> (16u * place.y)), 0.0);
}

fn place_word(place: vec2<u32>, n: u32) -> u32 {
    let second = w_at(place.x + n + 1u);
    return select((w_at(place.x + n) >> 16u) | (second << 16u), second, place.y == 1u);
}

// The words of the four weights from part_start(n) on and of the four weights PART_STEP later, n
// below 4.
fn block_part(place: vec2<u32>, n: u32) -> vec2<u32> {
    return vec2<u32>(place_word(place, 2u * n), place_word(place, 2u * n + 1u));
}

// The weights of a part before scaling, times 2²⁴. The factor of the input (PART_LOW, PART_HIGH)
// divides by 2²⁴, which is exact.
fn part_weights(part: vec2<u32>) -> mat2x4<f32> {
    return mat2x4<f32>(upper_bytes(part.x), upper_bytes(part.y));
}

fn upper_bytes(word: u32) -> vec4<f32> {
    let bytes = (vec4<u32>(word) << vec4<u32>(24u, 16u, 8u, 0u)) & vec4<u32>(0xff000000u);
    return vec4<f32>(bitcast<vec4<i32>>(bytes));
}

fn part_start(n: u32) -> u32 {
    return 8u * n;
}

const PART_STEP: u32 = 4u;
const PART_LOW: vec4<f32> = vec4<f32>(0x1p-24);
const PART_HIGH: vec4<f32> = vec4<f32>(0x1p-24);
