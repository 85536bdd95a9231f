// The loop of fused.wgsl for additive scores, for GPUs.
//
// A tile is ROWS packed rows by KEYS keys. CHUNK channels of it at a time are in workgroup memory.
// KEYS / 4 invocations share a row. Each scores four keys of the row, and computes some channels of
// its output. The invocations exchange only weights, maxima and sums. Values come from memory, and
// the rows of a tile read the same values.
//
// Constants: ROWS        packed rows of a workgroup
//            KEYS        keys of a tile
//            WORKGROUP   invocations, ROWS · KEYS / 4
//            SLICE       channels of out that a workgroup computes
//
// Floor: hidden tanh and multiply-adds for a pair, 18 instructions and a division each. Each needs
// 3 / 8 of a vector load from workgroup memory. Then value_dim multiply-adds for a pair, and a
// vector load for four of them.
//
// Needs: p.head_dim, p.mask, p.q, p.score_vector, p.value_dim; HAS_BLOCKS, HAS_DROPOUT, HIDDEN,
// KEYS, LOWEST, PER_PAIR_MASK, RESCALE_THRESHOLD, ROWS, SLICE, UNIT, WORKGROUP; Query; all_finite,
// any_nan, apply_dropout, dot_tanh, finish_checked, head_query_of, k_four, k_source, key_row,
// mask_mod, q_at4, query_of_row, repaired, rescale_of, row_state, rows_key_range, score_mod,
// score_vector_at4, split_keys, store_row, tile_state, v_four, v_source, view_at, weight_of,
// work_tile.
// Gives: main.

const CHUNK_VECTORS: u32 = 4u;
// The stride of a row of a chunk in workgroup memory. It is one vector more than the length, so
// that rows fall on different banks.
const CHUNK_STEP: u32 = CHUNK_VECTORS + 1u;
const LANE_KEYS: u32 = 4u;
// Invocations that share a row.
const ROW_LANES: u32 = KEYS / LANE_KEYS;
// Vectors of out that an invocation computes.
const OUT_VECTORS: u32 = SLICE / 4u / ROW_LANES;

const_assert WORKGROUP == ROWS * ROW_LANES && OUT_VECTORS * ROW_LANES * 4u == SLICE;
const_assert KEYS * CHUNK_VECTORS % WORKGROUP == 0u && ROWS * CHUNK_VECTORS <= WORKGROUP;

var<workgroup> q_tile: array<vec4<f32>, ROWS * CHUNK_STEP>;
var<workgroup> k_tile: array<vec4<f32>, KEYS * CHUNK_STEP>;
// The score vector of each row: heads that share keys have different vectors.
var<workgroup> v_tile: array<vec4<f32>, ROWS * CHUNK_STEP>;
var<workgroup> weights: array<f32, ROWS * KEYS>;
// The maxima of a row's invocations, then their sums.
var<workgroup> found: array<f32, WORKGROUP>;

// The registers of an invocation: its scores of a tile, and its sums of the output.
var<private> scores: array<f32, LANE_KEYS>;
var<private> acc: array<vec4<f32>, OUT_VECTORS>;

// Loads channels d0 .. d0 + CHUNK of the tile's rows and keys, with zeros past the last channel.
fn stage_chunk(b: u32, kv_head: u32, row0: u32, last_row: u32, j0: u32, last: u32, d0: u32, lane: u32) {
    let k = k_source(b, kv_head);
    // Every invocation repeats the loop equally often. FXC rejects a barrier after another loop
    // that contains a branch.
    for (var first = 0u; first < KEYS * CHUNK_VECTORS; first += WORKGROUP) {
        let n = first + lane;
        let d = d0 + n % CHUNK_VECTORS * 4u;
        var x = vec4<f32>();
        if d < p.head_dim {
            x = k_four(k, key_row(k, min(j0 + n / CHUNK_VECTORS, last)), d);
        }
        k_tile[n / CHUNK_VECTORS * CHUNK_STEP + n % CHUNK_VECTORS] = x;
    }
    if lane < ROWS * CHUNK_VECTORS {
        let n = lane;
        let d = d0 + n % CHUNK_VECTORS * 4u;
        let place = head_query_of(kv_head, min(row0 + n / CHUNK_VECTORS, last_row));
        var x = vec4<f32>();
        var v = vec4<f32>();
        if d < p.head_dim {
            x = q_at4(view_at(p.q, b, place.x, place.y, d), p.q.strides.w, p.head_dim - d);
            v = score_vector_at4(view_at(p.score_vector, 0u, place.x, 0u, d), p.score_vector.strides.w, p.head_dim - d);
        }
        q_tile[n / CHUNK_VECTORS * CHUNK_STEP + n % CHUNK_VECTORS] = x;
        v_tile[n / CHUNK_VECTORS * CHUNK_STEP + n % CHUNK_VECTORS] = v;
    }
}

// Adds these channels to the scores of row y and keys x, x + ROW_LANES, …
fn score_chunk(x: u32, y: u32) {
    for (var n = 0u; n < CHUNK_VECTORS; n++) {
        let q = q_tile[y * CHUNK_STEP + n];
        let v = v_tile[y * CHUNK_STEP + n];
        /* unrolled */ for (var c = 0u; c < LANE_KEYS; c++) {
            scores[c] += dot_tanh(v, q + k_tile[(x + c * ROW_LANES) * CHUNK_STEP + n]);
        }
    }
}

