// Writes keys and values into a cache, in the cache's format. The rows are the tokens of the last
// advance. With OVERWRITES they replace existing positions; rows for other positions are dropped
// and count as refused.
//
// k [batch, kv_heads, rows, head_dim]   v [batch, kv_heads, rows, value_dim]
//
// With HADAMARD, each block of p.hadamard_block channels is multiplied by a Walsh-Hadamard matrix
// first (`hadamard.wgsl`).
//
// With COMPACTS, the position of a token follows the scales of its key.
//
// With HAS_Q, the kernel also rotates q [batch, heads, rows, head_dim] in place. Rows of q have the
// positions of the rows of k. Each pair has an invocation.
//
// An invocation writes a unit: channels of one row that share a scale, or 32 channels without
// scales. A unit has whole words: two invocations that wrote parts of one word would race.
//
// Floor: k and v are read once (scaled: twice, the second time from the GPU's cache). With
// HADAMARD, caches give each channel p.hadamard_block / 32 times as often. Every word is written
// once.
//
// Bindings (declared by the host): k, v, cache_k, cache_v, sequence_table. If keys are rotated,
// rotation_table. If HAS_POSITIONS, positions. If HAS_Q, q.

const SCALED: bool = STORAGE >= Q8;
// The largest number of a group: its channel of the largest magnitude, over its scale.
const MOST: f32 = array<f32, 8>(1.0, 1.0, 1.0, 127.0, 448.0, 57344.0, 7.0, 1.0)[STORAGE];

// One row of keys or of values.
struct Row {
    is_key: bool,
    b: u32,
    h: u32,
    i: u32,
    position: u32,
    dim: u32,
}

// Returns a channel, or 0 past the last channel.
fn channel(r: Row, d: u32) -> f32 {
    if d >= r.dim {
        return 0.0;
    } else if !r.is_key {
        return v_at(view_at(p.v, r.b, r.h, r.i, d));
    } else if HAS_ROTATION_TABLE && d < p.rotation.rotary_dim {
        let t = p.rotation;
        let o = view_at(p.k, r.b, r.h, r.i, 0u);
        let stride = p.k.strides.w;
        let pair = select(d / 2u, d % t.pairs, t.order == ORDER_HALF);
        let pick = pair_channels(t, pair);
        let x = vec2<f32>(k_at(o + pick.x * stride), k_at(o + pick.y * stride));
        let y = rotated(x, rotation(t, pair, r.position));
        return select(y.x, y.y, d == pick.y);
    } else {
        return k_at(view_at(p.k, r.b, r.h, r.i, d));
    }
}

fn store_word(r: Row, o: u32, word: u32) {
    if r.is_key {
        cache_k_store(o, word);
    } else {
        cache_v_store(o, word);
    }
}

// Returns the f16 bits of x. The driver rounds. Finite values stay finite, and other values stay
// infinite or NaN.
fn half_of(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if (bits & 0x7fffffffu) >= 0x7f800000u {
        return ((bits >> 16u) & 0x8000u) | select(0x7e00u, 0x7c00u, (bits & 0x7fffffu) == 0u);
    } else {
        return pack2x16float(vec2<f32>(clamp(x, -65504.0, 65504.0), 0.0)) & 0xffffu;
    }
}

// Returns the nearest float of eight bits, ties to even. The arguments shift and first are
// constants of the format. The smallest subnormal number is step. The largest number is most.
fn small_float(x: f32, shift: u32, first: u32, step: f32, most: f32) -> u32 {
    let size = min(abs(x), most);
    let bits = bitcast<u32>(size);
    let odd = (bits >> shift) & 1u;
    let normal = ((bits + (1u << (shift - 1u)) - 1u + odd) >> shift) - (first >> shift);
    let subnormal = u32(round(size / step));
    let sign = (bitcast<u32>(x) >> 24u) & 0x80u;
    return sign | select(normal, subnormal, bits < first + 0x800000u);
}

// The number of the level nearest to x among the levels of GAUSSIAN4.
fn gaussian_number(x: f32) -> u32 {
    var n = 0u;
    for (var i = 0u; i < 15u; i++) {
        let levels = gaussian_levels(f32(i) + vec4<f32>(0.0, 1.0, 0.0, 0.0));
        n += select(0u, 1u, x > 0.5 * (levels.x + levels.y));
    }
    return n;
}

