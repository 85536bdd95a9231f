// recurrent_d_pairs.wgsl for decays by channel, in chunks of 16 rows. The gradients walk from row
// to row as the state does, and decay at each step.
//
// memory: as in recurrent_d_pairs.wgsl. The gradients of scores are without decays. factors
// [features] of each row
//
// Bindings (declared by the host): memory. Floors: 64 · features multiply-adds a row; 48 · features
// bytes read or written. An invocation computes four channels of the 16 rows.

const CHUNK_ROWS: u32 = 16u;

var<private> walk: array<vec4<f32>, CHUNK_ROWS>;

fn load_walk(at: u32) {
    /* unrolled */ for (var t = 0u; t < CHUNK_ROWS; t++) {
        walk[t] = at4(at + t * p.features);
    }
}

fn store_walk(at: u32) {
    /* unrolled */ for (var t = 0u; t < CHUNK_ROWS; t++) {
        memory_store4(at + t * p.features, walk[t]);
    }
}

// The gradients of rows with earlier keys. `pairs` are 0 for later keys.
fn walk_up(pairs: u32, at: u32, row: u32) {
    /* unrolled */ for (var s = 0u; s < CHUNK_ROWS; s++) {
        {
            let factor = at4(p.factors + at + s * p.features);
            let key = at4(p.keys + at + s * p.features) * memory_at(p.rates + 4u * (row + s) + 3u);
            /* unrolled */ for (var t = s; t < CHUNK_ROWS; t++) {
                walk[t] = walk[t] * factor + memory_at(pairs + t * CHUNK_ROWS + s) * key;
            }
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let f = (group.x * WORKGROUP + index) * 4u;
    if f >= p.features {
        return;
    }
    let row = row_at(group.z, group.y);
    let at = row * p.features + f;
    let of_queries = p.result + row * CHUNK_ROWS;
    let of_keys = of_queries + p.second_result;
    load_walk(p.d_queries + at);
    walk_up(of_queries, at, row);
    store_walk(p.d_queries + at);
    if IS_DELTA {
        load_walk(p.d_keys + at);
        walk_up(of_keys, at, row);
        store_walk(p.d_keys + at);
    }
    load_walk(p.d_suffix_keys + at);
    /* unrolled */ for (var u = 0u; u < CHUNK_ROWS; u++) {
        {
            let t = CHUNK_ROWS - 1u - u;
            let factor = at4(p.factors + at + t * p.features);
            let query = at4(p.queries + at + t * p.features);
            let key = at4(p.keys + at + t * p.features);
            /* unrolled */ for (var s = 0u; s < CHUNK_ROWS - 1u - u; s++) {
                var gradient = memory_at(of_queries + t * CHUNK_ROWS + s) * query;
                if IS_DELTA {
                    gradient += memory_at(of_keys + t * CHUNK_ROWS + s) * key;
                }
                walk[s] = (walk[s] + gradient) * factor;
            }
            walk[CHUNK_ROWS - 1u - u] += memory_at(of_queries + t * CHUNK_ROWS + t) * query;
        }
    }
    store_walk(p.d_suffix_keys + at);
}