// Applies the mask to the scores. A score is −∞ if the query does not see the key. `range.y` is the
// end of the keys.
fn mask_scores(q: Query, j0: u32, range: vec2<u32>, x: u32) {
    /* unrolled */ for (var c = 0u; c < LANE_KEYS; c++) {
        let j = j0 + x + c * ROW_LANES;
        var seen = (j >= q.first) & (j < min(q.end, range.y));
        var s = scores[c] * UNIT;
        if PER_PAIR_MASK {
            // Keys that are not seen are replaced by the first key, at which rules can read
            // tensors.
            let key = select(range.x, j, seen);
            seen = select(false, mask_mod(q, key), seen);
            s = score_mod(s, q, key);
        }
        scores[c] = select(p.mask.neg_inf, s, seen);
    }
}

// Returns the maximum over the invocations of row y.
fn row_maximum(x: f32, y: u32, lane: u32) -> f32 {
    found[lane] = x;
    workgroupBarrier();
    var largest = x;
    for (var n = 0u; n < ROW_LANES; n++) {
        largest = max(largest, found[y * ROW_LANES + n]);
    }
    return largest;
}

// Returns the sum over the invocations of row y, in their order.
fn row_total(x: f32, y: u32, lane: u32) -> f32 {
    workgroupBarrier();
    found[lane] = x;
    workgroupBarrier();
    var sum = 0.0;
    for (var n = 0u; n < ROW_LANES; n++) {
        sum += found[y * ROW_LANES + n];
    }
    return sum;
}

// Returns the first channel of the n-th vector of out that an invocation computes.
fn column(slice: u32, x: u32, n: u32) -> u32 {
    return slice * SLICE + (x + n * ROW_LANES) * 4u;
}

// Adds the values of keys j0 ..= last, by the weights of row y.
fn add_values(b: u32, kv_head: u32, slice: u32, j0: u32, last: u32, x: u32, y: u32) {
    let v = v_source(b, kv_head, 0u);
    for (var j = j0; j <= last; j++) {
        let weight = weights[y * KEYS + j - j0];
        let value_row = key_row(v, j);
        /* unrolled */ for (var n = 0u; n < OUT_VECTORS; n++) {
            // Vectors past the last channel repeat the last vector; they are not stored.
            acc[n] += weight * v_four(v, value_row, min(column(slice, x, n), (p.value_dim - 1u) & ~3u));
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let work = work_tile(workgroup);
    let x = lane % ROW_LANES;
    let y = lane / ROW_LANES;
    let row = min(work.row0 + y, work.last_row);
    let q = query_of_row(work.b, work.kv_head, row);
    let neg_inf = p.mask.neg_inf;
    /* unrolled */ for (var n = 0u; n < OUT_VECTORS; n++) {
        acc[n] = vec4<f32>();
    }
    var row_max = LOWEST;
    // The sum over the invocation's keys.
    var sum = 0.0;
    let every = rows_key_range(work.b, work.kv_head, work.row0, work.last_row + 1u - work.row0);
    let range = split_keys(every.any_row, work.split);
    for (var j0 = range.x; j0 < range.y; j0 += KEYS) {
        let last = min(j0 + KEYS, range.y) - 1u;
        if HAS_BLOCKS {
            if tile_state(work.b, work.kv_head, work.row0, work.last_row, j0, last) == HIDDEN {
                continue;
            }
        }
        /* unrolled */ for (var c = 0u; c < LANE_KEYS; c++) {
            scores[c] = 0.0;
        }
        for (var d0 = 0u; d0 < p.head_dim; d0 += CHUNK_VECTORS * 4u) {
            workgroupBarrier();
            stage_chunk(work.b, work.kv_head, work.row0, work.last_row, j0, last, d0, lane);
            workgroupBarrier();
            score_chunk(x, y);
        }
        mask_scores(q, j0, range, x);
        var mine = row_max;
        /* unrolled */ for (var c = 0u; c < LANE_KEYS; c++) {
            mine = max(mine, scores[c]);
        }
        let new_max = row_maximum(mine, y, lane);
        if new_max > row_max + RESCALE_THRESHOLD {
            let rescale = rescale_of(row_max, new_max);
            row_max = new_max;
            sum *= rescale;
            /* unrolled */ for (var n = 0u; n < OUT_VECTORS; n++) {
                acc[n] *= rescale;
            }
        }
        /* unrolled */ for (var c = 0u; c < LANE_KEYS; c++) {
            let s = scores[c];
            var weight = select(weight_of(s - row_max), 0.0, s == neg_inf);
            sum += weight + select(0.0, s, any_nan(vec4<f32>(s)));
            if HAS_DROPOUT {
                weight = apply_dropout(weight, q.b, q.h, q.i, j0 + x + c * ROW_LANES);
            }
            weights[y * KEYS + x + c * ROW_LANES] = weight;
        }
        workgroupBarrier();
        add_values(work.b, work.kv_head, work.slice, j0, last, x, y);
    }

    let state = row_state(row_max, row_total(sum, y, lane), neg_inf);
    if work.row0 + y <= work.last_row {
        let end = finish_checked(state, work.z, row, work.split, range, x == 0u && work.slice == 0u);
        /* unrolled */ for (var n = 0u; n < OUT_VECTORS; n++) {
            let col = column(work.slice, x, n);
            if col < p.value_dim {
                var out = acc[n] * end.x;
                if !all_finite(out) {
                    out = repaired(q, col, end.yz, range);
                }
                store_row(work.z, row, work.split, col, out);
            }
        }
    }
}
