// Keys and values in a cache: which row a key is in, what its words hold.
//
// FORMAT: F32, F16, Q8 or Q4; a vector of four words has VECTORS vectors of four channels. Eight channels of Q4 are a
// word: its byte n holds channel n below and channel n + 4 above, each plus 8. K_GROUP, V_GROUP: channels that share a
// scale. Past the last channel rows hold zeros, as far as their vectors go.

const F32: u32 = 0u;
const F16: u32 = 1u;
const Q8: u32 = 2u;
const Q4: u32 = 3u;
const SCALED: bool = FORMAT >= Q8;
const CHANNELS: u32 = VECTORS * 4u;
// What is to be taken from `unpacked`.
const BIAS: f32 = select(select(0.0, 128.0, FORMAT == Q8), 8.0, FORMAT == Q4);

// The keys or the values of one sequence and head. vectors, groups: of a row; col: the first channel.
struct Source {
    rows: Rows,
    vectors: u32,
    groups: u32,
    scales: u32,
    col: u32,
}

fn k_source(b: u32, kv_head: u32) -> Source {
    return Source(rows_of(b, kv_head), p.cache.k_words / 4u, p.cache.k_groups, p.cache.k_scales, 0u);
}

fn v_source(b: u32, kv_head: u32, col: u32) -> Source {
    return Source(rows_of(b, kv_head), p.cache.v_words / 4u, p.cache.v_groups, p.cache.v_scales, col);
}

fn row_of(s: Source, t: u32) -> u32 {
    return row_of_token(s.rows, t);
}

// The first vector of a row. Not negative in bytes, as an i32: that saves a check per load.
fn first_of(s: Source, row: u32) -> u32 {
    return (row * s.vectors) & 0x03ffffffu;
}

fn k_word(s: Source, row: u32, n: u32) -> vec4<u32> {
    return cache_k[first_of(s, row) + n];
}

fn v_word(s: Source, row: u32, n: u32) -> vec4<u32> {
    return cache_v[first_of(s, row) + n];
}

// What the channels of a row's n-th vector are to be multiplied by.
fn k_scale(s: Source, row: u32, n: u32) -> f32 {
    if !SCALED {
        return 1.0;
    }
    let o = (s.scales + row * s.groups + n * CHANNELS / K_GROUP) & 0x0fffffffu;
    return bitcast<f32>(cache_k[o / 4u][o % 4u]);
}

fn v_scale(s: Source, row: u32, n: u32) -> f32 {
    if !SCALED {
        return 1.0;
    }
    let o = (s.scales + row * s.groups + n * CHANNELS / V_GROUP) & 0x0fffffffu;
    return bitcast<f32>(cache_v[o / 4u][o % 4u]);
}

// The i-th four channels of a vector of words, plus BIAS: few instructions where bytes are converted as they are.
fn unpacked(word: vec4<u32>, i: u32) -> vec4<f32> {
    if FORMAT == F32 {
        return bitcast<vec4<f32>>(word);
    }
    if FORMAT == F16 {
        return vec4<f32>(unpack2x16float(word[2u * i % 4u]), unpack2x16float(word[2u * i % 4u + 1u]));
    }
    if FORMAT == Q8 {
        return vec4<f32>(unpack4xU8(word[i % 4u] ^ 0x80808080u));
    }
    return vec4<f32>(unpack4xU8((word[i / 2u % 4u] >> (i % 2u * 4u)) & 0x0f0f0f0fu));
}

// All channels of a vector of words.
fn opened(word: vec4<u32>) -> array<vec4<f32>, VECTORS> {
    var x: array<vec4<f32>, VECTORS>;
    for (var i = 0u; i < VECTORS; i++) {
        if SCALED {
            // Shifted up and down with their signs.
            let n = select(word[i % 4u], word[i / 2u % 4u] ^ 0x88888888u, FORMAT == Q4);
            let up = select(vec4<u32>(24u, 16u, 8u, 0u), vec4<u32>(28u, 20u, 12u, 4u) - i % 2u * 4u, FORMAT == Q4);
            x[i] = vec4<f32>((vec4<i32>(i32(n)) << up) >> vec4<u32>(select(24u, 28u, FORMAT == Q4)));
        } else {
            x[i] = unpacked(word, i);
        }
    }
    return x;
}

// From channel d on, scaled.
fn k_four(s: Source, row: u32, d: u32) -> vec4<f32> {
    let n = d / CHANNELS;
    return (unpacked(k_word(s, row, n), d / 4u % VECTORS) - BIAS) * k_scale(s, row, n);
}

fn v_four(s: Source, row: u32, from_col: u32) -> vec4<f32> {
    let d = s.col + from_col;
    let n = d / CHANNELS;
    return (unpacked(v_word(s, row, n), d / 4u % VECTORS) - BIAS) * v_scale(s, row, n);
}
