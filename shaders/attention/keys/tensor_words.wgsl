// Keys and values in tensors whose rows load as vectors of four words. The file defines the start
// of a row, and its words (keys/packed_words.wgsl).
//
// Needs: p.k, p.v; K_CHANNELS, WIDE; View; k, key_batch, key_head, list_of, listed, v, view_at.
// Gives: Source; is_run, k_scale, k_source, k_word, key_row, run_step, v_scale, v_source, v_word.

// The rows of one sequence and head, in vectors. col is the first channel, list the list of keys.
struct Source {
    base: u32,
    step: u32,
    col: u32,
    list: u32,
}

fn source(v: View, b: u32, kv_head: u32, col: u32) -> Source {
    let base = view_at(v, key_batch(b), key_head(kv_head), 0u, 0u);
    return Source(base / K_CHANNELS, v.strides.z / K_CHANNELS, col, list_of(b, kv_head));
}

fn k_source(b: u32, kv_head: u32) -> Source {
    return source(p.k, b, kv_head, 0u);
}

fn v_source(b: u32, kv_head: u32, col: u32) -> Source {
    return source(p.v, b, kv_head, col);
}

fn key_row(s: Source, j: u32) -> u32 {
    return s.base + listed(s.list, j) * s.step;
}

// Unless WIDE, not negative in bytes, as an i32. This saves a check per load.
fn first_of(row: u32) -> u32 {
    return row & select(0x03ffffffu, 0xffffffffu, WIDE);
}

// True if the rows of keys a ..= b are evenly spaced, as in a tensor. run_step is their distance.
fn is_run(s: Source, a: u32, b: u32) -> bool {
    return listed(s.list, b) - listed(s.list, a) == b - a;
}

fn run_step(s: Source) -> u32 {
    return s.step;
}

fn k_word(s: Source, row: u32, n: u32) -> vec4<u32> {
    return k[first_of(row) + n];
}

fn v_word(s: Source, row: u32, n: u32) -> vec4<u32> {
    return v[first_of(row) + n];
}

fn k_scale(s: Source, row: u32, n: u32) -> f32 {
    return 1.0;
}

fn v_scale(s: Source, row: u32, n: u32) -> f32 {
    return 1.0;
}