// The bits that stand for x. GGML rounds halves away from zero in 8 bits, and up in 4 bits.
fn code_of(x: f32, scale: f32) -> u32 {
    if STORAGE == E4M3 {
        return small_float(x / scale, E4M3_SHIFT, E4M3_FIRST, 0x1p-9, MOST);
    } else if STORAGE == E5M2 {
        return small_float(x / scale, E5M2_SHIFT, E5M2_FIRST, 0x1p-16, MOST);
    } else if STORAGE == GAUSSIAN4 {
        return gaussian_number(x * select(1.0 / scale, 0.0, scale == 0.0));
    } else if GGML {
        let y = x * select(1.0 / scale, 0.0, scale == 0.0);
        if STORAGE == Q4 {
            return min(u32(y + 8.5), 15u);
        } else {
            let size = trunc(abs(y));
            return bitcast<u32>(i32(sign(y) * (size + select(0.0, 1.0, abs(y) - size >= 0.5)))) & 0xffu;
        }
    } else {
        let level = i32(clamp(round(x / scale), -MOST, MOST));
        return bitcast<u32>(level + select(0, 8, STORAGE == Q4)) & 0xffu;
    }
}

// The facts that a scale depends on. peak is the channel with the largest magnitude, the first of
// equals. For GAUSSIAN4, squares is the sum of squares over peak². It cannot overflow.
struct Group {
    peak: f32,
    squares: f32,
    finite: bool,
}

fn with_channel(g: Group, x: f32) -> Group {
    let peak = select(g.peak, x, abs(x) > abs(g.peak));
    var squares = 0.0;
    if STORAGE == GAUSSIAN4 && peak != 0.0 {
        let before = g.peak / peak;
        let part = x / peak;
        squares = g.squares * before * before + part * part;
    }
    return Group(peak, squares, g.finite);
}

fn with_four(g: Group, x: vec4<f32>) -> Group {
    let y = with_channel(with_channel(with_channel(with_channel(g, x.x), x.y), x.z), x.w);
    return Group(y.peak, y.squares, g.finite && all_finite(x));
}

// The scale of a group of `count` channels. A group of zeros may have any scale.
fn scale_of(g: Group, count: u32) -> f32 {
    if STORAGE == GAUSSIAN4 {
        let scale = abs(g.peak) * sqrt(g.squares / f32(count));
        return select(scale, 0.0, scale < 1.1754943508222875e-38);
    } else if GGML {
        let scale = select(abs(g.peak) / 127.0, g.peak / -8.0, STORAGE == Q4);
        return select(scale, 0.0, abs(scale) < 1.1754943508222875e-38);
    } else {
        let scale = abs(g.peak) / MOST;
        return select(scale, 1.0, scale < 1.1754943508222875e-38);
    }
}

// The stored bits of a scale. GGML rounds it to f16, to the nearest, ties to even. It works on
// bits, because drivers may flush small numbers.
fn stored_scale(scale: f32) -> u32 {
    if GGML {
        let bits = bitcast<u32>(scale);
        let size = bits & 0x7fffffffu;
        let near = min((size + 0xfffu + ((size >> 13u) & 1u)) & 0xffffe000u, 0x477fe000u);
        let small = bitcast<u32>(round(abs(scale) * 0x1p24) * 0x1p-24);
        return (bits & 0x80000000u) | select(near, small, size < 0x38800000u);
    } else {
        return bitcast<u32>(scale);
    }
}

fn half_pair(x: vec2<f32>) -> u32 {
    return half_of(x.x) | (half_of(x.y) << 16u);
}

// Four channels as bytes.
fn bytes_of(x: vec4<f32>, scale: f32) -> u32 {
    return code_of(x.x, scale) | (code_of(x.y, scale) << 8u) | (code_of(x.z, scale) << 16u) | (code_of(x.w, scale) << 24u);
}

