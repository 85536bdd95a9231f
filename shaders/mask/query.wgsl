// What every mask needs. The host adds the parts a call uses (mask/*.wgsl) and composes
// from them, so that what a call does not use costs nothing:
//   query_in(b, h, i, alone) -> Query     a query, with an interval that holds every key it may see; unless alone,
//                                         the interval only bounds those of its neighbours
//   mask_mod(q, j) -> bool                 whether a query sees a key of its interval; keys of a cache are those left
//   score_mod(score, q, j) -> f32           the score after softcap and bias
//   bias_of(q, j) -> f32                  the bias alone
//
// Needs: View; query_in.
// Gives: MaskParams, Query; distance, key_range, query_of.

struct MaskParams {
    prefix: View,
    lengths: View,
    query_starts: View,
    key_starts: View,
    query_documents: View,
    key_documents: View,
    blocks: View,
    attn_mask: View,
    tree: View,
    key_padding_mask: View,
    globals: View,
    bias: View,
    slopes: View,
    relative: View,
    sink_logits: View,
    pattern: vec4<u32>,  // stride, reach or SAME_BLOCK, summary or 0, part
    block: vec2<u32>,    // queries and keys of a block of the map
    diagonal: i32,       // key position of query 0
    left: i32,
    right: i32,
    reach: i32,          // furthest distance in the table of relative biases
    masked_len: u32,     // keys from here on were appended: every query sees them
    q_len: u32,
    kv_len: u32,
    sequences: u32,      // packed side by side
    bottom_right: u32,   // how they are aligned
    symmetric: u32,      // ALiBi's distance
    softcap: f32,
    neg_inf: f32,           // −∞; WGSL has no literal for it
    pad: vec2<u32>,
}

struct Query {
    b: u32,
    h: u32,
    i: u32,
    first: u32,          // it sees keys of first .. end only
    end: u32,
    stop: u32,           // end, before keys were appended
    origin: u32,         // first key of its sequence
    position: i32,       // the key at which it stands
    shift: u32,          // positions of its cache that have been overwritten
    prefix: u32,         // keys from origin to here are seen whatever causal rule, window and pattern say
    document: u32,
    standing: bool,      // it is a global token
    slope: f32,
}

fn query_of(b: u32, h: u32, i: u32) -> Query {
    return query_in(b, h, i, true);
}

// An interval that holds every key which a query of first ..= last may see: bounds never fall from one query to
// the next, except those that stand in a tensor.
fn key_range(b: u32, h: u32, first: u32, last: u32) -> vec2<u32> {
    return vec2<u32>(query_in(b, h, first, first == last).first, query_in(b, h, last, first == last).end);
}

// How far the key lies after the query's own position.
fn distance(q: Query, j: u32) -> i32 {
    return i32(j) - q.position;
}
