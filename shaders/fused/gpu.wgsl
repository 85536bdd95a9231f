// The loop of fused.wgsl for GPUs: a workgroup takes ROWS packed rows and walks the keys KEYS at a time. Its
// invocations form 16 × LANES_Y; each holds LANE_ROWS × LANE_KEYS scores and LANE_ROWS × SLICE / 16 sums of the
// output, always of the same rows.
//
// Constants: ROWS, KEYS, CHUNK (channels of q and k per staging), WORKGROUP, SLICE (channels of v held),
// V_KEYS (rows of v per staging), P_KEYS (weights in workgroup memory at once). Head and value dimension are
// not compiled in.
//
// Floor of the arithmetic, per row and key: head_dim (in every slice) + value_dim multiply-adds, one exp2, and
// difference, maximum, two additions, store: about 6 other instructions. The scale is multiplied into q as it is staged.
// Floor in workgroup memory, per invocation and channel or key: in q · kᵀ LANE_ROWS · LANE_KEYS multiply-adds
// against (LANE_ROWS + LANE_KEYS) / 4 vector loads, 32 against 3 for 8 × 4; in p · v LANE_ROWS · SLICE / 16
// against (LANE_ROWS + SLICE / 16) / 4, for 8 rows 32 against 3 of a slice of 64, 64 against 4 of one of 128.
// Floor in global memory, elements per multiply-add: 1 / ROWS + 1 / KEYS in q · kᵀ (q is staged again for
// every tile of keys: only the first time from beyond a cache), 1 / ROWS in p · v.
// On navi31, navi21 and vega10 (RADV) 90 to 93 % of the vector instructions of q · kᵀ are multiply-adds, ragged
// ends of head_dim counted, and 92 to 96 % of p · v; the rest is addresses and staging. No spills.
//
// A tile of keys: q and k are staged by chunks → scores in registers → maxima of the rows, through workgroup
// memory → weights in registers → P_KEYS of them at a time in workgroup memory, with V_KEYS rows of v. What is
// staged next travels while the invocations compute. For that the loops between a load and its use must be
// unrolled: loads of read-only buffers are moved down past a loop that is not.
//
// Needs: p.first, p.group, p.head_dim, p.kv_heads, p.mask, p.q, p.scale, p.splits, p.value_dim; CHUNK, HAS_BLOCKS,
// HAS_DROPOUT, KEYS, LOG2_E, LOWEST, PER_PAIR_MASK, P_KEYS, RESCALE_THRESHOLD, ROWS, SLICE, SPLITS, UNIT, V_KEYS,
// WORKGROUP; Query; any_nan, apply_dropout, are_nan, finish_row, head_query_of, is_finite, k_source, key_row,
// keys_of_rows, load_k, load_q, mask_mod, next_tile, query_of, repaired, rescale_of, row_keys, row_state,
// score_mod, store_row, v_four, v_source, view_at, zero_past.
// Gives: main.

const LANES_X: u32 = 16u;
const LANES_Y: u32 = WORKGROUP / LANES_X;
const LANE_ROWS: u32 = ROWS / LANES_Y;
const LANE_KEYS: u32 = KEYS / LANES_X;
const ROW_VECTORS: u32 = LANE_ROWS / 4u;
const OUT_VECTORS: u32 = SLICE / LANES_X / 4u;
const SCORES: u32 = ROW_VECTORS * LANE_KEYS;
const CHUNK_VECTORS: u32 = CHUNK / 4u;
const CHUNK_UNROLL: u32 = min(CHUNK_VECTORS, 2u);
const V_VECTORS: u32 = SLICE / 4u;
const V_UNROLL: u32 = min(V_KEYS / 4u, 2u);
const P_VECTORS: u32 = P_KEYS / 4u;

const STAGE_ROWS: u32 = WORKGROUP / CHUNK_VECTORS;
const STAGE_KEYS: u32 = WORKGROUP / V_VECTORS;
const Q_LOADS: u32 = ROWS * CHUNK_VECTORS / WORKGROUP;
const K_LOADS: u32 = KEYS * CHUNK_VECTORS / WORKGROUP;
const V_LOADS: u32 = V_KEYS * V_VECTORS / WORKGROUP;

