// f16 for devices without the feature, packed with two elements per word. The functions work on
// bits, because drivers may flush or round differently.
//
// Needs: half_at.
// Gives: f16_at, f16_at4, f16_of, f16_pair.

// Element o, from the word that holds it.
fn f16_at(word: u32, o: u32) -> f32 {
    return half_at(word >> (o % 2u * 16u));
}

fn f16_at4(words: vec2<u32>) -> vec4<f32> {
    return vec4<f32>(half_at(words.x), half_at(words.x >> 16u), half_at(words.y), half_at(words.y >> 16u));
}

// Rounds to nearest, ties to even. Too large numbers become infinite, and a NaN stays NaN.
fn f16_of(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let size = bits & 0x7fffffffu;
    // The offset of the exponent changes from 127 to 15.
    let normal = (size - 0x38000000u + 0xfffu + ((size >> 13u) & 1u)) >> 13u;
    // The unit in the last place of 0.5 is f16's smallest number.
    let small = bitcast<u32>(bitcast<f32>(size) + 0.5) - 0x3f000000u;
    var half = select(small, normal, size >= 0x38800000u);
    half = select(half, 0x7c00u, size >= 0x477ff000u);
    half = select(half, 0x7e00u, size > 0x7f800000u);
    return half | ((bits >> 16u) & 0x8000u);
}

fn f16_pair(x: vec2<f32>) -> u32 {
    return f16_of(x.x) | (f16_of(x.y) << 16u);
}
