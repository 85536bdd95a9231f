// The gradients of q and k, summed over the value heads of a key head. If their rows were given the
// length 1, the gradient loses its part along the row.
//
// q, k, d_q, d_k [batch, heads, length, head_dim]
// memory: d_queries, d_keys and d_suffix_keys [features] of each row, rates, norms
//
// Bindings (declared by the host): q and k if they have norms, chunks, memory. Then d_q and d_k if
// they are wanted. Floors: 4 · head_dim bytes written a tensor, and 12 · features read for each
// value head. An invocation computes a row.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let heads = p.value_heads / p.group;
    let b = group.z / heads;
    let h = group.z % heads;
    let first = b * p.value_heads + h * p.group;
    let t = group.x * WORKGROUP + index;
    let chunk = chunk_of(first, group.y);
    if t >= chunk.rows {
        return;
    }
    let i = chunk.first + t;
    let is_seen = t < chunk.count;
    var along = vec2<f32>();
    var norms = vec2<f32>(1.0);
    if IS_UNIT && is_seen {
        norms = at4(p.norms + 4u * (row_at(first, group.y) + t)).xy;
        for (var f = 0u; f < p.head_dim; f++) {
            let x = vec2<f32>(q_at(view_at(p.q, b, h, i, f)), k_at(view_at(p.k, b, h, i, f)));
            along += x * gradients(first, group.y, t, f);
        }
        along *= norms * norms;
    }
    for (var f = 0u; f < p.head_dim; f++) {
        var d = vec2<f32>();
        if is_seen {
            d = gradients(first, group.y, t, f);
            if IS_UNIT {
                let x = vec2<f32>(q_at(view_at(p.q, b, h, i, f)), k_at(view_at(p.k, b, h, i, f)));
                d = (d - x * along) * norms;
            }
        }
        let of_query = view_at(p.d_q, b, h, i, f);
        let of_key = view_at(p.d_k, b, h, i, f);
        if p.accumulates != 0u {
            d += vec2<f32>(d_q_at(of_query), d_k_at(of_key));
        }
        d_q_store(of_query, d.x);
        d_k_store(of_key, d.y);
    }
}

// The gradients of a channel of q and of k.
fn gradients(first: u32, n: u32, t: u32, f: u32) -> vec2<f32> {
    var sum = vec2<f32>();
    for (var z = first; z < first + p.group; z++) {
        let row = row_at(z, n) + t;
        let at = row * p.features + f;
        var of_key = memory_at(p.rates + 4u * row + 3u) * memory_at(p.d_suffix_keys + at);
        if IS_DELTA {
            of_key += memory_at(p.d_keys + at);
        }
        sum += vec2<f32>(p.scale * memory_at(p.d_queries + at), of_key);
    }
    return sum;
}
