// 32 weights in 20 bytes, ggml's Q4_1: d and m in f16, then 16 bytes. The lower four bits of byte j
// are weight j, the upper four bits weight j + 16. A weight is d · q + m, with q from 0 to 15. The
// product is exact in f32.
//
// Needs: half_at, w_at.
// Gives: BLOCK_BYTES; block_four, block_fours.

const BLOCK_BYTES: u32 = 20u;

// Weights k..k+4 of the block that starts at `byte`; k is a multiple of four.
fn block_four(byte: u32, k: u32) -> vec4<f32> {
    let o = byte / 4u;
    let scales = w_at(o);
    let word = w_at(o + 1u + k % 16u / 4u) >> (k / 16u * 4u);
    return half_at(scales) * vec4<f32>(unpack4xU8(word & 0x0f0f0f0fu)) + half_at(scales >> 16u);
}

// Weights 4n..4n+4 and 4n+16..4n+20, n below 4.
fn block_fours(byte: u32, n: u32) -> mat2x4<f32> {
    let o = byte / 4u;
    let scales = w_at(o);
    let word = w_at(o + 1u + n);
    let d = half_at(scales);
    let m = half_at(scales >> 16u);
    return mat2x4<f32>(
        d * vec4<f32>(unpack4xU8(word & 0x0f0f0f0fu)) + m,
        d * vec4<f32>(unpack4xU8((word >> 4u) & 0x0f0f0f0fu)) + m,
    );
}
