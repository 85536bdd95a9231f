// Words that hold several channels, in caches and in tensors of F16 and BF16.
//
// STORAGE_KIND is F32, F16, BF16, Q8 or Q4. A vector of four words has VECTORS vectors of four
// channels. A word of Q4 has eight channels. The low bits of byte n hold channel n, the high bits
// hold channel n + 4. Each is plus 8.
//
// Needs: BF16, F16, F32, Q4, Q8, SCALED, STORAGE_KIND, VECTORS; Source; k_scale, k_word, v_scale,
// v_word.
// Gives: BIAS, CHANNELS; k_four, unpacked, unpacked_all, v_four.

const CHANNELS: u32 = VECTORS * 4u;
// The bias that is subtracted from `unpacked`.
const BIAS: f32 = select(select(0.0, 128.0, STORAGE_KIND == Q8), 8.0, STORAGE_KIND == Q4);

// The i-th four channels of a vector of words, plus BIAS. With the bias, bytes convert in few
// instructions.
fn unpacked(word: vec4<u32>, i: u32) -> vec4<f32> {
    if STORAGE_KIND == F32 {
        return bitcast<vec4<f32>>(word);
    } else if STORAGE_KIND == F16 {
        return vec4<f32>(unpack2x16float(word[2u * i % 4u]), unpack2x16float(word[2u * i % 4u + 1u]));
    } else if STORAGE_KIND == BF16 {
        let pairs = vec2<u32>(word[2u * i % 4u], word[2u * i % 4u + 1u]);
        return bitcast<vec4<f32>>((pairs.xxyy << vec4<u32>(16u, 0u, 16u, 0u)) & vec4<u32>(0xffff0000u));
    } else if STORAGE_KIND == Q8 {
        return vec4<f32>(unpack4xU8(word[i % 4u] ^ 0x80808080u));
    } else {
        return vec4<f32>(unpack4xU8((word[i / 2u % 4u] >> (i % 2u * 4u)) & 0x0f0f0f0fu));
    }
}

// All channels of a vector of words.
fn unpacked_all(word: vec4<u32>) -> array<vec4<f32>, VECTORS> {
    var x: array<vec4<f32>, VECTORS>;
    /* unrolled */ for (var i = 0u; i < VECTORS; i++) {
        if SCALED {
            // Shifts numbers up and down with their signs.
            let n = select(word[i % 4u], word[i / 2u % 4u] ^ 0x88888888u, STORAGE_KIND == Q4);
            let up = select(vec4<u32>(24u, 16u, 8u, 0u), vec4<u32>(28u, 20u, 12u, 4u) - i % 2u * 4u, STORAGE_KIND == Q4);
            x[i] = vec4<f32>((vec4<i32>(i32(n)) << up) >> vec4<u32>(select(24u, 28u, STORAGE_KIND == Q4)));
        } else {
            x[i] = unpacked(word, i);
        }
    }
    return x;
}

// Four channels from d on, scaled.
fn k_four(s: Source, row: u32, d: u32) -> vec4<f32> {
    let n = d / CHANNELS;
    return (unpacked(k_word(s, row, n), d / 4u % VECTORS) - BIAS) * k_scale(s, row, n);
}

fn v_four(s: Source, row: u32, from_col: u32) -> vec4<f32> {
    let d = s.col + from_col;
    let n = d / CHANNELS;
    return (unpacked(v_word(s, row, n), d / 4u % VECTORS) - BIAS) * v_scale(s, row, n);
}
