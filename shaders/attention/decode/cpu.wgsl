// The loop of fused.wgsl for drivers on a CPU, few rows, and the packed keys and values of caches.
//
// Every load has an index that is uniform over the workgroup: a scalar load. (With an index that
// differs between lanes, each lane costs a branch.) The kernel combines LANES words to a vector,
// one in each lane, and unpacks them as one. For scores, a lane has the word of a different key.
// For sums, it has a different word of the same key. Weights move between the two through workgroup
// memory, a chunk at a time. If rows fill the lanes, fused/cpu.wgsl is faster.
//
// GATHER is for drivers that load for each lane even with a uniform index. Such a load takes a
// dozen blocks of code per lane. Each lane then loads its word directly. The result is the same.
//
// Constants: ROWS     packed rows of a workgroup
//            LANES    invocations of a workgroup, as many as the driver computes at once
//            K_BLOCKS, V_BLOCKS   vectors of words of a row
//            KEYS     keys of a block, a multiple of LANES and of STEP (powers of two)
//            CHUNK    keys between barriers, a multiple of KEYS; a chunk costs about ten keys
//            STEP     keys that are added to the sums at a time
//            GATHER   true if each lane loads its words separately
// The loops must fit in the first-level instruction cache.
//
// Lower bound, per query, key and channel of each kind: a multiplication and an addition. (Software
// drivers have no fused one.) Loads: five instructions for each u32, once per ROWS packed rows.
//
// Needs: p.first, p.group, p.head_dim, p.kv_heads, p.mask, p.q, p.scale, p.splits, p.value_dim;
// CHUNK, GATHER, KEYS, K_BLOCKS, K_SCALED, K_STORAGE, K_VECTORS, LANES, LOWEST, PER_PAIR_MASK,
// RESCALE_THRESHOLD, ROWS, SPLITS, STEP, UNIT, V_BLOCKS, V_SCALED, V_STORAGE, V_VECTORS; Query;
// all_finite, any_nan, finish_checked, is_run, k_scale, k_source, k_word, key_row, mask_mod, q_at4,
// query_of_row, repaired, rescale_of, row_state, rows_key_range, run_step, score_mod, split_keys,
// store_row, unpacked_exactly, v_scale, v_source, v_word, view_at, weight_of.
// Gives: main.

const LANE_KEYS: u32 = KEYS / LANES;
// Neighbouring keys in the lanes, for rows of few words, and words of a lane. A power of two, so
// that steps end where weights end.
const SPREAD: u32 = 1u << firstLeadingBit(clamp(LANES / V_BLOCKS, 1u, KEYS / STEP));
const LANE_WORDS: u32 = (V_BLOCKS + LANES - 1u) / LANES;
const_assert LANE_WORDS * V_VECTORS <= 32u;
// Tells the compiler that an index is not negative as an i32, which saves a check per load.
const SMALL: u32 = 0xffffu;

var<workgroup> queries: array<vec4<f32>, K_BLOCKS * K_VECTORS * ROWS>;
var<workgroup> weights: array<f32, CHUNK * ROWS>;
var<workgroup> lane_values: array<f32, 2u * ROWS * LANES>;
var<workgroup> spread: array<vec4<f32>, select(1u, LANES * V_VECTORS, SPREAD > 1u)>;
// The number of the chunk in which a score was too far above the maximum.
var<workgroup> rescale_chunk: u32;

// Returns x. After a barrier, LLVM computes earlier values again at each use, inside loops too.
// (llvmpipe's workgroups are coroutines.) It does not recompute the result of a loop.
fn opaque(x: u32) -> u32 {
    var y = x;
    for (var i = 0u; i < p.kv_heads; i++) {
        y ^= i >> 31u;
    }
    return y;
}

// Never true. Its loop makes the surrounding loop not innermost. In an innermost loop, LLVM turns
// the bounds checks of loads from conditional moves into branches, which is slower.
fn opaque_false() -> bool {
    if p.group == 0u {
        return opaque(1u) == 1u;
    } else {
        return false;
    }
}

// Returns n as the bound of a loop over values of all lanes. With GATHER each load is much code, so
// the bound is not constant, and the loop is not unrolled.
fn bound(n: u32) -> u32 {
    if GATHER {
        return select(n, 0u, p.kv_heads == 0u);
    } else {
        return n;
    }
}

