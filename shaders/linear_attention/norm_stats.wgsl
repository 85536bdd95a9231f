// 1 / norm and −d_out · out / norm of a query.
//
// Needs: Chunk; IS_CAUSAL; component, d_out4, out4, query_feature4, scores_at, state4, state_at;
// p.chunk_len, p.eps, p.features, p.heads, p.slots, p.state_stride, p.value_dim.
// Gives: norm_stats.

fn norm_stats(b: u32, h: u32, kv: u32, slot: u32, chunk: Chunk, row: u32, stats: vec4<f32>) -> vec4<f32> {
    let i = chunk.first + row;
    let state = state_at(b, kv, slot, chunk) + p.state_stride - 4u;
    var norm = 0.0;
    for (var f = 0u; f < p.features; f += 4u) {
        let feature = query_feature4(b, h, i, f);
        for (var n = 0u; n < min(4u, p.features - f); n++) {
            norm += component(feature, n) * state4(state + (f + n) * p.state_stride).x;
        }
    }
    norm *= stats.w;
    if IS_CAUSAL {
        let first = (((b * p.heads + h) * p.slots + slot) * p.chunk_len + row) * p.chunk_len;
        for (var t = 0u; t <= row; t++) {
            norm += scores_at(first + t);
        }
    }
    if norm == 0.0 {
        return vec4<f32>(0.0, 0.0, stats.zw);
    } else {
        var product = 0.0;
        for (var c = 0u; c < p.value_dim; c += 4u) {
            product += dot(d_out4(b, h, i, c), out4(b, h, i, c));
        }
        let inverse = 1.0 / (norm + p.eps);
        return vec4<f32>(inverse, -product * inverse, stats.zw);
    }
}
