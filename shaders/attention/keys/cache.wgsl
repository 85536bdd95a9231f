// Keys and values in a cache: the row of a key, and its words (keys/packed_words.wgsl). K_GROUP and
// V_GROUP are the channels that share a scale. Past the last channel, rows hold zeros to the end of
// the vector.
//
// Needs: p.cache; K_CHANNELS, K_GROUP, K_SCALED, V_CHANNELS, V_GROUP, V_SCALED, WIDE; Rows;
// are_neighbours, cache_k, cache_v, key_batch, key_head, list_of, listed, row_of_token, rows_of.
// Gives: Source; is_run, key_extra, k_scale, k_source, k_word, key_row, run_step, v_scale,
// v_source, v_word.

// The keys or the values of one sequence and head. The fields vectors and groups are per row, col
// is the first channel, and list is the list of keys.
struct Source {
    rows: Rows,
    vectors: u32,
    groups: u32,
    scales: u32,
    col: u32,
    list: u32,
}

fn k_source(b: u32, kv_head: u32) -> Source {
    let rows = rows_of(key_batch(b), key_head(kv_head));
    return Source(rows, p.cache.k_words / 4u, p.cache.k_groups, p.cache.k_scales, 0u, list_of(b, kv_head));
}

fn v_source(b: u32, kv_head: u32, col: u32) -> Source {
    let rows = rows_of(key_batch(b), key_head(kv_head));
    return Source(rows, p.cache.v_words / 4u, p.cache.v_groups, p.cache.v_scales, col, list_of(b, kv_head));
}

fn key_row(s: Source, t: u32) -> u32 {
    return row_of_token(s.rows, listed(s.list, t));
}

// True if the rows of tokens a ..= b are neighbours. run_step is their distance.
fn is_run(s: Source, a: u32, b: u32) -> bool {
    let first = listed(s.list, a);
    let last = listed(s.list, b);
    return last - first == b - a && are_neighbours(s.rows, first, last);
}

fn run_step(s: Source) -> u32 {
    return 1u;
}

// The first vector of a row. Unless WIDE, it is not negative in bytes, as an i32. This saves a
// check per load.
fn first_of(s: Source, row: u32) -> u32 {
    return (row * s.vectors) & select(0x03ffffffu, 0xffffffffu, WIDE);
}

fn k_word(s: Source, row: u32, n: u32) -> vec4<u32> {
    return cache_k[first_of(s, row) + n];
}

fn v_word(s: Source, row: u32, n: u32) -> vec4<u32> {
    return cache_v[first_of(s, row) + n];
}

const SCALE_INDEX: u32 = select(0x0fffffffu, 0xffffffffu, WIDE);

// A word of the scales and positions of keys.
fn key_extra(o: u32) -> u32 {
    let n = o & SCALE_INDEX;
    return cache_k[n / 4u][n % 4u];
}

// The factor of the channels of a row's n-th vector.
fn k_scale(s: Source, row: u32, n: u32) -> f32 {
    if !K_SCALED {
        return 1.0;
    } else {
        return bitcast<f32>(key_extra(s.scales + row * s.groups + n * K_CHANNELS / K_GROUP));
    }
}

fn v_scale(s: Source, row: u32, n: u32) -> f32 {
    if !V_SCALED {
        return 1.0;
    } else {
        let o = (s.scales + row * s.groups + n * V_CHANNELS / V_GROUP) & SCALE_INDEX;
        return bitcast<f32>(cache_v[o / 4u][o % 4u]);
    }
}
