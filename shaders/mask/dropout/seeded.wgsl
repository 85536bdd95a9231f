// Philox 4x32-10 (Salmon et al. 2011): the same words as mask/reference.rs.
//
// Needs: p.dropout_scale, p.dropout_threshold, p.heads, p.seed.
// Gives: apply_dropout.

// Returns the high and the low word of a · b.
fn multiply_wide(a: u32, b: u32) -> vec2<u32> {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let mid1 = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let mid2 = (a & 0xffffu) * (b >> 16u) + (mid1 & 0xffffu);
    return vec2<u32>((a >> 16u) * (b >> 16u) + (mid1 >> 16u) + (mid2 >> 16u), a * b);
}

fn philox(start: vec4<u32>, seed: vec2<u32>) -> vec4<u32> {
    var c = start;
    var key = seed;
    for (var round = 0u; round < 10u; round++) {
        let m0 = multiply_wide(c.x, 0xD2511F53u);
        let m1 = multiply_wide(c.z, 0xCD9E8D57u);
        c = vec4<u32>(m1.x ^ c.y ^ key.x, m1.y, m0.x ^ c.w ^ key.y, m0.y);
        key += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
}

fn apply_dropout(weight: f32, b: u32, h: u32, i: u32, j: u32) -> f32 {
    let words = philox(vec4<u32>(j / 4u, i, b * p.heads + h, 0u), p.seed);
    return select(0.0, weight * p.dropout_scale, words[j % 4u] >= p.dropout_threshold);
}
