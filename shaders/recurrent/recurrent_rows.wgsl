// Copies the rows of q and k of a chunk, with their decays. Rows past the last are zeros, and keep
// the state unchanged. A decay is the exponential of a sum of logarithms, never a quotient or a
// difference. So any decay is safe.
//
// q, k [batch, heads, length, head_dim]   decay [batch, value_heads, length, 1 or head_dim]
// beta [batch, value_heads, length, 1]
//
// memory, rows of [features]: queries q · scale; keys k; prefix_queries and prefix_keys with the
// decay up to the row. Then suffix_keys β k with the decay after the row, and factors exp(decay) if
// each channel has one.
//
// memory, rates [4] of a row: the logarithm of the decay, the decay to it, the decay after it, β.
//
// memory, ends [features] of a chunk: its whole decay.
//
// Bindings (declared by the host): q, k, decay and beta if there are any, chunks, memory. Floors: 6
// · features multiply-adds a row, 8 · head_dim bytes read and 20 · features written. An invocation
// computes four channels of a chunk.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let z = group.z;
    let f = (group.x * WORKGROUP + index) * 4u;
    if f >= p.features {
        return;
    }
    let chunk = chunk_of(z, group.y);
    let b = z / p.value_heads;
    let hv = z % p.value_heads;
    let h = hv / p.group;
    let row = row_at(z, group.y);
    var sum = vec4<f32>();
    for (var t = 0u; t < p.chunk_len; t++) {
        let at = (row + t) * p.features + f;
        let i = chunk.first + t;
        var key = vec4<f32>();
        var query = vec4<f32>();
        var rate = 0.0;
        var log = vec4<f32>();
        if t < chunk.count {
            query = query4(b, h, i, f) * p.scale;
            key = key4(b, h, i, f);
            if IS_UNIT {
                let norms = memory_at4(p.norms + 4u * (row + t), 1u, 4u);
                query *= norms.x;
                key *= norms.y;
            }
            rate = rate_of(b, hv, i);
            log = log4(b, hv, i, f);
        }
        sum += log;
        let product = decay_factor4(sum);
        memory_store4(p.queries + at, query);
        memory_store4(p.keys + at, key);
        memory_store4(p.prefix_queries + at, query * product);
        if IS_DELTA {
            memory_store4(p.prefix_keys + at, key * product);
        }
        if IS_BY_CHANNEL {
            memory_store4(p.factors + at, decay_factor4(log));
        }
        if f == 0u {
            memory_store4(p.rates + 4u * (row + t), vec4<f32>(log.x, product.x, 1.0, rate));
        }
    }
    memory_store4(p.ends + (z * p.slots + group.y) * p.features + f, decay_factor4(sum));
    sum = vec4<f32>();
    for (var n = 0u; n < p.chunk_len; n++) {
        let t = p.chunk_len - 1u - n;
        let at = (row + t) * p.features + f;
        let i = chunk.first + t;
        var rate = 0.0;
        var log = vec4<f32>();
        if t < chunk.count {
            rate = rate_of(b, hv, i);
            log = log4(b, hv, i, f);
        }
        let after = decay_factor4(sum);
        memory_store4(p.suffix_keys + at, memory_at4(p.keys + at, 1u, 4u) * after * rate);
        if f == 0u {
            memory_store(p.rates + 4u * (row + t) + 2u, after.x);
        }
        sum += log;
    }
}

fn log4(b: u32, h: u32, i: u32, f: u32) -> vec4<f32> {
    if HAS_DECAY {
        return finite_log4(decay4(b, h, i, f));
    } else {
        return vec4<f32>();
    }
}

// Channels past the last are zeros in the keys, so their decay does not matter.
fn decay4(b: u32, h: u32, i: u32, f: u32) -> vec4<f32> {
    if IS_BY_CHANNEL {
        let last = p.head_dim - 1u;
        return vec4<f32>(
            decay_at(view_at(p.decay, b, h, i, min(f, last))),
            decay_at(view_at(p.decay, b, h, i, min(f + 1u, last))),
            decay_at(view_at(p.decay, b, h, i, min(f + 2u, last))),
            decay_at(view_at(p.decay, b, h, i, min(f + 3u, last))),
        );
    } else {
        return vec4<f32>(decay_at(view_at(p.decay, b, h, i, 0u)));
    }
}
