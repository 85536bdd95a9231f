// The loop of fused_backward.wgsl for drivers that run on a CPU.
//
// An invocation computes OWNS / LANES output rows, with all of their channels and sums in
// variables. All loops over them have constant bounds, so the driver unrolls them. The addresses of
// opposite rows depend only on workgroup_id and the loop's counter. They are uniform loads, which
// the compiler broadcasts without workgroup memory. A step computes the scores and weights of
// OTHERS opposite rows and adds them.
//
// Constants: LANES    invocations of a workgroup, as many as the driver computes at once
//            OTHERS   opposite rows of a step
//            HEAD_VECTORS, VALUE_VECTORS   vectors of four that hold head_dim, value_dim
//
// Lower bound, per pair and channel, in multiplications and additions. For d_q: two of head_dim and
// one of value_dim. For d_k and d_v: two of each. Bytes: the opposite rows once per OWNS. As in
// fused/cpu.wgsl, each loaded element costs five instructions, for all output rows of the
// invocation.
//
// Needs: p.kv_heads, p.mask, p.scale; HAS_BLOCKS, HEAD_VECTORS, HIDDEN, HIDES_TILES, LANES,
// NORMALISES, OF_KEYS, OF_SCORES, OF_VALUES, OTHERS, OWNS, RUN, SEARCH, VALUE_VECTORS; Pair, Query,
// WorkTile; all_finite, any_nan, blocks_state, first_seen_run, head_count, key_range, loop_stats,
// other_rows, other_score_vector, other_value_vector, own_documents, own_rows, own_score_vector,
// own_value_vector, pair_of, query_head, query_of, search_finds, store_of_scores, store_of_values,
// store_repaired, store_total, total_of, work_tile.
// Gives: main.

const LANE_OWNS: u32 = OWNS / LANES;
// Independent sums per score, added at the end. Additions in one chain would wait for each other.
// All kernels use the same number, because they divide weights by another kernel's sums.
const CHAINS: u32 = 4u;

const_assert LANE_OWNS * OTHERS <= 4u && RUN % OTHERS == 0u;

// Arrays of vectors are nested. Mesa unrolls loops of up to 32 iterations. It also unrolls a loop
// with as many iterations as the array that it indexes has elements.
const HEAD_INNER: u32 = min(HEAD_VECTORS, 16u);
const HEAD_OUTER: u32 = (HEAD_VECTORS + HEAD_INNER - 1u) / HEAD_INNER;
const VALUE_INNER: u32 = min(VALUE_VECTORS, 16u);
const VALUE_OUTER: u32 = (VALUE_VECTORS + VALUE_INNER - 1u) / VALUE_INNER;

// Always true. Its loop makes the surrounding loop not innermost. In an innermost loop, LLVM turns
// the bounds checks of loads from conditional moves into branches, which is slower.
fn opaque_true() -> bool {
    var limit = 0u;
    for (var i = 0u; i < p.kv_heads; i++) {
        limit = max(limit, i);
    }
    return limit < p.kv_heads;
}

