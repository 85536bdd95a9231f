// Writes keys and values into a cache, in the cache's format. The rows are the tokens of the last
// advance. With OVERWRITES they replace existing positions; rows for other positions are dropped
// and count as refused.
//
// k [batch, kv_heads, rows, head_dim]   v [batch, kv_heads, rows, value_dim]
//
// An invocation writes a unit: channels of one row that share a scale, or 32 channels without
// scales. A unit has whole words: two invocations that wrote parts of one word would race.
// Floor: k and v are read once (scaled: twice, the second time from the GPU's cache). Every word is
// written once.
//
// Bindings (declared by the host): k, v, cache_k, cache_v, sequence_table; rotation_table if keys
// are rotated; positions if HAS_POSITIONS.

const MOST: f32 = select(7.0, 127.0, STORAGE_KIND == Q8);

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

fn level(x: f32, scale: f32) -> i32 {
    return i32(clamp(round(x / scale), -MOST, MOST));
}

fn word_of(r: Row, d: u32, scale: f32) -> u32 {
    if STORAGE_KIND == F32 {
        return bitcast<u32>(channel(r, d));
    } else if STORAGE_KIND == F16 {
        return half_of(channel(r, d)) | (half_of(channel(r, d + 1u)) << 16u);
    } else if STORAGE_KIND == BF16 {
        return bf16_pair(vec2<f32>(channel(r, d), channel(r, d + 1u)));
    } else {
        var word = 0u;
        for (var c = 0u; c < PER_WORD; c++) {
            let n = level(channel(r, d + c), scale);
            if STORAGE_KIND == Q8 {
                word |= (u32(n) & 0xffu) << (c * 8u);
            } else {
                word |= u32(n + 8) << (c % 4u * 8u + c / 4u * 4u);
            }
        }
        return word;
    }
}

// size: channels of a unit; words, groups: numbers in a row; scales: the word at which they begin.
fn write_unit(r: Row, row: u32, unit: u32, size: u32, words: u32, groups: u32, scales: u32) {
    let first = unit * size;
    let end = min(first + size, words * PER_WORD);
    var scale = 1.0;
    if SCALED {
        var most = 0.0;
        var finite = true;
        for (var d = first; d < end; d++) {
            let x = abs(channel(r, d));
            // This tests the bits, because max may lose a NaN.
            finite = finite && bitcast<u32>(x) < 0x7f800000u;
            most = max(most, x);
        }
        // A group of zeros may have any scale. If the scale is NaN, the levels do not matter.
        scale = select(most / MOST, 1.0, most / MOST < 1.1754943508222875e-38);
        let stored = select(0x7fc00000u, bitcast<u32>(scale), finite);
        scale = select(1.0, scale, finite);
        store_word(r, scales + row * groups + unit, stored);
    }
    for (var d = first; d < end; d += PER_WORD) {
        store_word(r, row * words + d / PER_WORD, word_of(r, d, scale));
    }
}

// Counts one refusal of a sequence if a row has a position that does not exist. One invocation does
// this.
fn count_refused(b: u32) {
    var i = 0u;
    while i < p.rows && is_kept(b, position_of(p.at, b, 0u, i)) {
        i++;
    }
    if i < p.rows {
        let o = b * WORDS + REFUSED;
        sequence_table_store(o, sequence_table_at(o) + 1u);
    }
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    let i = group.y;
    let units = p.k_units + p.v_units;
    let n = group.x * 64u + lane;
    let h = n / units;
    if h >= p.cache.kv_heads {
        return;
    }
    var position: u32;
    if OVERWRITES {
        if n == 0u && i == 0u {
            count_refused(b);
        }
        position = position_of(p.at, b, 0u, i);
        if !is_kept(b, position) {
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
    let row = row_of_position(rows_of(b, h), position);
    let unit = n % units;
    if unit < p.k_units {
        let r = Row(true, b, h, i, position, p.head_dim);
        write_unit(r, row, unit, K_UNIT, p.cache.k_words, p.cache.k_groups, p.cache.k_scales);
    } else {
        let r = Row(false, b, h, i, position, p.value_dim);
        write_unit(r, row, unit - p.k_units, V_UNIT, p.cache.v_words, p.cache.v_groups, p.cache.v_scales);
    }
}