const_assert ROWS % (LANES_Y * 4u) == 0u && KEYS % (LANES_X * 4u) == 0u && SLICE % (LANES_X * 4u) == 0u;
const_assert CHUNK % 4u == 0u && STAGE_ROWS % 4u == 0u && WORKGROUP % 64u == 0u && WORKGROUP >= ROWS;
const_assert ROWS * CHUNK_VECTORS % WORKGROUP == 0u && KEYS * CHUNK_VECTORS % WORKGROUP == 0u;
const_assert V_KEYS * V_VECTORS % WORKGROUP == 0u && V_KEYS % 4u == 0u;
const_assert KEYS % P_KEYS == 0u && P_KEYS % V_KEYS == 0u && P_KEYS % 4u == 0u;
const_assert CHUNK_VECTORS % CHUNK_UNROLL == 0u && V_KEYS / 4u % V_UNROLL == 0u && LANE_ROWS * OUT_VECTORS <= 32u;

// One piece of workgroup memory, in vectors, used three ways in turn: q and k; the maxima of the rows as
// each lane sees them; p and v. Every vector is stored whole by one invocation.
const Q_SIZE: u32 = ROWS * CHUNK_VECTORS + ROWS / 4u;
const K_SIZE: u32 = KEYS * CHUNK_VECTORS + KEYS / 4u;
const P_SIZE: u32 = P_KEYS * (ROWS / 4u) + P_VECTORS;
const V_SIZE: u32 = V_KEYS * V_VECTORS;
const STATS_STEP: u32 = ROWS / 4u + 1u;
const STATS_SIZE: u32 = LANES_X * STATS_STEP;
const TILE_SIZE: u32 = max(max(Q_SIZE + K_SIZE, P_SIZE + V_SIZE), STATS_SIZE);

var<workgroup> tile: array<vec4<f32>, TILE_SIZE>;
// Of the rows, four a vector: what scores are relative to; the sum of the weights, in the end; what older sums are to be
// multiplied by.
var<workgroup> row_max: array<vec4<f32>, ROWS / 4u>;
var<workgroup> row_sum: array<vec4<f32>, ROWS / 4u>;
var<workgroup> row_rescale: array<vec4<f32>, ROWS / 4u>;
// Head and query of each row.
var<workgroup> row_head_query: array<vec2<u32>, ROWS>;

// A lane's c-th key, from its first on.
fn key_of(c: u32) -> u32 {
    return c / 4u * (LANES_X * 4u) + c % 4u;
}

// Where row n of staged q or k begins: every fourth row is shifted by a vector, which spreads what
// neighbours read (rows 4 or 8 apart) over all banks.
fn tile_row(n: u32) -> u32 {
    return n * CHUNK_VECTORS + n / 4u;
}

// Where key n of staged p begins: all rows' weights of a key.
fn p_row(n: u32) -> u32 {
    return n * (ROWS / 4u) + n / 4u;
}

