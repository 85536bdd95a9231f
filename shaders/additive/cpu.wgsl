// The loop of fused.wgsl for additive scores, for drivers that run on a CPU.
//
// KEY_LANES invocations share a row, each with every KEY_LANES-th key. If a row has one invocation,
// the offsets of keys and values depend only on workgroup_id and the loop's counter. The loads are
// then uniform. An invocation scores KEYS keys before it weighs them. The kernel gathers four
// channels of the query once for all of these keys.
//
// Constants: LANES           invocations of a workgroup, as many as the driver computes at once
//            KEY_LANES       invocations that share a row
//            ROWS            packed rows of a workgroup, LANES / KEY_LANES
//            KEYS            keys of an invocation in a block
//            VALUE_VECTORS   vec4s of value_dim that a workgroup computes, at most all of them;
//                            workgroup_id.y is the slice
//
// Floor: hidden tanh of 27 instructions and multiply-adds for a pair, and value_dim multiply-adds.
// KEYS keys share the load of a query's channel, which is a gather. The load of a key's channel is
// not shared, and costs a sixth of a tanh more.
//
// Needs: p.group, p.head_dim, p.mask, p.q, p.score_vector, p.value_dim; HAS_BLOCKS, HAS_DROPOUT,
// HIDDEN, KEYS, KEY_LANES, LANES, LOG2_E, LOWEST, PER_PAIR_MASK, RESCALE_THRESHOLD, UNIT,
// VALUE_VECTORS; Query; all_finite, any_nan, apply_dropout, dot_tanh, finish_checked, is_seen,
// k_four, k_source, key_row, mask_mod, merged, q_at4, query_of_row, repaired, rescale_of,
// row_state, rows_key_range, score_mod, score_vector_at4, split_keys, store_row, tile_state,
// v_four, v_source, view_at, weight_of, work_tile.
// Gives: main.

// The registers of an invocation: its sums of the output, its scores, which become weights, and its
// keys' offsets.
var<private> acc: array<vec4<f32>, VALUE_VECTORS>;
var<private> scores: array<f32, KEYS>;
var<private> k_rows: array<u32, KEYS>;

// The softmax states and partial sums of the invocations that share a row.
var<workgroup> states: array<vec2<f32>, LANES>;
var<workgroup> parts: array<vec4<f32>, LANES>;

// Computes the scores of keys j0, j0 + KEY_LANES, …; keys past the last are replaced by the last.
fn score_keys(q: Query, kv_head: u32, j0: u32, last: u32) {
    // The head of the workgroup is the same in all lanes, so the loads are uniform.
    let k = k_source(q.b, kv_head);
    let a = view_at(p.q, q.b, q.h, q.i, 0u);
    let w = view_at(p.score_vector, 0u, q.h, 0u, 0u);
    // If rows have one head, or all heads share a vector, the vector is the same in all lanes too.
    let shared_vector = (p.group == 1u) | (p.score_vector.strides.y == 0u);
    let shared_w = view_at(p.score_vector, 0u, kv_head, 0u, 0u);
    /* unrolled */ for (var c = 0u; c < KEYS; c++) {
        scores[c] = 0.0;
        k_rows[c] = key_row(k, min(j0 + c * KEY_LANES, last));
    }
    for (var d = 0u; d < p.head_dim; d += 4u) {
        let x = q_at4(a + d * p.q.strides.w, p.q.strides.w, p.head_dim - d);
        let step = d * p.score_vector.strides.w;
        var v = vec4<f32>();
        if shared_vector {
            v = score_vector_at4(shared_w + step, p.score_vector.strides.w, p.head_dim - d);
        } else {
            v = score_vector_at4(w + step, p.score_vector.strides.w, p.head_dim - d);
        }
        /* unrolled */ for (var c = 0u; c < KEYS; c++) {
            scores[c] += dot_tanh(v, x + k_four(k, k_rows[c], d));
        }
    }
}

// Applies the mask to the scores. A score is −∞ if the query does not see the key. `range.y` is the
// end of the keys.
fn mask_scores(q: Query, j0: u32, range: vec2<u32>) {
    /* unrolled */ for (var c = 0u; c < KEYS; c++) {
        let j = j0 + c * KEY_LANES;
        var seen = (j >= q.first) & (j < min(q.end, range.y));
        var x = scores[c] * UNIT;
        if PER_PAIR_MASK {
            // Keys that are not seen are replaced by the first key, at which rules can read
            // tensors.
            let key = select(range.x, j, seen);
            seen = select(false, mask_mod(q, key), seen);
            x = score_mod(x, q, key);
        }
        scores[c] = select(p.mask.neg_inf, x, seen);
    }
}

