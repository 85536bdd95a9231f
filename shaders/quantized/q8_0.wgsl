// 32 weights in 34 bytes, ggml's Q8_0: d in f16, then 32 signed bytes. A weight is d · q; the product is exact in f32. Every other
// block begins in the middle of a word.
//
// Needs: half_at, w_at.
// Gives: BLOCK_BYTES; block_four, block_fours, block_scales, block_shift, block_weight, block_words.

const BLOCK_BYTES: u32 = 34u;

// The four bytes from a byte on, which is a multiple of two.
fn bytes_at(byte: u32) -> u32 {
    // Without a branch, and without a word past the last.
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

// Weights k..k+4 of the block that begins at a byte; k is a multiple of four.
fn block_four(byte: u32, k: u32) -> vec4<f32> {
    return scale_at(byte) * signed_bytes(bytes_at(byte + 2u + k));
}

// Weights 4n..4n+4 and 4n+16..4n+20, n below 4.
fn block_fours(byte: u32, n: u32) -> mat2x4<f32> {
    let first = byte + 2u + 4u * n;
    return scale_at(byte) * mat2x4<f32>(signed_bytes(bytes_at(first)), signed_bytes(bytes_at(first + 16u)));
}

fn block_scales(byte: u32) -> vec2<f32> {
    return vec2<f32>(scale_at(byte), 0.0);
}

// Eight lanes take weights 4n..4n+4 and 4n+16..4n+20, four of a word n of their own and each by its shift. Nine words are read once.
fn block_words(byte: u32, lane: u32) -> vec4<u32> {
    let o = byte / 4u;
    let middle = w_at(o + 4u);
    let low = vec4<u32>(w_at(o), w_at(o + 1u), w_at(o + 2u), w_at(o + 3u));
    let high = vec4<u32>(w_at(o + 5u), w_at(o + 6u), w_at(o + 7u), w_at(o + 8u));
    let first = select(low, vec4<u32>(middle, high.xyz), lane >= 4u);
    let second = select(vec4<u32>(low.yzw, middle), high, lane >= 4u);
    return select((first >> vec4<u32>(16u)) | (second << vec4<u32>(16u)), second, byte % 4u != 0u);
}

fn block_shift(lane: u32) -> u32 {
    return 24u - lane % 4u * 8u;
}

fn block_weight(scales: vec2<f32>, word: u32, shift: u32) -> f32 {
    return scales.x * f32(bitcast<i32>(word << shift) >> 24u);
}
