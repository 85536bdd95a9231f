// The gradients of β and of the decays. The gradient of β is the key times the gradient of the
// suffix_key. A decay acts on everything that passes it. So its gradient is a sum over the later
// rows of the chunk, plus d_ends.
//
// d_decay [batch, value_heads, length, 1 or head_dim]   d_beta [batch, value_heads, length, 1]
// memory: queries, keys and their gradients [features] of each row, rates, d_ends
//
// Bindings (declared by the host): chunks, memory, d_decay and d_beta if they are wanted. Floors: 4
// · features multiply-adds and 20 · features bytes read a row. A workgroup computes a chunk.

var<workgroup> terms: array<f32, WORKGROUP>;

// Returns the part of a channel of a row in the gradients of the decays up to the row.
fn term(at: u32, rate: f32) -> f32 {
    var sum = memory_at(p.queries + at) * memory_at(p.d_queries + at)
        - rate * memory_at(p.keys + at) * memory_at(p.d_suffix_keys + at);
    if IS_DELTA {
        sum += memory_at(p.keys + at) * memory_at(p.d_keys + at);
    }
    return sum;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let z = group.z;
    let b = z / p.value_heads;
    let h = z % p.value_heads;
    let chunk = chunk_of(z, group.y);
    let row = row_at(z, group.y);
    let ends = p.d_ends + (z * p.slots + group.y) * p.features;
    let is_row = index < chunk.rows;
    let is_seen = index < chunk.count;
    let i = chunk.first + min(index, max(chunk.rows, 1u) - 1u);
    if HAS_D_BETA && is_row {
        var sum = 0.0;
        if is_seen {
            for (var f = 0u; f < p.features; f++) {
                let at = (row + index) * p.features + f;
                sum += memory_at(p.keys + at) * memory_at(p.d_suffix_keys + at);
            }
        }
        let to = view_at(p.d_beta, b, h, i, 0u);
        if p.accumulates != 0u {
            sum += d_beta_at(to);
        }
        d_beta_store(to, sum);
    }
    if HAS_D_DECAY {
        if IS_BY_CHANNEL {
            for (var f = index; f < p.head_dim; f += WORKGROUP) {
                var sum = 0.0;
                if chunk.count > 0u {
                    sum = memory_at(ends + f);
                }
                for (var n = 0u; n < chunk.rows; n++) {
                    let t = chunk.rows - 1u - n;
                    let is_there = t < chunk.count;
                    if is_there {
                        sum += term((row + t) * p.features + f, memory_at(p.rates + 4u * (row + t) + 3u));
                    }
                    let to = view_at(p.d_decay, b, h, chunk.first + t, f);
                    var gradient = select(0.0, sum, is_there);
                    if p.accumulates != 0u {
                        gradient += d_decay_at(to);
                    }
                    d_decay_store(to, gradient);
                }
            }
        } else {
            var own = 0.0;
            if is_seen {
                let rate = memory_at(p.rates + 4u * (row + index) + 3u);
                for (var f = 0u; f < p.features; f++) {
                    own += term((row + index) * p.features + f, rate);
                }
            }
            var at_end = 0.0;
            for (var f = index; f < p.features; f += WORKGROUP) {
                at_end += memory_at(ends + f);
            }
            terms[index] = at_end;
            workgroupBarrier();
            var sum = 0.0;
            for (var n = 0u; n < WORKGROUP; n++) {
                sum += terms[n];
            }
            workgroupBarrier();
            terms[index] = own;
            workgroupBarrier();
            for (var n = 0u; n < WORKGROUP; n++) {
                let t = WORKGROUP - 1u - n;
                if t >= index {
                    sum += terms[t];
                }
            }
            if is_row {
                let to = view_at(p.d_decay, b, h, i, 0u);
                var gradient = select(0.0, sum, is_seen);
                if p.accumulates != 0u {
                    gradient += d_decay_at(to);
                }
                d_decay_store(to, gradient);
            }
        }
    }
}
