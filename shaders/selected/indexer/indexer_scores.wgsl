// The scores of an indexer: scores[i, j] = Σ w[i, h] · relu(scale · q[i, h] · k[j]) over heads h.
// (DeepSeek-AI 2025, "DeepSeek-V3.2", the lightning indexer.) −∞ for keys outside a query's range.
//
// q [batch, heads, queries, head_dim]   k [batch, 1, keys, head_dim]   w [batch, 1, queries, heads]
// or k_words [batch, 1, keys, head_dim / 4], four numbers of 8 bits each, and
// k_scales [batch, 1, keys, head_dim / p.group]
// ranges [all batches, all queries, 2]   scores [batch, 1, queries, columns]
//
// The tensors are the parts of a span of queries, except `ranges`. `columns` is the number of keys,
// perhaps rounded up. The loops are in indexer/gpu.wgsl and indexer/cpu.wgsl.
//
// Bindings (declared by the host): q; k, or k_words and k_scales; w, ranges, scores.
// Work: 2 · head_dim + 3 per head and pair. Bytes: 4 per pair.

// A range that holds the keys of queries first ..= last. Empty ranges count as nothing.
fn range_of_all(b: u32, first: u32, last: u32) -> vec2<u32> {
    var all = vec2<u32>(0xffffffffu, 0u);
    for (var i = first; i <= last; i++) {
        let range = range_of(b, i);
        if range.x < range.y {
            all = vec2<u32>(min(all.x, range.x), max(all.y, range.y));
        }
    }
    return all;
}

fn k_four(b: u32, j: u32, d: u32) -> vec4<f32> {
    if HAS_K {
        return k_at4(view_at(p.k, b, 0u, j, d), p.k.strides.w, p.head_dim - d);
    } else {
        let word = k_words_at(view_at(p.k_words, b, 0u, j, d / 4u));
        let bytes = bitcast<vec4<i32>>(vec4<u32>(word) << vec4<u32>(24u, 16u, 8u, 0u)) >> vec4<u32>(24u);
        return vec4<f32>(bytes) * k_scales_at(view_at(p.k_scales, b, 0u, j, d / p.group));
    }
}

// The term of a head: zero for a head past the last. A NaN stays NaN.
fn weighted(b: u32, h: u32, i: u32, products: vec4<f32>) -> vec4<f32> {
    let x = products * p.scale;
    let term = w_at(view_at(p.w, b, 0u, i, min(h, p.heads - 1u))) * select(max(x, vec4<f32>()), x, are_nan(x));
    return select(vec4<f32>(), term, h < p.heads);
}

fn store_scores(b: u32, i: u32, j: u32, scores: vec4<f32>) {
    let range = range_of(b, i);
    let keys = vec4<u32>(j) + vec4<u32>(0u, 1u, 2u, 3u);
    let is_seen = (keys >= vec4<u32>(range.x)) & (keys < vec4<u32>(range.y));
    let x = select(vec4<f32>(p.neg_inf), scores, is_seen);
    let o = view_at(p.scores, b, 0u, i, j);
    if SCORES_IN_FOURS {
        scores_store4(o, x);
    } else {
        for (var c = 0u; c < min(4u, p.columns - j); c++) {
            scores_store(o + c * p.scores.strides.w, component(x, c));
        }
    }
}
