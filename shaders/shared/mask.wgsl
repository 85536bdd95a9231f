// What every mask needs. The host adds the parts a call uses (mask_*.wgsl, score_*.wgsl) and composes
// from them, so that what a call does not use costs nothing:
//   permits(s) -> bool                    whether the query sees the key
//   changed(score, s) -> f32              the score after softcap and bias
//   key_range(b, h, first, last) -> vec2  an interval of keys that holds every key which a query of
//                                         first ..= last may see

struct MaskParams {
    lengths: View,
    keep: View,
    keys: View,
    bias: View,
    diagonal: i32,     // key position of query 0
    left: i32,
    right: i32,
    masked_len: u32,   // keys from here on were appended: every query sees them
    q_len: u32,
    kv_len: u32,
    softcap: f32,
    none: f32,         // −∞; WGSL has no literal for it
}

struct Site {
    b: u32,
    h: u32,
    i: u32,
    j: u32,
}

// How far the key lies after the query's own position.
fn distance(s: Site) -> i32 {
    return i32(s.j) - i32(s.i) - p.mask.diagonal;
}

fn clamped_range(r: vec2<i32>) -> vec2<u32> {
    let end = max(r.y, 0);
    return vec2<u32>(vec2<i32>(clamp(r.x, 0, end), end));
}
