// Keys and values in tensors: the start of a row, and four of its channels.
//
// Needs: p.head_dim, p.k, p.v, p.value_dim; IN_FOURS, WIDE; View; k_at4, key_batch, key_head,
// list_of, listed, v_at4, view_at.
// Gives: K_BIAS, K_SCALED, K_STORAGE, V_BIAS, V_SCALED, V_STORAGE; Source; k_four, k_scale,
// k_source, k_word, key_row, run_step, unpacked, v_four, v_scale, v_source, v_word.

// Tells the compiler that an index is not negative as an i32, which saves a check per load. With
// vec4 loads, it also tells that the index is aligned. WIDE: indices reach 2^28.
const INDEX: u32 = select(0xffffffffu, select(0x0fffffffu, 0x0ffffffcu, IN_FOURS), !WIDE);

// The rows of one sequence and head. unit is the stride of channels, col the first channel. If the
// call has lists, list is the list of a query's keys.
struct Source {
    base: u32,
    step: u32,
    unit: u32,
    col: u32,
    list: u32,
}

fn source(v: View, b: u32, kv_head: u32, col: u32) -> Source {
    let unit = select(v.strides.w, 1u, IN_FOURS);
    let base = view_at(v, key_batch(b), key_head(kv_head), 0u, 0u);
    return Source(base + col * unit, v.strides.z, unit, col, list_of(b, kv_head));
}

fn k_source(b: u32, kv_head: u32) -> Source {
    return source(p.k, b, kv_head, 0u);
}

fn v_source(b: u32, kv_head: u32, col: u32) -> Source {
    return source(p.v, b, kv_head, col);
}

fn key_row(s: Source, j: u32) -> u32 {
    return (s.base + listed(s.list, j) * s.step) & INDEX;
}

// The distance of the rows of neighbouring keys.
fn run_step(s: Source) -> u32 {
    return s.step;
}

// Four channels from d on, with zeros past the last channel.
fn k_four(s: Source, row: u32, d: u32) -> vec4<f32> {
    return k_at4(row + d * s.unit, s.unit, p.head_dim - d);
}

fn v_four(s: Source, row: u32, d: u32) -> vec4<f32> {
    return v_at4(row + d * s.unit, s.unit, p.value_dim - s.col - d);
}

// The channels as a vector of words, for kernels that load words. There are no scales.
const K_STORAGE: u32 = 0u;
const V_STORAGE: u32 = 0u;
const K_SCALED: bool = false;
const V_SCALED: bool = false;
const K_BIAS: f32 = 0.0;
const V_BIAS: f32 = 0.0;

fn k_word(s: Source, row: u32, n: u32) -> vec4<u32> {
    return bitcast<vec4<u32>>(k_four(s, row, n * 4u));
}

fn v_word(s: Source, row: u32, n: u32) -> vec4<u32> {
    return bitcast<vec4<u32>>(v_four(s, row, n * 4u));
}

fn k_scale(s: Source, row: u32, n: u32) -> f32 {
    return 1.0;
}

fn v_scale(s: Source, row: u32, n: u32) -> f32 {
    return 1.0;
}

fn unpacked(storage: u32, word: vec4<u32>, i: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(word);
}
