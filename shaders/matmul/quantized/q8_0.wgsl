// 32 weights in 34 bytes, ggml's Q8_0: d in f16, then 32 signed bytes. A weight is d · q, which is
// exact in f32. Every second block starts in the middle of a word.
//
// Needs: half_at, w_at.
// Gives: BLOCK_BYTES; block_four, block_fours.

const BLOCK_BYTES: u32 = 34u;

// The four bytes from `byte` on, which is a multiple of two.
fn bytes_at(byte: u32) -> u32 {
    // There is no branch, and no load past the last word.
    let o = byte / 4u;
    let half = byte % 4u / 2u;
    let first = w_at(o);
    return select(first, (first >> 16u) | (w_at(o + half) << 16u), half == 1u);
}

fn scale_at(byte: u32) -> f32 {
    return half_at(w_at(byte / 4u) >> (byte % 4u * 8u));
}

fn signed_bytes(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(word ^ 0x80808080u)) - 128.0;
}

// Weights k..k+4 of the block that starts at `byte`; k is a multiple of four.
fn block_four(byte: u32, k: u32) -> vec4<f32> {
    return scale_at(byte) * signed_bytes(bytes_at(byte + 2u + k));
}

// Weights 4n..4n+4 and 4n+16..4n+20, n below 4.
fn block_fours(byte: u32, n: u32) -> mat2x4<f32> {
    let first = byte + 2u + 4u * n;
    return scale_at(byte) * mat2x4<f32>(signed_bytes(bytes_at(first)), signed_bytes(bytes_at(first + 16u)));
}