// Adds the values of these keys, by their weights.
fn add_values(q: Query, kv_head: u32, col0: u32, j0: u32, last: u32) {
    let v = v_source(q.b, kv_head, col0);
    /* unrolled */ for (var c = 0u; c < KEYS; c++) {
        k_rows[c] = key_row(v, min(j0 + c * KEY_LANES, last));
    }
    /* unrolled */ for (var n = 0u; n < VALUE_VECTORS; n++) {
        var t = vec4<f32>();
        /* unrolled */ for (var c = 0u; c < KEYS; c++) {
            t += v_four(v, k_rows[c], n * 4u) * scores[c];
        }
        acc[n] += t;
    }
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let work = work_tile(workgroup);
    let row = work.row0 + lane / KEY_LANES;
    let key_lane = lane % KEY_LANES;
    let q = query_of_row(work.b, work.kv_head, min(row, work.last_row));
    // The last slice begins early enough that no load needs a bound.
    let slice_col = work.slice * VALUE_VECTORS * 4u;
    let col0 = min(slice_col, (p.value_dim + 3u) / 4u * 4u - VALUE_VECTORS * 4u);
    let neg_inf = p.mask.neg_inf;

    /* unrolled */ for (var n = 0u; n < VALUE_VECTORS; n++) {
        acc[n] = vec4<f32>();
    }
    var row_max = LOWEST;
    var row_sum = 0.0;
    var nan_carry = 0.0;
    let every = rows_key_range(work.b, work.kv_head, work.row0, work.last_row + 1u - work.row0);
    let range = split_keys(every.any_row, work.split);
    for (var block = range.x; block < range.y; block += KEYS * KEY_LANES) {
        let last = range.y - 1u;
        if HAS_BLOCKS {
            if tile_state(work.b, work.kv_head, work.row0, work.last_row, block, min(block + KEYS * KEY_LANES - 1u, last)) == HIDDEN {
                continue;
            }
        }
        let j0 = block + key_lane;
        score_keys(q, work.kv_head, j0, last);
        mask_scores(q, j0, range);
        var new_max = row_max;
        /* unrolled */ for (var c = 0u; c < KEYS; c++) {
            new_max = max(new_max, scores[c]);
            nan_carry += select(0.0, scores[c], any_nan(vec4<f32>(scores[c])));
        }
        if new_max > row_max + RESCALE_THRESHOLD {
            let rescale = rescale_of(row_max, new_max);
            row_max = new_max;
            row_sum *= rescale;
            /* unrolled */ for (var n = 0u; n < VALUE_VECTORS; n++) {
                acc[n] *= rescale;
            }
        }
        /* unrolled */ for (var c = 0u; c < KEYS; c++) {
            scores[c] = select(weight_of(scores[c] - row_max), 0.0, scores[c] == neg_inf);
            row_sum += scores[c];
            if HAS_DROPOUT {
                scores[c] = apply_dropout(scores[c], q.b, q.h, q.i, j0 + c * KEY_LANES);
            }
        }
        add_values(q, work.kv_head, col0, j0, last);
    }

    // The states of the row's lanes, combined in their order.
    let mine = row_state(row_max, row_sum + nan_carry, neg_inf);
    states[lane] = mine;
    workgroupBarrier();
    var state = mine;
    if KEY_LANES > 1u {
        state = vec2<f32>(neg_inf, 0.0);
        for (var n = 0u; n < KEY_LANES; n++) {
            state = merged(state, states[lane - key_lane + n], neg_inf);
        }
        let share = select(0.0, exp2((mine.x - state.x) * LOG2_E), is_seen(mine, neg_inf));
        /* unrolled */ for (var n = 0u; n < VALUE_VECTORS; n++) {
            parts[lane] = acc[n] * share;
            workgroupBarrier();
            acc[n] = vec4<f32>();
            for (var other = 0u; other < KEY_LANES; other++) {
                acc[n] += parts[lane - key_lane + other];
            }
            workgroupBarrier();
        }
    }
    if row <= work.last_row && key_lane == 0u {
        let end = finish_checked(state, work.z, row, work.split, range, slice_col == 0u);
        var broken = false;
        /* unrolled */ for (var n = 0u; n < VALUE_VECTORS; n++) {
            if col0 + n * 4u >= slice_col {
                let x = acc[n] * end.x;
                store_row(work.z, row, work.split, col0 + n * 4u, x);
                broken = broken || !all_finite(x);
            }
        }
        if broken {
            for (var n = 0u; n < VALUE_VECTORS; n++) {
                let col = col0 + n * 4u;
                if col >= slice_col {
                    store_row(work.z, row, work.split, col, repaired(q, col, end.yz, range));
                }
            }
        }
    }
}
