// Keys and values in a cache: which row a key is in, and four of its channels.
//
// FORMAT: F32, F16, Q8 or Q4. Eight channels of Q4 are a word: its byte n holds channel n below and channel n + 4 above,
// each plus 8. K_GROUP, V_GROUP: channels that share a scale. Past the last channel rows hold zeros, as far as their
// vectors go.

const F32: u32 = 0u;
const F16: u32 = 1u;
const Q8: u32 = 2u;
const Q4: u32 = 3u;
const SCALED: bool = FORMAT >= Q8;
const CHANNELS: array<u32, 4> = array<u32, 4>(1u, 2u, 4u, 8u);
const PER_WORD: u32 = CHANNELS[FORMAT];

struct Source {
    b: u32,
    kv_head: u32,
    shift: u32,
    col: u32,
}

fn k_source(b: u32, kv_head: u32) -> Source {
    return Source(b, kv_head, cached_shift(b), 0u);
}

fn v_source(b: u32, kv_head: u32, col: u32) -> Source {
    return Source(b, kv_head, cached_shift(b), col);
}

fn row_of(s: Source, t: u32) -> u32 {
    return cached_row(s.b, s.kv_head, cached_key(t, s.shift));
}

// Channels d .. d + 4 of what a word holds, of F16 with the next word.
fn unpacked(word: u32, next: u32, d: u32) -> vec4<f32> {
    if FORMAT == F16 {
        return vec4<f32>(unpack2x16float(word), unpack2x16float(next));
    }
    if FORMAT == Q8 {
        return vec4<f32>(unpack4xI8(word));
    }
    return vec4<f32>(unpack4xU8((word >> (d / 4u % 2u * 4u)) & 0x0f0f0f0fu)) - 8.0;
}

fn k_scale(row: u32, d: u32) -> f32 {
    let o = p.cache.k_scales + row * p.cache.k_groups + d / K_GROUP;
    return bitcast<f32>(cache_k[o / 4u][o % 4u]);
}

fn v_scale(row: u32, d: u32) -> f32 {
    let o = p.cache.v_scales + row * p.cache.v_groups + d / V_GROUP;
    return bitcast<f32>(cache_v[o / 4u][o % 4u]);
}

fn k_four(s: Source, row: u32, d: u32) -> vec4<f32> {
    // Not negative as an i32: see shared/keys_tensors.wgsl.
    let o = (row * p.cache.k_words & 0x3ffffffcu) + d / PER_WORD;
    if FORMAT == F32 {
        return bitcast<vec4<f32>>(cache_k[o / 4u]);
    }
    let next = o + select(0u, 1u, FORMAT == F16);
    let x = unpacked(cache_k[o / 4u][o % 4u], cache_k[next / 4u][next % 4u], d);
    if SCALED {
        return x * k_scale(row, d);
    }
    return x;
}

fn v_four(s: Source, row: u32, from_col: u32) -> vec4<f32> {
    let d = s.col + from_col;
    let o = (row * p.cache.v_words & 0x3ffffffcu) + d / PER_WORD;
    if FORMAT == F32 {
        return bitcast<vec4<f32>>(cache_v[o / 4u]);
    }
    let next = o + select(0u, 1u, FORMAT == F16);
    let x = unpacked(cache_v[o / 4u][o % 4u], cache_v[next / 4u][next % 4u], d);
    if SCALED {
        return x * v_scale(row, d);
    }
    return x;
}