// All ones for lane l, else zero. Made from bits, because a comparison would become masked loads,
// which are slow.
fn mask_of(bit: u32, l: u32) -> u32 {
    return u32(i32(bit << (31u - l)) >> 31u);
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) invocation: u32) {
    let lane = opaque(invocation);
    let z = workgroup.z + p.first.z;
    let b = opaque(z / p.kv_heads);
    let kv_head = opaque(z % p.kv_heads);
    let packed = p.mask.q_len * p.group;
    let x = workgroup.x + p.first.x;
    let row0 = select(x, x / p.splits, SPLITS) * ROWS;
    let split = select(0u, x % p.splits, SPLITS);
    let neg_inf = p.mask.neg_inf;
    let range = rows_key_range(b, kv_head, row0, min(ROWS, packed - row0));
    let keys = split_keys(range.any_row, split);
    let stop = opaque(keys.y);
    let k = k_source(b, kv_head);
    let v = v_source(b, kv_head, 0u);

    for (var r = 0u; r < ROWS; r++) {
        let query = query_of_row(b, kv_head, min(row0 + r, packed - 1u));
        let at = view_at(p.q, b, query.h, query.i, 0u);
        for (var n = lane; n < K_BLOCKS * K_VECTORS; n += LANES) {
            var x = vec4<f32>();
            if n * 4u < p.head_dim {
                x = q_at4(at + n * 4u * p.q.strides.w, p.q.strides.w, p.head_dim - n * 4u);
            }
            queries[n * ROWS + r] = x * (p.scale * UNIT);
        }
    }
    if lane == 0u {
        rescale_chunk = 0u;
    }

    var acc: array<array<array<vec4<f32>, V_VECTORS>, LANE_WORDS>, ROWS>;
    var row_max: array<f32, ROWS>;
    var row_sum: array<f32, ROWS>;
    var nan_carry: array<f32, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        for (var w = 0u; w < LANE_WORDS; w++) {
            for (var e = 0u; e < V_VECTORS; e++) {
                acc[r][w][e] = vec4<f32>();
            }
        }
        row_max[r] = LOWEST;
        row_sum[r] = 0.0;
        nan_carry[r] = 0.0;
    }
    workgroupBarrier();

    var chunk = 1u;
    var tries = 0u;
    var j = opaque(keys.x);
    while j < stop {
        // The first chunk is one block. Its scores give the first maximum.
        let end = min(j + select(CHUNK, KEYS, chunk == 1u), stop);
        let my_lane = opaque(lane);
        let bit = opaque(1u << lane);
        var lane_mask: array<u32, LANES>;
        for (var l = 0u; l < LANES; l++) {
            lane_mask[l] = mask_of(bit, l);
        }
        var asked: array<Query, ROWS>;
        var limit: array<f32, ROWS>;
        var chunk_max: array<f32, ROWS>;
        var chunk_sum: array<f32, ROWS>;
        var chunk_nan: array<f32, ROWS>;
        for (var r = 0u; r < ROWS; r++) {
            asked[r] = query_of_row(b, kv_head, min(row0 + r, packed - 1u));
            limit[r] = row_max[r];
            chunk_max[r] = LOWEST;
            chunk_sum[r] = 0.0;
            chunk_nan[r] = 0.0;
        }

        // Computes scores and weights.
        for (var t0 = j; t0 < end; t0 += KEYS) {
            var rows: array<array<u32, LANES>, LANE_KEYS>;
            var s: array<array<f32, LANE_KEYS>, ROWS>;
            for (var r = 0u; r < ROWS; r++) {
                for (var c = 0u; c < LANE_KEYS; c++) {
                    s[r][c] = 0.0;
                }
            }
            // The rows of the lane's keys.
            var own: array<u32, LANE_KEYS>;
            let most = min(t0 + KEYS, stop) - 1u;
            if GATHER {
                for (var c = 0u; c < LANE_KEYS; c++) {
                    own[c] = key_row(k, min(t0 + c * LANES + my_lane, most));
                }
            } else if is_run(k, t0, most) {
                let first = key_row(k, t0);
                for (var c = 0u; c < LANE_KEYS; c++) {
                    for (var l = 0u; l < LANES; l++) {
                        rows[c][l] = first + min(c * LANES + l, most - t0) * run_step(k);
                    }
                }
            } else {
                for (var c = 0u; c < LANE_KEYS; c++) {
                    for (var l = 0u; l < LANES; l++) {
                        rows[c][l] = key_row(k, min(t0 + c * LANES + l, most));
                    }
                }
            }
            // The bound is not constant, so the loop is not unrolled.
            let blocks = min(K_BLOCKS, p.head_dim);
            for (var i = 0u; i < blocks; i++) {
                if opaque_false() {
                    i += 1u;
                }
                let n = i & SMALL;
                var x: array<array<vec4<f32>, K_VECTORS>, LANE_KEYS>;
                var word_dot: array<array<f32, LANE_KEYS>, ROWS>;
                for (var c = 0u; c < LANE_KEYS; c++) {
                    var word: vec4<u32>;
                    if GATHER {
                        word = k_word(k, own[c], n);
                    } else {
                        word = k_word(k, rows[c][0], n) & vec4<u32>(lane_mask[0]);
                        for (var l = 1u; l < LANES; l++) {
                            word |= k_word(k, rows[c][l], n) & vec4<u32>(lane_mask[l]);
                        }
                    }
                    /* unrolled */ for (var e = 0u; e < K_VECTORS; e++) {
                        x[c][e] = unpacked_exactly(K_STORAGE, word, e);
                    }
                    for (var r = 0u; r < ROWS; r++) {
                        word_dot[r][c] = select(s[r][c], 0.0, K_SCALED);
                    }
                }
                for (var e = 0u; e < K_VECTORS; e++) {
                    var q: array<vec4<f32>, ROWS>;
                    for (var r = 0u; r < ROWS; r++) {
                        q[r] = queries[((n * K_VECTORS + e) * ROWS + r) & SMALL];
                    }
                    /* unrolled */ for (var d = 0u; d < 4u; d++) {
                        for (var r = 0u; r < ROWS; r++) {
                            for (var c = 0u; c < LANE_KEYS; c++) {
                                word_dot[r][c] += x[c][e][d] * q[r][d];
                            }
                        }
                    }
                }
                for (var c = 0u; c < LANE_KEYS; c++) {
                    var bits = 0u;
                    if K_SCALED && GATHER {
                        bits = bitcast<u32>(k_scale(k, own[c], n));
                    } else if K_SCALED {
                        for (var l = 0u; l < LANES; l++) {
                            bits |= bitcast<u32>(k_scale(k, rows[c][l], n)) & lane_mask[l];
                        }
                    }
                    for (var r = 0u; r < ROWS; r++) {
                        if K_SCALED {
                            s[r][c] += word_dot[r][c] * bitcast<f32>(bits);
                        } else {
                            s[r][c] = word_dot[r][c];
                        }
                    }
                }
            }
            if PER_PAIR_MASK || t0 < range.every_row.x || t0 + KEYS > min(range.every_row.y, stop) {
                for (var r = 0u; r < ROWS; r++) {
                    for (var c = 0u; c < LANE_KEYS; c++) {
                        let t = t0 + c * LANES + my_lane;
                        var x = neg_inf;
                        if t >= asked[r].first && t < min(asked[r].end, stop) {
                            x = s[r][c];
                            if PER_PAIR_MASK {
                                if mask_mod(asked[r], t) {
                                    x = score_mod(x, asked[r], t);
                                } else {
                                    x = neg_inf;
                                }
                            }
                        }
                        s[r][c] = x;
                    }
                }
            }
            for (var r = 0u; r < ROWS; r++) {
                for (var c = 0u; c < LANE_KEYS; c++) {
                    let t = c * LANES + my_lane;
                    chunk_max[r] = max(chunk_max[r], s[r][c]);
                    chunk_nan[r] += select(0.0, s[r][c], any_nan(vec4<f32>(s[r][c])));
                    var x = select(weight_of(s[r][c] - limit[r]), 0.0, s[r][c] == neg_inf);
                    chunk_sum[r] += x;
                    weights[((t0 - j + t) * ROWS + r) & SMALL] = x;
                }
            }
        }

        var above_limit = false;
        for (var r = 0u; r < ROWS; r++) {
            above_limit = select(chunk_max[r] > limit[r] + RESCALE_THRESHOLD, true, above_limit);
            lane_values[r * LANES + my_lane] = chunk_max[r];
        }
        if above_limit {
            rescale_chunk = chunk;
        }
        let must_rescale = workgroupUniformLoad(&rescale_chunk) == chunk;
        chunk += 1u;
        // Repeats the chunk from its maximum. For the first chunk, which was one block, at most
        // twice.
        if must_rescale && tries < 2u {
            tries += 1u;
            for (var r = 0u; r < ROWS; r++) {
                var m = row_max[r];
                for (var l = 0u; l < bound(LANES); l++) {
                    m = max(m, lane_values[r * LANES + l]);
                }
                let rescale = rescale_of(row_max[r], m);
                row_max[r] = m;
                row_sum[r] *= rescale;
                for (var w = 0u; w < LANE_WORDS; w++) {
                    for (var e = 0u; e < V_VECTORS; e++) {
                        acc[r][w][e] *= rescale;
                    }
                }
            }
            workgroupBarrier();
            continue;
        }
        tries = 0u;

        // Adds values. A chunk has separate sums, because values that live across barriers are in
        // memory.
        let own_lane = opaque(lane);
        let key_slot = own_lane / V_BLOCKS;
        let bit_here = opaque(1u << lane);
        for (var l = 0u; l < LANES; l++) {
            lane_mask[l] = mask_of(bit_here, l);
        }
        var chunk_acc: array<array<array<vec4<f32>, V_VECTORS>, LANE_WORDS>, ROWS>;
        for (var r = 0u; r < ROWS; r++) {
            row_sum[r] += chunk_sum[r];
            nan_carry[r] += chunk_nan[r];
            for (var w = 0u; w < LANE_WORDS; w++) {
                for (var e = 0u; e < V_VECTORS; e++) {
                    chunk_acc[r][w][e] = vec4<f32>();
                }
            }
        }
        for (var t0 = j; t0 < end; t0 += STEP * SPREAD) {
            if opaque_false() {
                t0 += 1u;
            }
            var rows: array<array<u32, SPREAD>, STEP>;
            var own: array<u32, STEP>;
            var by_row: array<array<f32, STEP>, ROWS>;
            let most = min(t0 + STEP * SPREAD, stop) - 1u;
            let is_near = !GATHER && is_run(v, t0, most);
            var first = 0u;
            if is_near {
                first = key_row(v, t0);
            }
            for (var u = 0u; u < STEP && GATHER; u++) {
                // Lanes past the last word load another lane's word, which is not used.
                let t = t0 + u * SPREAD + min(key_slot, SPREAD - 1u);
                own[u] = key_row(v, min(t, most));
                for (var r = 0u; r < ROWS; r++) {
                    by_row[r][u] = weights[((t - j) * ROWS + r) & SMALL];
                }
            }
            for (var u = 0u; u < STEP && !GATHER; u++) {
                let t = t0 + u * SPREAD;
                for (var g = 0u; g < SPREAD; g++) {
                    rows[u][g] = first + min(u * SPREAD + g, most - t0) * run_step(v);
                }
                for (var r = 0u; r < ROWS; r++) {
                    var x = weights[((t - j) * ROWS + r) & SMALL];
                    for (var g = 1u; g < SPREAD; g++) {
                        x = select(x, weights[((t + g - j) * ROWS + r) & SMALL], key_slot == g);
                    }
                    if LANES > SPREAD * V_BLOCKS {
                        x = select(x, 0.0, key_slot >= SPREAD);
                    }
                    by_row[r][u] = x;
                }
            }
            if !is_near && !GATHER {
                for (var u = 0u; u < STEP; u++) {
                    for (var g = 0u; g < SPREAD; g++) {
                        rows[u][g] = key_row(v, min(t0 + u * SPREAD + g, most));
                    }
                }
            }
            for (var w = 0u; w < LANE_WORDS; w++) {
                var x: array<array<vec4<f32>, V_VECTORS>, STEP>;
                var scaled: array<array<f32, STEP>, ROWS>;
                for (var u = 0u; u < STEP; u++) {
                    var word = vec4<u32>();
                    var bits = 0u;
                    if GATHER {
                        let n = min(select(own_lane % V_BLOCKS, w * LANES + own_lane, SPREAD == 1u), V_BLOCKS - 1u);
                        word = v_word(v, own[u], n);
                        if V_SCALED {
                            bits = bitcast<u32>(v_scale(v, own[u], n));
                        }
                    }
                    for (var l = 0u; l < LANES && !GATHER; l++) {
                        let n = select(l % V_BLOCKS, w * LANES + l, SPREAD == 1u);
                        if n < V_BLOCKS && l < SPREAD * V_BLOCKS {
                            let row = rows[u][min(l / V_BLOCKS, SPREAD - 1u)];
                            word |= v_word(v, row, n) & vec4<u32>(lane_mask[l]);
                            if V_SCALED {
                                bits |= bitcast<u32>(v_scale(v, row, n)) & lane_mask[l];
                            }
                        }
                    }
                    /* unrolled */ for (var e = 0u; e < V_VECTORS; e++) {
                        x[u][e] = unpacked_exactly(V_STORAGE, word, e);
                    }
                    for (var r = 0u; r < ROWS; r++) {
                        scaled[r][u] = by_row[r][u];
                        if V_SCALED {
                            scaled[r][u] *= bitcast<f32>(bits);
                        }
                    }
                }
                for (var e = 0u; e < V_VECTORS; e++) {
                    for (var r = 0u; r < ROWS; r++) {
                        var y = x[0][e] * scaled[r][0];
                        for (var u = 1u; u < STEP; u++) {
                            y += x[u][e] * scaled[r][u];
                        }
                        chunk_acc[r][w][e] += y;
                    }
                }
            }
        }
        for (var r = 0u; r < ROWS; r++) {
            for (var w = 0u; w < LANE_WORDS; w++) {
                for (var e = 0u; e < V_VECTORS; e++) {
                    acc[r][w][e] += chunk_acc[r][w][e];
                }
            }
        }
        workgroupBarrier();
        j = end;
    }

    for (var r = 0u; r < ROWS; r++) {
        lane_values[r * LANES + lane] = row_sum[r];
        lane_values[(ROWS + r) * LANES + lane] = nan_carry[r];
    }
    workgroupBarrier();
    for (var r = 0u; r < ROWS; r++) {
        if SPREAD > 1u {
            for (var e = 0u; e < V_VECTORS; e++) {
                spread[lane * V_VECTORS + e] = acc[r][0][e];
            }
            workgroupBarrier();
            for (var g = 1u; g < bound(SPREAD); g++) {
                for (var e = 0u; e < V_VECTORS; e++) {
                    acc[r][0][e] += spread[(lane % V_BLOCKS + g * V_BLOCKS) * V_VECTORS + e];
                }
            }
            workgroupBarrier();
        }
        let row = row0 + r;
        if row < packed {
            var sum = 0.0;
            for (var l = 0u; l < bound(LANES); l++) {
                sum += lane_values[r * LANES + l] + lane_values[(ROWS + r) * LANES + l];
            }
            let end = finish_checked(row_state(row_max[r], sum, neg_inf), z, row, split, keys, lane == 0u);
            var broken = 0u;
            for (var w = 0u; w < LANE_WORDS; w++) {
                let n = w * LANES + lane;
                for (var e = 0u; e < V_VECTORS; e++) {
                    let col = (n * V_VECTORS + e) * 4u;
                    if n < V_BLOCKS && col < p.value_dim {
                        let x = acc[r][w][e] * end.x;
                        store_row(z, row, split, col, x);
                        broken |= select(0u, 1u << (w * V_VECTORS + e), !all_finite(x));
                    }
                }
            }
            // A separate loop, so that all channels share one copy of its code.
            while broken != 0u {
                let at = firstTrailingBit(broken);
                broken &= broken - 1u;
                let col = ((at / V_VECTORS * LANES + lane) * V_VECTORS + at % V_VECTORS) * 4u;
                let query = query_of_row(b, kv_head, row);
                store_row(z, row, split, col, repaired(query, col, end.yz, keys));
            }
        }
    }
}