// Four channels from d on, and zeros past the last channel. A kernel with HADAMARD has up to 32
// copies of it. With four copies of `channel` in each, SwiftShader compiles for minutes.
fn channels(r: Row, d: u32) -> vec4<f32> {
    if HAS_ROTATION_TABLE && r.is_key && d < p.rotation.rotary_dim {
        return vec4<f32>(channel(r, d), channel(r, d + 1u), channel(r, d + 2u), channel(r, d + 3u));
    } else {
        let first = min(d, r.dim - 1u);
        let count = min(r.dim - first, 4u);
        var x: vec4<f32>;
        if r.is_key {
            x = k_at4(view_at(p.k, r.b, r.h, r.i, first), p.k.strides.w, count);
        } else {
            x = v_at4(view_at(p.v, r.b, r.h, r.i, first), p.v.strides.w, count);
        }
        return select(vec4<f32>(), x, d < r.dim);
    }
}

fn word_of(r: Row, d: u32, scale: f32) -> u32 {
    if STORAGE == F32 {
        return bitcast<u32>(channel(r, d));
    } else if STORAGE == F16 {
        return half_pair(vec2<f32>(channel(r, d), channel(r, d + 1u)));
    } else if STORAGE == BF16 {
        return bf16_pair(vec2<f32>(channel(r, d), channel(r, d + 1u)));
    } else if PER_WORD == 4u {
        return bytes_of(channels(r, d), scale);
    } else {
        return bytes_of(channels(r, d), scale) | (bytes_of(channels(r, d + 4u), scale) << 4u);
    }
}

// Stores the n-th eight of 32 channels, whose words begin at o.
fn store_eight(r: Row, o: u32, n: u32, x: vec4<f32>, y: vec4<f32>, scale: f32) {
    if STORAGE == F32 {
        for (var c = 0u; c < 4u; c++) {
            store_word(r, o + 8u * n + c, bitcast<u32>(component(x, c)));
            store_word(r, o + 8u * n + 4u + c, bitcast<u32>(component(y, c)));
        }
    } else if STORAGE == F16 {
        store_word(r, o + 4u * n, half_pair(x.xy));
        store_word(r, o + 4u * n + 1u, half_pair(x.zw));
        store_word(r, o + 4u * n + 2u, half_pair(y.xy));
        store_word(r, o + 4u * n + 3u, half_pair(y.zw));
    } else if STORAGE == BF16 {
        store_word(r, o + 4u * n, bf16_pair(x.xy));
        store_word(r, o + 4u * n + 1u, bf16_pair(x.zw));
        store_word(r, o + 4u * n + 2u, bf16_pair(y.xy));
        store_word(r, o + 4u * n + 3u, bf16_pair(y.zw));
    } else if PER_WORD == 4u {
        store_word(r, o + 2u * n, bytes_of(x, scale));
        store_word(r, o + 2u * n + 1u, bytes_of(y, scale));
    } else {
        store_word(r, o + n, bytes_of(x, scale) | (bytes_of(y, scale) << 4u));
    }
}

// 32 channels from d on, after the product with the matrix. The channels of the block are added in
// 32 sums, with the signs of these 32 channels. A transform of the sums follows.
fn hadamard_32(r: Row, d: u32) -> array<vec4<f32>, 8> {
    var x: array<vec4<f32>, 8>;
    let start = d - d % p.hadamard_block;
    for (var e = 0u; e < p.hadamard_block; e += 32u) {
        let factor = hadamard_sign(d - start, e);
        /* unrolled */ for (var n = 0u; n < 8u; n++) {
            x[n] += factor * channels(r, start + e + 4u * n);
        }
    }
    x = array<vec4<f32>, 8>(x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3], x[4] + x[5], x[4] - x[5], x[6] + x[7], x[6] - x[7]);
    x = array<vec4<f32>, 8>(x[0] + x[2], x[1] + x[3], x[0] - x[2], x[1] - x[3], x[4] + x[6], x[5] + x[7], x[4] - x[6], x[5] - x[7]);
    x = array<vec4<f32>, 8>(x[0] + x[4], x[1] + x[5], x[2] + x[6], x[3] + x[7], x[0] - x[4], x[1] - x[5], x[2] - x[6], x[3] - x[7]);
    /* unrolled */ for (var n = 0u; n < 8u; n++) {
        x[n] = hadamard_four(x[n]) * p.hadamard_scale;
    }
    return x;
}

