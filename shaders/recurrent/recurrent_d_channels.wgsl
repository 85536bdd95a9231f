// recurrent_d_pairs.wgsl for decays by channel, in chunks of 16 rows. The gradients walk from row
// to row as the state does, and decay at each step.
//
// memory: as in recurrent_d_pairs.wgsl. The gradients of scores are without decays. factors
// [features] of each row
//
// Bindings (declared by the host): memory. Floors: 64 · features multiply-adds a row; 48 · features
// bytes read or written. An invocation computes four channels of some of the 16 rows.

const CHUNK_ROWS: u32 = 16u;

fn load_rows(at: u32) {
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        sums[r] = at4(at + r * p.features);
    }
}

// The gradients of rows with earlier keys. `pairs` are 0 for later keys.
fn walk_up(pairs: u32, at: u32, row: u32, first: u32) {
    for (var s = 0u; s < first + ROWS; s++) {
        let factor = at4(p.factors + at + s * p.features);
        let key = at4(p.keys + at + s * p.features) * memory_at(p.rates + 4u * (row + s) + 3u);
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            let t = first + r;
            let decayed = select(sums[r], sums[r] * factor, s <= t);
            sums[r] = decayed + memory_at(pairs + t * CHUNK_ROWS + s) * key;
        }
    }
}

// The gradients of keys with the row and later rows.
fn walk_down(of_queries: u32, of_keys: u32, at: u32, first: u32) {
    for (var n = 0u; n < CHUNK_ROWS - first; n++) {
        let t = CHUNK_ROWS - 1u - n;
        let factor = at4(p.factors + at + t * p.features);
        let query = at4(p.queries + at + t * p.features);
        let key = at4(p.keys + at + t * p.features);
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            let s = first + r;
            var sum = sums[r] + memory_at(of_queries + t * CHUNK_ROWS + s) * query;
            if IS_DELTA {
                sum += memory_at(of_keys + t * CHUNK_ROWS + s) * key;
            }
            sums[r] = select(sum, sum * factor, s < t);
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let tiles = CHUNK_ROWS / ROWS;
    let first = group.x % tiles * ROWS;
    let f = (group.x / tiles * WORKGROUP + index) * 4u;
    if f >= p.features {
        return;
    }
    let row = row_at(group.z, group.y);
    let at = row * p.features + f;
    let own = at + first * p.features;
    let of_queries = p.result + row * CHUNK_ROWS;
    let of_keys = of_queries + p.second_result;
    load_rows(p.d_queries + own);
    walk_up(of_queries, at, row, first);
    store_sums(p.d_queries + own, p.features);
    if IS_DELTA {
        load_rows(p.d_keys + own);
        walk_up(of_keys, at, row, first);
        store_sums(p.d_keys + own, p.features);
    }
    load_rows(p.d_suffix_keys + own);
    walk_down(of_queries, of_keys, at, first);
    store_sums(p.d_suffix_keys + own, p.features);
}
