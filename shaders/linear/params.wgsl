// What all kernels of linear attention are told.
//
// Needs: View.
// Gives: Params.

struct Params {
    q: View,              // queries, or their features
    k: View,              // keys, or their features
    v: View,
    d_out: View,
    x: View,              // what is written; out, where that is read
    heads: u32,
    kv_heads: u32,
    group: u32,           // query heads of a key/value head
    features: u32,
    q_len: u32,
    kv_len: u32,
    value_dim: u32,
    chunk_len: u32,
    first_slot: u32,      // of the span
    slots: u32,           // of the span
    all_slots: u32,       // of the keys of the whole call
    sequences: u32,       // packed ones, and what lies before and after them; 0: the batch
    state_stride: u32,    // floats of a row of a state: values, then four whose first is the norm
    accumulates: u32,     // whether gradients are added to what is there
    has_state: u32,       // whether sequences begin with a state of the caller's
    eps: f32,
    scale: f32,           // of what is not divided by the norm
    neg_inf: f32,         // −∞
    head_dim: u32,
    directions: u32,      // of random features
    value_unit: f32,      // values are multiplied by it before they are summed: sums may be beyond f32's range where means are not
    value_scale: f32,     // 1 / value_unit
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