// size: channels of a unit; words, groups: numbers in a row; scales: the word at which they begin.
fn write_unit(r: Row, row: u32, unit: u32, size: u32, words: u32, groups: u32, scales: u32) {
    let first = unit * size;
    let end = min(first + size, words * PER_WORD);
    var scale = 1.0;
    if SCALED {
        var group = Group(0.0, 0.0, true);
        if HADAMARD {
            for (var d = first; d < end; d += 32u) {
                let x = hadamard_32(r, d);
                /* unrolled */ for (var n = 0u; n < 8u; n++) {
                    group = with_four(group, x[n]);
                }
            }
        } else {
            for (var d = first; d < end; d += 4u) {
                group = with_four(group, channels(r, d));
            }
        }
        let finite = group.finite;
        // If the scale is NaN, the levels do not matter.
        scale = select(1.0, scale_of(group, min(end, r.dim) - first), finite);
        let stored = select(0x7fc00000u, stored_scale(scale), finite);
        store_word(r, scales + row * groups + unit, stored);
    }
    if HADAMARD {
        for (var d = first; d < end; d += 32u) {
            let x = hadamard_32(r, d);
            let o = row * words + d / PER_WORD;
            /* unrolled */ for (var n = 0u; n < 4u; n++) {
                store_eight(r, o, n, x[2u * n], x[2u * n + 1u], scale);
            }
        }
    } else {
        for (var d = first; d < end; d += PER_WORD) {
            store_word(r, row * words + d / PER_WORD, word_of(r, d, scale));
        }
    }
}

// Counts one refusal of a sequence if a row has a position that does not exist. One invocation does
// this.
fn count_refused(b: u32) {
    // Heads of a compacted sequence may have different tokens.
    let heads = select(1u, p.cache.kv_heads, COMPACTS);
    var n = 0u;
    while n < p.rows * heads && is_kept(b, n % heads, position_of(p.at, b, 0u, n / heads)) {
        n++;
    }
    if n < p.rows * heads {
        let o = b * WORDS + REFUSED;
        sequence_table_store(o, sequence_table_at(o) + 1u);
    }
}

// Rotates the n-th pair of channels of the queries of a row.
fn rotate_queries(b: u32, i: u32, n: u32) {
    let t = p.rotation;
    let h = n / t.pairs;
    if h >= p.q_heads {
        return;
    }
    let pair = n - h * t.pairs;
    let pick = pair_channels(t, pair);
    let first = view_at(p.q, b, h, i, pick.x);
    let second = view_at(p.q, b, h, i, pick.y);
    let y = rotated(vec2<f32>(q_at(first), q_at(second)), rotation(t, pair, cached_start(b) + i));
    q_store(first, y.x);
    q_store(second, y.y);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    let i = group.y;
    let units = p.k_units + p.v_units;
    let n = group.x * 64u + lane;
    let h = n / units;
    if h >= p.cache.kv_heads {
        if HAS_Q {
            rotate_queries(b, i, n - p.cache.kv_heads * units);
        }
        return;
    }
    var position: u32;
    if OVERWRITES {
        if n == 0u && i == 0u && p.counts_refused != 0u {
            count_refused(b);
        }
        position = position_of(p.at, b, 0u, i);
        if !is_kept(b, h, position) {
            return;
        }
    } else {
        let start = cached_start(b);
        let length = cached_len(b);
        if i >= length - start {
            return;
        }
        position = start + i;
        if LAYOUT_KIND == RING {
            // A later row of the same call writes this slot.
            if position >= p.cache.sinks && position + p.cache.window < length {
                return;
            }
        }
    }
    let rows = rows_of(b, h);
    var row = row_of_position(rows, position);
    if OVERWRITES {
        row = row_at(b, h, rows, position);
    }
    let unit = n % units;
    if unit < p.k_units {
        let r = Row(true, b, h, i, position, p.head_dim);
        if COMPACTS && !OVERWRITES && unit == 0u {
            cache_k_store(p.cache.k_scales + row * p.cache.k_groups + p.cache.k_groups - 1u, position);
        }
        write_unit(r, row, unit, K_UNIT, p.cache.k_words, p.cache.k_groups, p.cache.k_scales);
    } else {
        let r = Row(false, b, h, i, position, p.value_dim);
        write_unit(r, row, unit - p.k_units, V_UNIT, p.cache.v_words, p.cache.v_groups, p.cache.v_scales);
    }
}