// row_max and row_rescale of the tile: maxima of this lane's keys, then over the lanes, four rows by one invocation.
fn move_row_max(s: ptr<function, array<vec4<f32>, SCORES>>, x: u32, my_rows: u32, lane: u32, keys_left: u32) {
    let neg_inf = p.mask.neg_inf;
    for (var m = 0u; m < ROW_VECTORS; m++) {
        var most = (*s)[m * LANE_KEYS];
        for (var c = 1u; c < LANE_KEYS; c++) {
            most = max(most, (*s)[m * LANE_KEYS + c]);
        }
        tile[x * STATS_STEP + my_rows + m] = most;
    }
    workgroupBarrier();
    if lane < ROWS / 4u {
        var most = vec4<f32>(neg_inf);
        // Four at a time: all at once would be what the kernel needs most registers for.
        for (var n = 0u; n < min((keys_left + 3u) / 4u, LANES_X); n += 4u) {
            let o = n * STATS_STEP + lane;
            most = max(most, max(max(tile[o], tile[o + STATS_STEP]),
                max(tile[o + 2u * STATS_STEP], tile[o + 3u * STATS_STEP])));
        }
        let old = row_max[lane];
        // The difference is exact where the sum, of large numbers, would be rounded up.
        let moves = most - old > vec4<f32>(RESCALE_THRESHOLD);
        let rescale = vec4<f32>(rescale_of(old.x, most.x), rescale_of(old.y, most.y), rescale_of(old.z, most.z),
            rescale_of(old.w, most.w));
        row_rescale[lane] = select(vec4<f32>(1.0), rescale, moves);
        row_max[lane] = select(old, most, moves);
    }
    workgroupBarrier();
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let rows = p.mask.q_len * p.group;
    let tile_x = id.x + p.first.x;
    let row0 = select(tile_x, tile_x / p.splits, SPLITS) * ROWS;
    let split = select(0u, tile_x % p.splits, SPLITS);
    let col0 = (id.y + p.first.y) * SLICE;
    let z = id.z + p.first.z;
    let b = z / p.kv_heads;
    let kv_head = z % p.kv_heads;
    let head_dim = p.head_dim;
    let value_dim = p.value_dim;
    if row0 >= rows || col0 >= value_dim {
        return;
    }
    let neg_inf = p.mask.neg_inf;
    let last_row = min(row0 + ROWS, rows) - 1u;

    if lane < ROWS {
        row_head_query[lane] = head_query_of(kv_head, min(row0 + lane, last_row));
    }
    if lane < ROWS / 4u {
        row_max[lane] = vec4<f32>(LOWEST);
    }
    let keys = keys_of_rows(b, kv_head, row0, last_row, split, lane);

    // What this invocation stages.
    let stage_row = lane / CHUNK_VECTORS;
    let stage_d = lane % CHUNK_VECTORS * 4u;
    let stage_to = tile_row(stage_row) + lane % CHUNK_VECTORS;
    let stage_key = lane / V_VECTORS;
    let stage_col = min(col0 + lane % V_VECTORS * 4u, (value_dim - 1u) & ~3u);
    var q_from: array<u32, Q_LOADS>;
    for (var n = 0u; n < Q_LOADS; n++) {
        let place = row_head_query[stage_row + n * STAGE_ROWS];
        q_from[n] = view_at(p.q, b, place.x, place.y, 0u);
    }
    let k = k_source(b, kv_head);
    let v = v_source(b, kv_head, 0u);

    // What it computes: 32 neighbours have 4 × 8 blocks, so that what they load differs least.
    let x = lane % 8u + lane / 32u % 2u * 8u;
    let y = lane / 8u % 4u + lane / 64u * 4u;
    // Where its rows of q, its keys, its channels of v and its vectors of rows begin.
    let my_q = tile_row(y * LANE_ROWS);
    let my_k = Q_SIZE + tile_row(x * 4u);
    let my_v = P_SIZE + x;
    let my_rows = y * ROW_VECTORS;

    var acc: array<vec4<f32>, LANE_ROWS * OUT_VECTORS>;
    for (var n = 0u; n < LANE_ROWS * OUT_VECTORS; n++) {
        acc[n] = vec4<f32>();
    }
    // The sums of the weights of this lane's own keys.
    var lane_sums: array<vec4<f32>, ROW_VECTORS>;
    for (var m = 0u; m < ROW_VECTORS; m++) {
        lane_sums[m] = vec4<f32>();
    }

    let align = select(4u, KEYS, HAS_BLOCKS);
    let end = keys.y;
    let last_key = max(end, 1u) - 1u;
    var at = next_tile(b, kv_head, row0, last_row, min(keys.x, end) / align * align, end);
    var k_from: array<u32, K_LOADS>;
    var next_q: array<vec4<f32>, Q_LOADS>;
    var next_k: array<vec4<f32>, K_LOADS>;
    var next_v: array<vec4<f32>, V_LOADS>;
    if at.y != 0u {
        for (var n = 0u; n < Q_LOADS; n++) {
            next_q[n] = load_q(q_from[n], stage_d, head_dim);
        }
        for (var n = 0u; n < K_LOADS; n++) {
            k_from[n] = key_row(k, min(at.x + stage_row + n * STAGE_ROWS, last_key));
            next_k[n] = load_k(k, k_from[n], stage_d, head_dim);
        }
        for (var n = 0u; n < V_LOADS; n++) {
            let j = min(at.x + stage_key + n * STAGE_KEYS, last_key);
            next_v[n] = v_four(v, key_row(v, j), stage_col);
        }
    }
    while at.y != 0u {
        let j0 = at.x;
        let state = at.y;
        at = next_tile(b, kv_head, row0, last_row, j0 + KEYS, end);
        var next_k_from: array<u32, K_LOADS>;
        for (var n = 0u; n < K_LOADS; n++) {
            next_k_from[n] = key_row(k, min(at.x + stage_row + n * STAGE_ROWS, last_key));
        }

        // q · kᵀ: s[m * LANE_KEYS + c] are rows 4m .. 4m + 4 with key c.
        var s: array<vec4<f32>, SCORES>;
        for (var n = 0u; n < SCORES; n++) {
            s[n] = vec4<f32>();
        }
        for (var d0 = 0u; d0 < head_dim; d0 += CHUNK) {
            if d0 + CHUNK > head_dim {
                for (var n = 0u; n < Q_LOADS; n++) {
                    next_q[n] = zero_past(next_q[n], d0 + stage_d, head_dim);
                }
                for (var n = 0u; n < K_LOADS; n++) {
                    next_k[n] = zero_past(next_k[n], d0 + stage_d, head_dim);
                }
            }
            for (var n = 0u; n < Q_LOADS; n++) {
                // The scale in q, not in the exponent's fma: a row of one key is then exactly its value.
                tile[stage_to + n * tile_row(STAGE_ROWS)] = next_q[n] * (p.scale * UNIT);
            }
            for (var n = 0u; n < K_LOADS; n++) {
                tile[Q_SIZE + stage_to + n * tile_row(STAGE_ROWS)] = next_k[n];
            }
            workgroupBarrier();
            // The next chunk travels while this one computes; after the last one the next tile's first.
            let is_last = d0 + CHUNK >= head_dim;
            let d = select(d0 + CHUNK, 0u, is_last) + stage_d;
            for (var n = 0u; n < Q_LOADS; n++) {
                next_q[n] = load_q(q_from[n], d, head_dim);
            }
            for (var n = 0u; n < K_LOADS; n++) {
                next_k[n] = load_k(k, select(k_from[n], next_k_from[n], is_last), d, head_dim);
            }
            // In pairs, here and below: some drivers unroll two turns of this, and then two of that, but not
            // four, and where they do not, their loads wait for the loop's end.
            for (var d8 = 0u; d8 < CHUNK_VECTORS / CHUNK_UNROLL; d8++) {
                for (var d = 0u; d < CHUNK_UNROLL; d++) {
                    let from_k = my_k + d8 * CHUNK_UNROLL + d;
                    let from_q = my_q + d8 * CHUNK_UNROLL + d;
                    for (var m = 0u; m < ROW_VECTORS; m++) {
                        let o = from_q + tile_row(m * 4u);
                        let q0 = tile[o];
                        let q1 = tile[o + CHUNK_VECTORS];
                        let q2 = tile[o + 2u * CHUNK_VECTORS];
                        let q3 = tile[o + 3u * CHUNK_VECTORS];
                        for (var c = 0u; c < LANE_KEYS; c++) {
                            let k = tile[from_k + tile_row(key_of(c))];
                            var t = s[m * LANE_KEYS + c];
                            t = fma(vec4<f32>(q0.x, q1.x, q2.x, q3.x), vec4<f32>(k.x), t);
                            t = fma(vec4<f32>(q0.y, q1.y, q2.y, q3.y), vec4<f32>(k.y), t);
                            t = fma(vec4<f32>(q0.z, q1.z, q2.z, q3.z), vec4<f32>(k.z), t);
                            t = fma(vec4<f32>(q0.w, q1.w, q2.w, q3.w), vec4<f32>(k.w), t);
                            s[m * LANE_KEYS + c] = t;
                        }
                    }
                }
            }
            workgroupBarrier();
        }
        k_from = next_k_from;
        if PER_PAIR_MASK && state == 1u {
            // The vectors take turns in s[0]: one copy of the text, and no indices into registers.
            for (var m = 0u; m < ROW_VECTORS; m++) {
                var queries: array<Query, 4>;
                for (var r = 0u; r < 4u; r++) {
                    let place = row_head_query[(my_rows + m) * 4u + r];
                    queries[r] = query_of(b, place.x, place.y);
                }
                for (var c = 0u; c < LANE_KEYS; c++) {
                    let j = j0 + x * 4u + key_of(c);
                    var t = vec4<f32>(neg_inf);
                    for (var r = 0u; r < 4u; r++) {
                        if j >= max(queries[r].first, keys.x) && j < min(queries[r].end, end) {
                            if mask_mod(queries[r], j) {
                                t[r] = score_mod(s[0][r], queries[r], j);
                            }
                        }
                    }
                    for (var n = 0u; n + 1u < SCORES; n++) {
                        s[n] = s[n + 1u];
                    }
                    s[SCORES - 1u] = t;
                }
            }
        } else if j0 < keys.z || j0 + KEYS > keys.w {
            for (var m = 0u; m < ROW_VECTORS; m++) {
                let o = (my_rows + m) * 4u;
                let front = vec4<u32>(row_keys[o], row_keys[o + 1u]);
                let back = vec4<u32>(row_keys[o + 2u], row_keys[o + 3u]);
                let first = max(vec4<u32>(front.xz, back.xz), vec4<u32>(keys.x));
                let past = min(vec4<u32>(front.yw, back.yw), vec4<u32>(end));
                for (var c = 0u; c < LANE_KEYS; c++) {
                    let j = vec4<u32>(j0 + x * 4u + key_of(c));
                    let n = m * LANE_KEYS + c;
                    s[n] = select(vec4<f32>(neg_inf), s[n], (j >= first) & (j < past));
                }
            }
        }

        // Weights. The sum of all scores of a lane shows at once whether any is −∞ or NaN.
        move_row_max(&s, x, my_rows, lane, end - j0);
        var check = vec4<f32>();
        for (var n = 0u; n < SCORES; n++) {
            check += s[n];
        }
        let all_finite = is_finite(check.x + check.y + check.z + check.w);
        var rescales = false;
        for (var m = 0u; m < ROW_VECTORS; m++) {
            rescales = rescales || any(row_rescale[my_rows + m] != vec4<f32>(1.0));
        }
        if rescales {
            for (var m = 0u; m < ROW_VECTORS; m++) {
                let rescale = row_rescale[my_rows + m];
                lane_sums[m] *= rescale;
                for (var n = 0u; n < OUT_VECTORS; n++) {
                    let o = m * 4u * OUT_VECTORS + n;
                    acc[o] *= rescale.x;
                    acc[o + OUT_VECTORS] *= rescale.y;
                    acc[o + 2u * OUT_VECTORS] *= rescale.z;
                    acc[o + 3u * OUT_VECTORS] *= rescale.w;
                }
            }
        }
        for (var n = 0u; n < SCORES; n++) {
            let t = s[n];
            let high = row_max[my_rows + n / LANE_KEYS];
            var w = exp2((t - high) * (LOG2_E / UNIT));
            var w_sum = w;
            if !all_finite {
                w = select(w, vec4<f32>(), t == vec4<f32>(neg_inf));
                w_sum = select(w, t, are_nan(t));
            }
            s[n] = w;
            lane_sums[n / LANE_KEYS] += w_sum;
        }
        if HAS_DROPOUT {
            for (var m = 0u; m < ROW_VECTORS; m++) {
                for (var r = 0u; r < 4u; r++) {
                    let place = row_head_query[(my_rows + m) * 4u + r];
                    for (var c = 0u; c < LANE_KEYS; c++) {
                        let n = m * LANE_KEYS + c;
                        s[n][r] = apply_dropout(s[n][r], b, place.x, place.y, j0 + x * 4u + key_of(c));
                    }
                }
            }
        }

        // p · v
        let steps = (min(end - j0, KEYS) + V_KEYS - 1u) / V_KEYS;
        for (var step = 0u; step < steps; step++) {
            if step % (P_KEYS / V_KEYS) == 0u {
                let first = step / (P_KEYS / V_KEYS) * P_VECTORS;
                for (var c = 0u; c < LANE_KEYS; c += 4u) {
                    // Whose keys are not of this part wraps around to a large number.
                    let four = c * (LANES_X / 4u) + x - first;
                    if four < P_VECTORS {
                        let to = p_row(four * 4u) + my_rows;
                        for (var n = c; n < c + 4u; n++) {
                            for (var m = 0u; m < ROW_VECTORS; m++) {
                                tile[to + n % 4u * (ROWS / 4u) + m] = s[m * LANE_KEYS + n];
                            }
                        }
                    }
                }
            }
            let j1 = j0 + step * V_KEYS + stage_key;
            if j0 + KEYS > end {
                for (var n = 0u; n < V_LOADS; n++) {
                    next_v[n] = select(vec4<f32>(), next_v[n], j1 + n * STAGE_KEYS < end);
                }
            }
            for (var n = 0u; n < V_LOADS; n++) {
                tile[P_SIZE + lane + n * WORKGROUP] = next_v[n];
            }
            workgroupBarrier();
            let j2 = select(j1 + V_KEYS, at.x + stage_key, step + 1u == steps);
            for (var n = 0u; n < V_LOADS; n++) {
                let j = min(j2 + n * STAGE_KEYS, last_key);
                next_v[n] = v_four(v, key_row(v, j), stage_col);
            }
            let my_p = p_row(step % (P_KEYS / V_KEYS) * V_KEYS) + my_rows;
            for (var j8 = 0u; j8 < V_KEYS / 4u / V_UNROLL; j8++) {
                for (var j = 0u; j < V_UNROLL; j++) {
                    let from_v = my_v + (j8 * V_UNROLL + j) * (4u * V_VECTORS);
                    let from_p = my_p + p_row((j8 * V_UNROLL + j) * 4u);
                    for (var c = 0u; c < 4u; c++) {
                        for (var n = 0u; n < OUT_VECTORS; n++) {
                            let v = tile[from_v + c * V_VECTORS + n * LANES_X];
                            for (var m = 0u; m < ROW_VECTORS; m++) {
                                let w = tile[from_p + c * (ROWS / 4u) + m];
                                let o = m * 4u * OUT_VECTORS + n;
                                acc[o] = fma(vec4<f32>(w.x), v, acc[o]);
                                acc[o + OUT_VECTORS] = fma(vec4<f32>(w.y), v, acc[o + OUT_VECTORS]);
                                acc[o + 2u * OUT_VECTORS] = fma(vec4<f32>(w.z), v, acc[o + 2u * OUT_VECTORS]);
                                acc[o + 3u * OUT_VECTORS] = fma(vec4<f32>(w.w), v, acc[o + 3u * OUT_VECTORS]);
                            }
                        }
                    }
                }
            }
            workgroupBarrier();
        }
    }

    // The sums of the weights over the lanes of a row.
    for (var m = 0u; m < ROW_VECTORS; m++) {
        tile[x * STATS_STEP + my_rows + m] = lane_sums[m];
    }
    workgroupBarrier();
    if lane < ROWS / 4u {
        var total = vec4<f32>();
        for (var n = 0u; n < LANES_X; n++) {
            total += tile[n * STATS_STEP + lane];
        }
        let top = row_max[lane];
        let row = row0 + lane * 4u;
        let ends = mat4x3<f32>(
            finish_row(row_state(top.x, total.x, neg_inf), z, min(row, last_row), split, row <= last_row && col0 == 0u),
            finish_row(row_state(top.y, total.y, neg_inf), z, min(row + 1u, last_row), split, row + 1u <= last_row && col0 == 0u),
            finish_row(row_state(top.z, total.z, neg_inf), z, min(row + 2u, last_row), split, row + 2u <= last_row && col0 == 0u),
            finish_row(row_state(top.w, total.w, neg_inf), z, min(row + 3u, last_row), split, row + 3u <= last_row && col0 == 0u),
        );
        let rows_ends = transpose(ends);
        row_rescale[lane] = rows_ends[0];
        row_max[lane] = rows_ends[1];
        row_sum[lane] = rows_ends[2];
    }
    workgroupBarrier();
    var broken = 0u;
    for (var r = 0u; r < LANE_ROWS; r++) {
        let row = row0 + y * LANE_ROWS + r;
        let scale = row_rescale[my_rows + r / 4u][r % 4u];
        for (var n = 0u; n < OUT_VECTORS; n++) {
            let col = col0 + (n * LANES_X + x) * 4u;
            let sum = acc[r * OUT_VECTORS + n] * scale;
            if row <= last_row && col < value_dim {
                store_row(z, row, split, col, sum);
                broken |= select(0u, 1u << (r * OUT_VECTORS + n), any_nan(sum));
            }
        }
    }
    while broken != 0u {
        let n = firstTrailingBit(broken);
        broken &= broken - 1u;
        let row = y * LANE_ROWS + n / OUT_VECTORS;
        let col = col0 + (n % OUT_VECTORS * LANES_X + x) * 4u;
        let q = query_of(b, row_head_query[row].x, row_head_query[row].y);
        let total = vec2<f32>(row_max[row / 4u][row % 4u], row_sum[row / 4u][row % 4u]);
        store_row(z, row0 + row, split, col, repaired(q, col, total, keys.xy));
    }
}