// The opposite rows of a query head that an output row may be paired with.
fn others_of(work: WorkTile, h: u32) -> vec2<u32> {
    if !OF_KEYS {
        return key_range(work.b, h, work.own0, work.last_own);
    } else {
        var range = vec2<u32>(p.mask.q_len, 0u);
        for (var n = 0u; n * SEARCH < p.mask.q_len; n++) {
            if search_finds(work, h, n) {
                range = vec2<u32>(min(range.x, n * SEARCH), min((n + 1u) * SEARCH, p.mask.q_len));
            }
        }
        return range;
    }
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    // No data is shared. With a barrier, llvmpipe makes a coroutine of the function. Bounds checks
    // then select a pointer instead of branching around the load.
    workgroupBarrier();
    let work = work_tile(workgroup);

    var own: array<u32, LANE_OWNS>;
    var own_queries: array<Query, LANE_OWNS>;
    var own_stats: array<vec3<f32>, LANE_OWNS>;
    var own_scored: array<array<array<vec4<f32>, HEAD_INNER>, HEAD_OUTER>, LANE_OWNS>;
    var own_valued: array<array<array<vec4<f32>, VALUE_INNER>, VALUE_OUTER>, LANE_OWNS>;
    var scored: array<array<array<vec4<f32>, HEAD_INNER>, HEAD_OUTER>, LANE_OWNS>;
    var valued: array<array<array<vec4<f32>, VALUE_INNER>, VALUE_OUTER>, LANE_OWNS>;
    for (var r = 0u; r < LANE_OWNS; r++) {
        own[r] = min(work.own0 + r * LANES + lane, work.last_own);
        if !OF_KEYS {
            own_queries[r] = query_of(work.b, work.head, own[r]);
            own_stats[r] = loop_stats(work.b, work.head, own[r]);
        }
        let mine = own_rows(work, own[r]);
        for (var outer = 0u; outer < HEAD_OUTER; outer++) {
            for (var n = 0u; n < HEAD_INNER; n++) {
                let d = outer * HEAD_INNER + n;
                if d < HEAD_VECTORS {
                    own_scored[r][outer][n] = own_score_vector(mine.x, d * 4u);
                    scored[r][outer][n] = vec4<f32>();
                }
            }
        }
        for (var outer = 0u; outer < VALUE_OUTER; outer++) {
            for (var n = 0u; n < VALUE_INNER; n++) {
                let d = outer * VALUE_INNER + n;
                if d < VALUE_VECTORS {
                    own_valued[r][outer][n] = own_value_vector(mine.y, d * 4u);
                    valued[r][outer][n] = vec4<f32>();
                }
            }
        }
    }

    var row_sums: array<f32, LANE_OWNS>;
    for (var r = 0u; r < LANE_OWNS; r++) {
        row_sums[r] = 0.0;
    }
    var repairs = false;
    for (var head = 0u; head < head_count(); head++) {
        let h = query_head(work, head);
        let range = others_of(work, h);
        var documents = vec2<u32>();
        // A run is a whole number of steps, so the sums of the remaining steps do not change.
        var looked = 0u;
        if HIDES_TILES {
            documents = own_documents(work, h, 0u, 1u);
        }
        for (var other = range.x; other < range.y; other += OTHERS) {
            if HIDES_TILES {
                if other >= looked {
                    other = first_seen_run(work, h, documents, other, range.y);
                    looked = other + RUN;
                }
                if other >= range.y {
                    break;
                }
            }
            var other_queries: array<Query, OTHERS>;
            var other_stats: array<vec3<f32>, OTHERS>;
            var rows: array<vec2<u32>, OTHERS>;
            var sees = !OF_KEYS;
            for (var c = 0u; c < OTHERS; c++) {
                let at = min(other + c, range.y - 1u);
                rows[c] = other_rows(work, h, at);
                if OF_KEYS {
                    other_queries[c] = query_of(work.b, h, at);
                    other_stats[c] = loop_stats(work.b, h, at);
                    if other + c > at {
                        other_queries[c].end = 0u;
                    }
                    sees = sees || (other_queries[c].first <= work.last_own && other_queries[c].end > work.own0);
                }
            }
            if HAS_BLOCKS {
                let last = min(other + OTHERS, range.y) - 1u;
                // Appended keys are not in the map.
                if select(last, work.last_own, OF_KEYS) < p.mask.masked_len {
                    let queries = select(vec2<u32>(work.own0, work.last_own), vec2<u32>(other, last), OF_KEYS);
                    let keys = select(vec2<u32>(other, last), vec2<u32>(work.own0, work.last_own), OF_KEYS);
                    sees = sees && blocks_state(work.b, h, queries.x, queries.y, keys.x, keys.y) != HIDDEN;
                }
            }
            if !sees {
                continue;
            }
            var s: array<array<array<f32, CHAINS>, OTHERS>, LANE_OWNS>;
            var w: array<array<array<f32, CHAINS>, OTHERS>, LANE_OWNS>;
            for (var r = 0u; r < LANE_OWNS; r++) {
                for (var c = 0u; c < OTHERS; c++) {
                    for (var e = 0u; e < CHAINS; e++) {
                        s[r][c][e] = 0.0;
                        w[r][c][e] = 0.0;
                    }
                }
            }
            for (var outer = 0u; outer < HEAD_OUTER; outer++) {
                for (var n = 0u; n < HEAD_INNER; n++) {
                    let d = outer * HEAD_INNER + n;
                    if d < HEAD_VECTORS {
                        for (var c = 0u; c < OTHERS; c++) {
                            let x = other_score_vector(rows[c].x, d * 4u);
                            /* unrolled */ for (var e = 0u; e < 4u; e++) {
                                for (var r = 0u; r < LANE_OWNS; r++) {
                                    s[r][c][e % CHAINS] += x[e] * own_scored[r][outer][n][e];
                                }
                            }
                        }
                    }
                }
            }
            if OF_SCORES {
                for (var outer = 0u; outer < VALUE_OUTER; outer++) {
                    for (var n = 0u; n < VALUE_INNER; n++) {
                        let d = outer * VALUE_INNER + n;
                        if d < VALUE_VECTORS {
                            for (var c = 0u; c < OTHERS; c++) {
                                let x = other_value_vector(rows[c].y, d * 4u);
                                /* unrolled */ for (var e = 0u; e < 4u; e++) {
                                    for (var r = 0u; r < LANE_OWNS; r++) {
                                        w[r][c][e % CHAINS] += x[e] * own_valued[r][outer][n][e];
                                    }
                                }
                            }
                        }
                    }
                }
            }
            var pairs: array<array<Pair, OTHERS>, LANE_OWNS>;
            var nan_found = false;
            for (var r = 0u; r < LANE_OWNS; r++) {
                for (var c = 0u; c < OTHERS; c++) {
                    for (var e = 1u; e < CHAINS; e++) {
                        s[r][c][0] += s[r][c][e];
                        w[r][c][0] += w[r][c][e];
                    }
                    if OF_KEYS {
                        pairs[r][c] = pair_of(other_queries[c], own[r], s[r][c][0], w[r][c][0], other_stats[c]);
                    } else {
                        pairs[r][c] = pair_of(own_queries[r], other + c, s[r][c][0], w[r][c][0], own_stats[r]);
                    }
                    if NORMALISES {
                        row_sums[r] += pairs[r][c].probability;
                    }
                    nan_found = nan_found || any_nan(vec4<f32>(pairs[r][c].weight));
                }
            }
            if nan_found {
                repairs = repairs || opaque_true();
            }
            if OF_SCORES {
                for (var outer = 0u; outer < HEAD_OUTER; outer++) {
                    for (var n = 0u; n < HEAD_INNER; n++) {
                        let d = outer * HEAD_INNER + n;
                        if d < HEAD_VECTORS {
                            var x: array<vec4<f32>, OTHERS>;
                            for (var c = 0u; c < OTHERS; c++) {
                                x[c] = other_score_vector(rows[c].x, d * 4u);
                            }
                            for (var r = 0u; r < LANE_OWNS; r++) {
                                var t = x[0] * pairs[r][0].d_score;
                                for (var c = 1u; c < OTHERS; c++) {
                                    t += x[c] * pairs[r][c].d_score;
                                }
                                scored[r][outer][n] += t;
                            }
                        }
                    }
                }
            }
            if OF_VALUES {
                for (var outer = 0u; outer < VALUE_OUTER; outer++) {
                    for (var n = 0u; n < VALUE_INNER; n++) {
                        let d = outer * VALUE_INNER + n;
                        if d < VALUE_VECTORS {
                            var x: array<vec4<f32>, OTHERS>;
                            for (var c = 0u; c < OTHERS; c++) {
                                x[c] = other_value_vector(rows[c].y, d * 4u);
                            }
                            for (var r = 0u; r < LANE_OWNS; r++) {
                                var t = x[0] * pairs[r][0].weight;
                                for (var c = 1u; c < OTHERS; c++) {
                                    t += x[c] * pairs[r][c].weight;
                                }
                                valued[r][outer][n] += t;
                            }
                        }
                    }
                }
            }
        }
    }

    if NORMALISES {
        for (var r = 0u; r < LANE_OWNS; r++) {
            let total = total_of(work, own[r], row_sums[r]);
            if work.own0 + r * LANES + lane <= work.last_own {
                store_total(work, own[r], total);
            }
            for (var outer = 0u; outer < HEAD_OUTER; outer++) {
                for (var n = 0u; n < HEAD_INNER; n++) {
                    scored[r][outer][n] *= total;
                }
            }
        }
    }

    // One copy of the repair's code for all results of the invocation.
    var check = vec4<f32>();
    for (var r = 0u; r < LANE_OWNS; r++) {
        for (var outer = 0u; outer < HEAD_OUTER; outer++) {
            for (var n = 0u; n < HEAD_INNER; n++) {
                check += scored[r][outer][n];
            }
        }
        for (var outer = 0u; outer < VALUE_OUTER; outer++) {
            for (var n = 0u; n < VALUE_INNER; n++) {
                check += valued[r][outer][n];
            }
        }
    }
    if repairs || !all_finite(check) {
        for (var own_row = work.own0 + lane; own_row <= work.last_own; own_row += LANES) {
            store_repaired(work, own_row, 0u, 4u, 0xffffffffu);
        }
        return;
    }
    for (var r = 0u; r < LANE_OWNS; r++) {
        if work.own0 + r * LANES + lane <= work.last_own {
            if OF_SCORES {
                for (var outer = 0u; outer < HEAD_OUTER; outer++) {
                    for (var n = 0u; n < HEAD_INNER; n++) {
                        let d = outer * HEAD_INNER + n;
                        if d < HEAD_VECTORS {
                            store_of_scores(work, own[r], d * 4u, scored[r][outer][n] * p.scale);
                        }
                    }
                }
            }
            if OF_VALUES {
                for (var outer = 0u; outer < VALUE_OUTER; outer++) {
                    for (var n = 0u; n < VALUE_INNER; n++) {
                        let d = outer * VALUE_INNER + n;
                        if d < VALUE_VECTORS {
                            store_of_values(work, own[r], d * 4u, valued[r][outer][n]);
                        }
                    }
                }
            }
        }
    }
}
