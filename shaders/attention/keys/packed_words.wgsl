// Words that hold several channels, in caches and in tensors of F16 and BF16.
//
// K_STORAGE and V_STORAGE are storages of storage.wgsl. A vector of four words has K_VECTORS or
// V_VECTORS vectors of four channels. A word of four bits has eight channels. The low bits of byte
// n hold channel n, the high bits hold channel n + 4. Q4 stores levels plus 8.
//
// Needs: BF16, E4M3, E4M3_FIRST, E4M3_SHIFT, E5M2, E5M2_FIRST, E5M2_SHIFT, F16, F32, GAUSSIAN4,
// K_STORAGE, K_VECTORS, Q4, Q8, V_STORAGE, V_VECTORS; Source; gaussian_levels, k_scale, k_word,
// v_scale, v_word.
// Gives: K_BIAS, K_CHANNELS, K_SCALED, V_BIAS, V_CHANNELS, V_SCALED; k_four, unpacked,
// unpacked_exactly, v_four.

const K_CHANNELS: u32 = K_VECTORS * 4u;
const V_CHANNELS: u32 = V_VECTORS * 4u;
// True if channels share scales.
const K_SCALED: bool = K_STORAGE >= Q8;
const V_SCALED: bool = V_STORAGE >= Q8;
// The bias that is subtracted from `unpacked`.
const K_BIAS: f32 = select(select(0.0, 128.0, K_STORAGE == Q8), 8.0, K_STORAGE == Q4);
const V_BIAS: f32 = select(select(0.0, 128.0, V_STORAGE == Q8), 8.0, V_STORAGE == Q4);

// The numbers of floats of eight bits. The arguments shift and first are constants of the format.
fn small_floats(bits: vec4<u32>, shift: u32, first: u32) -> vec4<f32> {
    let size = (bits & vec4<u32>(0x7fu)) << vec4<u32>(shift);
    let normal = bitcast<vec4<f32>>(size + first);
    let subnormal = 2.0 * (normal - bitcast<f32>(first));
    let x = select(normal, subnormal, size < vec4<u32>(0x800000u));
    return select(x, -x, bits >= vec4<u32>(0x80u));
}

// The i-th four channels of a vector of words, plus the bias. With the bias, bytes convert in few
// instructions.
fn unpacked(storage: u32, word: vec4<u32>, i: u32) -> vec4<f32> {
    if storage == F32 {
        return bitcast<vec4<f32>>(word);
    } else if storage == F16 {
        return vec4<f32>(unpack2x16float(word[2u * i % 4u]), unpack2x16float(word[2u * i % 4u + 1u]));
    } else if storage == BF16 {
        let pairs = vec2<u32>(word[2u * i % 4u], word[2u * i % 4u + 1u]);
        return bitcast<vec4<f32>>((pairs.xxyy << vec4<u32>(16u, 0u, 16u, 0u)) & vec4<u32>(0xffff0000u));
    } else if storage == Q8 {
        return vec4<f32>(unpack4xU8(word[i % 4u] ^ 0x80808080u));
    } else if storage == E4M3 {
        return small_floats(unpack4xU8(word[i % 4u]), E4M3_SHIFT, E4M3_FIRST);
    } else if storage == E5M2 {
        return small_floats(unpack4xU8(word[i % 4u]), E5M2_SHIFT, E5M2_FIRST);
    } else {
        let x = vec4<f32>(unpack4xU8((word[i / 2u % 4u] >> (i % 2u * 4u)) & 0x0f0f0f0fu));
        if storage == GAUSSIAN4 {
            return gaussian_levels(x);
        } else {
            return x;
        }
    }
}

// The same without the bias.
fn unpacked_exactly(storage: u32, word: vec4<u32>, i: u32) -> vec4<f32> {
    if storage == Q8 || storage == Q4 {
        // Shifts numbers up and down with their signs.
        let n = select(word[i % 4u], word[i / 2u % 4u] ^ 0x88888888u, storage == Q4);
        let up = select(vec4<u32>(24u, 16u, 8u, 0u), vec4<u32>(28u, 20u, 12u, 4u) - i % 2u * 4u, storage == Q4);
        return vec4<f32>((vec4<i32>(i32(n)) << up) >> vec4<u32>(select(24u, 28u, storage == Q4)));
    } else {
        return unpacked(storage, word, i);
    }
}

// Four channels from d on, scaled.
fn k_four(s: Source, row: u32, d: u32) -> vec4<f32> {
    let n = d / K_CHANNELS;
    return (unpacked(K_STORAGE, k_word(s, row, n), d / 4u % K_VECTORS) - K_BIAS) * k_scale(s, row, n);
}

fn v_four(s: Source, row: u32, from_col: u32) -> vec4<f32> {
    let d = s.col + from_col;
    let n = d / V_CHANNELS;
    return (unpacked(V_STORAGE, v_word(s, row, n), d / 4u % V_VECTORS) - V_BIAS) * v_scale(s, row, n);
}
