// out = softmax(scale · q kᵀ, masked) · v in one pass: a running softmax, no score matrix.
// (Milakov and Gimelshein 2018; Dao et al. 2022, "FlashAttention".)
//
// q [batch, heads, q_len, head_dim]   k [batch, kv_heads, kv_len, head_dim]   v [batch, kv_heads, kv_len, value_dim]
// out [batch, heads, q_len, value_dim]   lse [batch, heads, q_len, 1]
//
// A workgroup has one key/value head and a tile of packed rows: row r is query r / group of the r % group-th head
// of the group, so that heads which share keys and values share loading them. It computes SLICE channels of out.
// The loop is in shared/fused_*.wgsl; here is what its forms have in common.
//
// Bindings (declared by the host): q, k, v, out; lse, the mask's, dropout where used.

struct Params {
    q: View,
    k: View,
    v: View,
    out: View,
    lse: View,
    dropout: View,
    mask: MaskParams,
    first: vec4<u32>,  // workgroups before this dispatch's: long work is cut into several
    seed: vec2<u32>,
    heads: u32,
    kv_heads: u32,
    group: u32,
    head_dim: u32,
    value_dim: u32,
    dropout_threshold: u32,
    dropout_scale: f32,
    scale: f32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> p: Params;

// The query of a packed row.
fn query_of_row(b: u32, kv_head: u32, row: u32) -> Query {
    return query_of(b, kv_head * p.group + row % p.group, row / p.group);
}

fn put_out(b: u32, h: u32, i: u32, col: u32, value: vec4<f32>) {
    let o = view_at(p.out, b, h, i, col);
    if OUT_IN_FOURS {
        out_put4(o, value);
    } else {
        for (var c = 0u; c < min(4u, p.value_dim - col); c++) {
            out_put(o + c * p.out.strides.w, value[c]);
        }
    }
}

// The score of a pair as the softmax sees it, −∞ where the query does not see the key.
fn score_of(q: Query, j: u32) -> f32 {
    if j < q.first || j >= q.end {
        return p.mask.none;
    }
    if ASKS_PAIRS {
        if !permits(q, j) {
            return p.mask.none;
        }
    }
    let a = view_at(p.q, q.b, q.h, q.i, 0u);
    let b = view_at(p.k, q.b, q.h / p.group, j, 0u);
    var sums = vec4<f32>();
    for (var d = 0u; d < p.head_dim; d += 4u) {
        sums += q_at4(a + d * p.q.strides.w, p.q.strides.w, p.head_dim - d)
            * k_at4(b + d * p.k.strides.w, p.k.strides.w, p.head_dim - d);
    }
    let score = (sums.x + sums.y + sums.z + sums.w) * p.scale;
    if ASKS_PAIRS {
        return changed(score, q, j);
    }
    return score;
}

// Four channels of a row once more, where a NaN came out: a weight of zero contributes nothing, whatever the
// value holds, but 0 · NaN and 0 · ∞ are NaN. Slow, and costs nothing where no NaN is.
fn repaired(q: Query, col: u32, total: vec2<f32>) -> vec4<f32> {
    var sum = vec4<f32>();
    let v = view_at(p.v, q.b, q.h / p.group, 0u, col);
    for (var j = q.first; j < q.end; j++) {
        let score = score_of(q, j);
        let weight = dropped(share_of(score, total, p.mask.none), q.b, q.h, q.i, j);
        // By the bits: what is NaN counts, and `!=` is false for it in SPIR-V's ordered comparison.
        if bitcast<u32>(score) != bitcast<u32>(p.mask.none) && (bitcast<u32>(weight) & 0x7fffffffu) != 0u {
            sum += weight * v_at4(v + j * p.v.strides.z, p.v.strides.w, p.value_dim - col);
        }
    }
    return sum;
}
