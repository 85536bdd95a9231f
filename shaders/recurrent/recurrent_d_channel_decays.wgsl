// recurrent_d_decays.wgsl for decays by channel, in chunks of 16 rows. A product of two rows has
// all decays between them as factors. Keys decay from row to row on the way up. Their gradients
// decay from the last row on the way down.
//
// d_decay [batch, value_heads, length, head_dim]
//
// memory: rows as in recurrent_d_decays.wgsl; queries, keys, factors, rates; d_ends
//
// memory, rows [16] at p.result: the gradients of scores without decays, 0 for later keys. Delta
// rules have a second array behind it.
//
// Bindings (declared by the host): chunks, memory, d_decay. Floors: 72 · features multiply-adds a
// row; 40 · features bytes read. An invocation computes a channel of a chunk.

const CHUNK_ROWS: u32 = 16u;

var<private> queries: array<f32, CHUNK_ROWS>;
var<private> keys: array<f32, CHUNK_ROWS>;
var<private> factors: array<f32, CHUNK_ROWS>;
// The gradients of a key at each row, from the row and later rows.
var<private> d_key: array<f32, CHUNK_ROWS>;
var<private> sums: array<f32, CHUNK_ROWS>;

fn add_pairs(row: u32, f: u32, pairs: u32) {
    for (var s = 0u; s < CHUNK_ROWS - 1u; s++) {
        var sum = 0.0;
        /* unrolled */ for (var n = 0u; n < CHUNK_ROWS - 1u; n++) {
            let at = pairs + (CHUNK_ROWS - 1u - n) * CHUNK_ROWS + s;
            sum += memory_at(at) * queries[CHUNK_ROWS - 1u - n];
            if IS_DELTA {
                sum += memory_at(at + p.second_result) * keys[CHUNK_ROWS - 1u - n];
            }
            d_key[CHUNK_ROWS - 1u - n] = sum;
            sum *= factors[CHUNK_ROWS - 1u - n];
        }
        var key = memory_at(p.keys + (row + s) * p.features + f) * memory_at(p.rates + 4u * (row + s) + 3u);
        /* unrolled */ for (var t = 1u; t < CHUNK_ROWS; t++) {
            if t > s {
                key *= factors[t];
                sums[t] += key * d_key[t];
            }
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let z = group.z;
    let f = group.x * WORKGROUP + index;
    if f >= p.head_dim {
        return;
    }
    let chunk = chunk_of(z, group.y);
    let row = row_at(z, group.y);
    let at = row * p.features + f;
    /* unrolled */ for (var t = 0u; t < CHUNK_ROWS; t++) {
        queries[t] = memory_at(p.queries + at + t * p.features);
        if IS_DELTA {
            keys[t] = memory_at(p.keys + at + t * p.features);
        }
        factors[t] = memory_at(p.factors + at + t * p.features);
        sums[t] = 0.0;
    }
    add_pairs(row, f, p.result + row * CHUNK_ROWS);
    var left = 0.0;
    /* unrolled */ for (var t = 0u; t < CHUNK_ROWS; t++) {
        sums[t] += left;
        left += product(at + t * p.features, p.suffix_keys, p.d_suffix_keys);
    }
    var entered = 0.0;
    if chunk.count > 0u {
        entered = memory_at(p.d_ends + (z * p.slots + group.y) * p.features + f);
    }
    /* unrolled */ for (var n = 0u; n < CHUNK_ROWS; n++) {
        let t = CHUNK_ROWS - 1u - n;
        entered += product(at + t * p.features, p.prefix_queries, p.d_queries);
        if IS_DELTA {
            entered += product(at + t * p.features, p.prefix_keys, p.d_keys);
        }
        if t < chunk.rows {
            let to = view_at(p.d_decay, z / p.value_heads, z % p.value_heads, chunk.first + t, f);
            var gradient = select(0.0, sums[CHUNK_ROWS - 1u - n] + entered, t < chunk.count);
            if p.accumulates != 0u {
                gradient += d_decay_at(to);
            }
            d_decay_store(to, gradient);
        }
    }
}

fn product(at: u32, a: u32, b: u32) -> f32 {
    return memory_at(a + at) * memory_at(b + at);
}
