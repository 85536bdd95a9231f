// bf16, the upper 16 bits of an f32, with two elements per word. The functions work on bits, so
// that drivers cannot flush or round differently.
//
// Needs: nothing.
// Gives: bf16_at, bf16_at4, bf16_of, bf16_pair.

// Element o, from the word that holds it.
fn bf16_at(word: u32, o: u32) -> f32 {
    return bitcast<f32>(select(word << 16u, word & 0xffff0000u, o % 2u == 1u));
}

fn bf16_at4(words: vec2<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>((words.xxyy << vec4<u32>(16u, 0u, 16u, 0u)) & vec4<u32>(0xffff0000u));
}

// Rounds to nearest, ties to even. Too large numbers become infinite, and a NaN stays NaN.
fn bf16_of(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let rounded = (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
    return select(rounded, (bits >> 16u) | 0x40u, (bits & 0x7fffffffu) > 0x7f800000u);
}

fn bf16_pair(x: vec2<f32>) -> u32 {
    return bf16_of(x.x) | (bf16_of(x.y) << 16u);
}
