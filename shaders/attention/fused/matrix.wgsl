// The loop of fused.wgsl for matrix units: a workgroup takes SUBGROUPS · SUB_ROWS packed rows and
// tiles of KEYS keys. A subgroup has the same SUB_ROWS rows throughout, and holds their sums of the
// output in fragments. Their queries are in fragments too. With Q_IN_MEMORY they stay in workgroup
// memory (as in FlashAttention-2).
//
// Constants: FRAGMENT, SUB_ROWS, SUBGROUPS, KEYS, WORKGROUP, HEAD and VALUE (channels, in whole
// fragments), EXACT (head_dim is HEAD), Q_IN_MEMORY. The code of accesses to workgroup memory is in
// matrix/memory_*.wgsl.
//
// Elements of fragments cannot be accessed. Scores therefore leave through workgroup memory, where
// invocations turn rows into weights. The weights return as f16. The sums of the output cannot be
// scaled by rows either. A row's weights are therefore relative to an origin, not to its maximum.
// The origin is HEADROOM below an earlier maximum, and moves only if a score exceeds that maximum
// by RESCALE_THRESHOLD. Weights are at most e^10 ≈ 2^14.4, which f16 can hold, and small weights
// lose fewer bits. If an origin moves, the kernel computes the tile's weights again, and rescales
// the sums through workgroup memory. With scores of normal size this happens only in the first
// tile, where there is nothing to scale.
//
// An iteration of the loop has two steps, with a barrier after each:
//   output += weights · values of the last tile; scores = queries · keys   (matrix units)
//   scores → weights; the tile's values and the next tile's keys are staged   (other units)
// Workgroups that share a core fill each other's gaps.
//
// The kernel uses neither subgroup operations nor built-in values of subgroups. In one module with
// cooperative matrices, they crash a driver. Invocations are in subgroups in order of their index.
// The kernel treats WIDTH invocations as a subgroup. If real subgroups are narrower, several do the
// same work and store the same values. They must not be wider.
//
// Cost per score, for head_dim = value_dim = D and R = SUB_ROWS: 4 · D operations of the matrix
// units, and one exp2. ROWS · KEYS scores need 2 barriers. Bytes in workgroup memory: 2 · D / R of
// keys and as many of values, 8 of scores, 4 of weights. Staging takes 4 · D / ROWS. Q_IN_MEMORY
// adds 2 · D / KEYS of queries. With D = 64 and R = 16 that is 28 bytes, and 4 to stage (ROWS =
// 64). With D = 128 and R = 16 it is 44, and 4 (ROWS = 128).
//
// Needs: p.dropout_scale, p.head_dim, p.mask, p.q, p.scale, p.value_dim; EXACT, FRAGMENT,
// HAS_BLOCKS, HAS_DROPOUT, HEAD, KEYS, NEXT, PER_PAIR_MASK, Q_IN_MEMORY, RESCALE_THRESHOLD,
// SUBGROUPS, SUB_ROWS, UNIT, VALUE, WORKGROUP; Left, Source, Sums, WorkTile; acc_at, acc_store,
// apply_dropout, are_nan, f16_store4, f32_at4, f32_store, f32_store4, finish_row, head_query_of,
// is_finite, k_source, key_row, keys_of_rows, left_at, load_k, load_q, mask_mod, next_tile,
// query_of_row, right_at, right_transposed_at, row_keys, row_repaired, row_state, score_mod,
// store_row, v_four, v_source, view_at, weight_of, work_tile.
// Gives: F16_LEN, F32_LEN, ROWS; main.

const ROWS: u32 = SUBGROUPS * SUB_ROWS;
const WIDTH: u32 = WORKGROUP / SUBGROUPS;
const ROW_FRAGMENTS: u32 = SUB_ROWS / FRAGMENT;
const HEAD_FRAGMENTS: u32 = HEAD / FRAGMENT;
const VALUE_FRAGMENTS: u32 = VALUE / FRAGMENT;
const KEY_FRAGMENTS: u32 = KEYS / FRAGMENT;

// Rows in workgroup memory have 16 bytes of padding, so that rows eight apart differ in all banks.
// The padding of a row's scores holds one number of each invocation that shares the row. In the end
// it holds the results of finish_row.
const K_STEP: u32 = HEAD + 8u;
const V_STEP: u32 = VALUE + 8u;
const S_STEP: u32 = KEYS + 4u;
const P_STEP: u32 = KEYS + 8u;
const V_FROM: u32 = KEYS * K_STEP;
const P_FROM: u32 = V_FROM + KEYS * V_STEP;
const Q_FROM: u32 = select(0u, P_FROM + ROWS * P_STEP, Q_IN_MEMORY);
const F16_LEN: u32 = P_FROM + ROWS * P_STEP + select(0u, ROWS * K_STEP, Q_IN_MEMORY);
const F32_LEN: u32 = ROWS * S_STEP;
// Queries for fragments pass through the memory of the other data. A pass has at least a quarter of
// their channels. (By rows, subgroups would alternate, and some drivers use twice the registers for
// fragments that are loaded under a condition.)
const Q_PASSING: u32 = select(min((F16_LEN / ROWS - 8u) / FRAGMENT, HEAD_FRAGMENTS), HEAD_FRAGMENTS, Q_IN_MEMORY);
const Q_CHANNELS: u32 = Q_PASSING * FRAGMENT;
const Q_STEP: u32 = Q_CHANNELS + 8u;
const HELD_FRAGMENTS: u32 = select(HEAD_FRAGMENTS, 0u, Q_IN_MEMORY);

const Q_LOADS: u32 = (ROWS * (Q_CHANNELS / 4u) + WORKGROUP - 1u) / WORKGROUP;
// Sums pass through the memory for scores, KEYS channels at a time.
const VALUE_PASSES: u32 = (VALUE_FRAGMENTS + KEY_FRAGMENTS - 1u) / KEY_FRAGMENTS;

const K_LOADS: u32 = (KEYS * (HEAD / 4u) + WORKGROUP - 1u) / WORKGROUP;
const V_LOADS: u32 = (KEYS * (VALUE / 4u) + WORKGROUP - 1u) / WORKGROUP;
// The most loads at once.
const MOST_LOADS: u32 = 8u;
const K_AT_ONCE: u32 = min(K_LOADS, MOST_LOADS);
const V_AT_ONCE: u32 = min(V_LOADS, MOST_LOADS);

// An invocation turns KEYS / ROW_LANES scores of each of LANE_ROWS rows into weights. ROW_LANES
// neighbours share a row.
const ROW_LANES: u32 = max(WORKGROUP / ROWS, 1u);
const LANE_ROWS: u32 = max(ROWS / WORKGROUP, 1u);
const LANE_VECTORS: u32 = KEYS / 4u / ROW_LANES;

const_assert SUB_ROWS % FRAGMENT == 0u && KEYS % FRAGMENT == 0u && HEAD % FRAGMENT == 0u && VALUE % FRAGMENT == 0u;
const_assert HEAD % 8u == 0u && VALUE % 8u == 0u && KEYS % 8u == 0u && ROWS % 8u == 0u && WORKGROUP >= 8u;
const_assert 4u * Q_PASSING >= HEAD_FRAGMENTS;
const_assert ROW_LANES <= 4u && (WORKGROUP % ROWS == 0u || ROWS % WORKGROUP == 0u);
const_assert KEYS % (4u * ROW_LANES) == 0u;

// In units of scores (see UNIT).
const HEADROOM: f32 = select(6.0, 2.0, PER_PAIR_MASK);

// True if registers have space for the next keys or values, besides sums, queries and the scores of
// a row.
const K_EARLY: bool = HEAD + VALUE <= 128u && K_LOADS + V_LOADS <= MOST_LOADS;
const V_EARLY: bool = HEAD + VALUE <= 256u && V_LOADS <= MOST_LOADS;

// Flags of this tile and of the last tile. ABOVE means that a score is too far above its origin.
// RESCALED means that the origin of existing sums moved. Memory that fragments are loaded from must
// start at a multiple of 16 bytes. A compiler can place it after the flags, so all four are one
// variable.
var<workgroup> flags: array<u32, 4>;
const ABOVE: u32 = 0u;
const RESCALED: u32 = 2u;

// The registers of a subgroup: queries (with Q_IN_MEMORY, of one step), and sums of the output.
var<private> queries: array<Left, ROW_FRAGMENTS * max(HELD_FRAGMENTS, 1u)>;
var<private> acc: array<Sums, ROW_FRAGMENTS * VALUE_FRAGMENTS>;
// The registers of an invocation, per row: the origin of weights, their sum, the factor of older
// sums. Then its scores.
var<private> origin: array<f32, LANE_ROWS>;
var<private> row_sum: array<f32, LANE_ROWS>;
var<private> tile_sum: array<f32, LANE_ROWS>;
var<private> factor: array<f32, LANE_ROWS>;
var<private> scores: array<vec4<f32>, LANE_ROWS * LANE_VECTORS>;
// The data that an invocation stages next.
var<private> next_k: array<vec4<f16>, K_AT_ONCE>;
var<private> next_v: array<vec4<f16>, V_AT_ONCE>;

// x = [d..d+4] of a query or key, with zeros from head_dim on.
fn of_head(x: vec4<f16>, d: u32) -> vec4<f16> {
    if EXACT {
        return x;
    } else {
        return select(vec4<f16>(), x, vec4<u32>(d) + NEXT < vec4<u32>(p.head_dim));
    }
}

// The row and first channel of the n-th vec4 that an invocation stages, for rows of `channels`.
fn staged_four(lane: u32, n: u32, channels: u32) -> vec2<u32> {
    let fours = channels / 4u;
    if WORKGROUP % fours == 0u {
        return vec2<u32>(lane / fours + n * (WORKGROUP / fours), lane % fours * 4u);
    } else {
        let e = lane + n * WORKGROUP;
        return vec2<u32>(e / fours, e % fours * 4u);
    }
}

// The r-th row whose scores an invocation turns into weights, and the n-th of its vectors of keys.
fn my_row(lane: u32, r: u32) -> u32 {
    return lane / ROW_LANES + r * WORKGROUP;
}

fn my_key(lane: u32, n: u32) -> u32 {
    return (n * ROW_LANES + lane % ROW_LANES) * 4u;
}

// Stages channels of all rows' queries, from fragment h0 on, for loads into fragments.
fn stage_queries(work: WorkTile, h0: u32, lane: u32) {
    for (var n = 0u; n < Q_LOADS; n++) {
        let e = staged_four(lane, n, Q_CHANNELS);
        if e.x < ROWS {
            let place = head_query_of(work.kv_head, min(work.row0 + e.x, work.last_row));
            let d = h0 * FRAGMENT + e.y;
            let x = load_q(view_at(p.q, work.b, place.x, place.y, 0u), d, p.head_dim);
            f16_store4(Q_FROM + e.x * Q_STEP + e.y, of_head(vec4<f16>(x), d));
        }
    }
}

// A fragment of a subgroup's staged queries.
fn staged_query(sub_row: u32, m: u32, h: u32) -> Left {
    return left_at(Q_FROM + (sub_row + m * FRAGMENT) * Q_STEP + h * FRAGMENT, Q_STEP);
}

fn load_queries(work: WorkTile, sub_row: u32, lane: u32) {
    if Q_IN_MEMORY {
        stage_queries(work, 0u, lane);
        return;
    }
    /* unrolled */ for (var h0 = 0u; h0 < HELD_FRAGMENTS; h0 += Q_PASSING) {
        workgroupBarrier();
        stage_queries(work, h0, lane);
        workgroupBarrier();
        /* unrolled */ for (var h = h0; h < min(h0 + Q_PASSING, HELD_FRAGMENTS); h++) {
            /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                queries[m * HELD_FRAGMENTS + h] = staged_query(sub_row, m, h - h0);
            }
        }
    }
    workgroupBarrier();
}

// Loads K_AT_ONCE keys of an invocation, from load `first` on.
fn load_keys(k: Source, j0: u32, last_key: u32, first: u32, lane: u32) {
    /* unrolled */ for (var n = 0u; n < K_AT_ONCE; n++) {
        let e = staged_four(lane, first + n, HEAD);
        next_k[n] = vec4<f16>(load_k(k, key_row(k, min(j0 + e.x, last_key)), e.y, p.head_dim));
    }
}

fn store_keys(first: u32, lane: u32) {
    /* unrolled */ for (var n = 0u; n < K_AT_ONCE; n++) {
        let e = staged_four(lane, first + n, HEAD);
        if e.x < KEYS {
            f16_store4(e.x * K_STEP + e.y, of_head(next_k[n], e.y));
        }
    }
}

fn stage_keys(k: Source, j0: u32, last_key: u32, lane: u32) {
    for (var first = 0u; first < K_LOADS; first += K_AT_ONCE) {
        load_keys(k, j0, last_key, first, lane);
        store_keys(first, lane);
    }
}

fn load_values(v: Source, j0: u32, last_key: u32, first: u32, lane: u32) {
    /* unrolled */ for (var n = 0u; n < V_AT_ONCE; n++) {
        let e = staged_four(lane, first + n, VALUE);
        next_v[n] = vec4<f16>(v_four(v, key_row(v, min(j0 + e.x, last_key)), min(e.y, (p.value_dim - 1u) & ~3u)));
    }
}

fn store_values(j0: u32, end: u32, first: u32, lane: u32) {
    /* unrolled */ for (var n = 0u; n < V_AT_ONCE; n++) {
        let e = staged_four(lane, first + n, VALUE);
        if e.x < KEYS {
            // Elements past the last key can be NaN, which a weight of zero would not hide.
            f16_store4(V_FROM + e.x * V_STEP + e.y, select(vec4<f16>(), next_v[n], j0 + e.x < end));
        }
    }
}

fn stage_values(v: Source, j0: u32, end: u32, last_key: u32, lane: u32) {
    for (var first = 0u; first < V_LOADS; first += V_AT_ONCE) {
        load_values(v, j0, last_key, first, lane);
        store_values(j0, end, first, lane);
    }
}

// Stores the scores of the staged keys in workgroup memory.
fn multiply_keys(sub_row: u32) {
    if Q_IN_MEMORY {
        multiply_keys_by_channels(sub_row);
        return;
    }
    /* unrolled */ for (var j = 0u; j < KEY_FRAGMENTS; j++) {
        var s: array<Sums, ROW_FRAGMENTS>;
        /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
            s[m] = Sums();
        }
        /* unrolled */ for (var h = 0u; h < HELD_FRAGMENTS; h++) {
            let right = right_transposed_at(j * FRAGMENT * K_STEP + h * FRAGMENT, K_STEP);
            /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                s[m] = coopMultiplyAdd(queries[m * HELD_FRAGMENTS + h], right, s[m]);
            }
        }
        /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
            acc_store((sub_row + m * FRAGMENT) * S_STEP + j * FRAGMENT, S_STEP, s[m]);
        }
    }
}

// As multiply_keys, but loads queries again: once for all keys.
fn multiply_keys_by_channels(sub_row: u32) {
    var s: array<Sums, ROW_FRAGMENTS * KEY_FRAGMENTS>;
    /* unrolled */ for (var n = 0u; n < ROW_FRAGMENTS * KEY_FRAGMENTS; n++) {
        s[n] = Sums();
    }
    for (var h = 0u; h < HEAD_FRAGMENTS; h++) {
        /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
            queries[m] = staged_query(sub_row, m, h);
        }
        /* unrolled */ for (var j = 0u; j < KEY_FRAGMENTS; j++) {
            let right = right_transposed_at(j * FRAGMENT * K_STEP + h * FRAGMENT, K_STEP);
            /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                s[m * KEY_FRAGMENTS + j] = coopMultiplyAdd(queries[m], right, s[m * KEY_FRAGMENTS + j]);
            }
        }
    }
    /* unrolled */ for (var j = 0u; j < KEY_FRAGMENTS; j++) {
        /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
            acc_store((sub_row + m * FRAGMENT) * S_STEP + j * FRAGMENT, S_STEP, s[m * KEY_FRAGMENTS + j]);
        }
    }
}

// acc += weights · values of the tile.
fn add_values(sub_row: u32) {
    for (var j = 0u; j < KEY_FRAGMENTS; j++) {
        var w: array<Left, ROW_FRAGMENTS>;
        /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
            w[m] = left_at(P_FROM + (sub_row + m * FRAGMENT) * P_STEP + j * FRAGMENT, P_STEP);
        }
        /* unrolled */ for (var c = 0u; c < VALUE_FRAGMENTS; c++) {
            let right = right_at(V_FROM + j * FRAGMENT * V_STEP + c * FRAGMENT, V_STEP);
            /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                acc[m * VALUE_FRAGMENTS + c] = coopMultiplyAdd(w[m], right, acc[m * VALUE_FRAGMENTS + c]);
            }
        }
    }
}

// Reads an invocation's masked scores into registers.
fn read_scores(work: WorkTile, keys: vec4<u32>, j0: u32, asks_pairs: bool, lane: u32) {
    /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
        let row = my_row(lane, r);
        /* unrolled */ for (var n = 0u; n < LANE_VECTORS; n++) {
            scores[r * LANE_VECTORS + n] = f32_at4(row * S_STEP + my_key(lane, n)) * (p.scale * UNIT);
        }
    }
    if asks_pairs {
        mask_pairs(work, keys, j0, lane);
    } else if j0 < keys.z || j0 + KEYS > keys.w {
        mask_edges(keys, j0, lane);
    }
}

fn mask_pairs(work: WorkTile, keys: vec4<u32>, j0: u32, lane: u32) {
    for (var r = 0u; r < LANE_ROWS; r++) {
        let query = query_of_row(work.b, work.kv_head, min(work.row0 + my_row(lane, r), work.last_row));
        let seen = vec2<u32>(max(query.first, keys.x), min(query.end, keys.y));
        // The loop rotates the vectors through scores[0]: one copy of the code, no indices into
        // registers.
        for (var n = 0u; n < LANE_VECTORS; n++) {
            let j = j0 + my_key(lane, n);
            var t = vec4<f32>(p.mask.neg_inf);
            /* unrolled */ for (var c = 0u; c < 4u; c++) {
                if j + c >= seen.x && j + c < seen.y {
                    if mask_mod(query, j + c) {
                        t[c] = score_mod(scores[0][c], query, j + c);
                    }
                }
            }
            /* unrolled */ for (var m = 0u; m < LANE_ROWS * LANE_VECTORS - 1u; m++) {
                scores[m] = scores[m + 1u];
            }
            scores[LANE_ROWS * LANE_VECTORS - 1u] = t;
        }
    }
}

fn mask_edges(keys: vec4<u32>, j0: u32, lane: u32) {
    /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
        let bounds = row_keys[my_row(lane, r)];
        let seen = vec2<u32>(max(bounds.x, keys.x), min(bounds.y, keys.y));
        /* unrolled */ for (var n = 0u; n < LANE_VECTORS; n++) {
            let j = vec4<u32>(j0 + my_key(lane, n)) + NEXT;
            let x = scores[r * LANE_VECTORS + n];
            scores[r * LANE_VECTORS + n] =
                select(vec4<f32>(p.mask.neg_inf), x, (j >= vec4<u32>(seen.x)) & (j < vec4<u32>(seen.y)));
        }
    }
}

// Moves origins to the rows' maxima. The invocations that share a row exchange their maxima.
fn move_origins(parity: u32, lane: u32) {
    /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
        var most = vec4<f32>(p.mask.neg_inf);
        /* unrolled */ for (var n = 0u; n < LANE_VECTORS; n++) {
            most = max(most, scores[r * LANE_VECTORS + n]);
        }
        f32_store(my_row(lane, r) * S_STEP + KEYS + lane % ROW_LANES, max(max(most.x, most.y), max(most.z, most.w)));
    }
    workgroupBarrier();
    /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
        let all = f32_at4(my_row(lane, r) * S_STEP + KEYS);
        var most = all.x;
        /* unrolled */ for (var n = 1u; n < ROW_LANES; n++) {
            most = max(most, all[n]);
        }
        // The difference is exact. The sum of large numbers would be rounded up.
        if most - origin[r] > HEADROOM + RESCALE_THRESHOLD {
            let to = most - HEADROOM;
            // Before a key was seen, there is nothing to scale.
            if origin[r] != p.mask.neg_inf {
                factor[r] = weight_of(origin[r] - to);
                flags[RESCALED + parity] = 1u;
            }
            row_sum[r] *= factor[r];
            origin[r] = to;
        }
    }
}

fn weights_from(t: vec4<f32>, relative: f32) -> vec4<f32> {
    return vec4<f32>(weight_of(t.x - relative), weight_of(t.y - relative), weight_of(t.z - relative),
        weight_of(t.w - relative));
}

// Stores the weights of an invocation's scores in workgroup memory, and computes their sums.
// Returns true if a score is too far above its origin.
fn weigh(work: WorkTile, j0: u32, lane: u32) -> bool {
    var is_above = false;
    /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
        var most = scores[r * LANE_VECTORS];
        var check = scores[r * LANE_VECTORS];
        /* unrolled */ for (var n = 1u; n < LANE_VECTORS; n++) {
            most = max(most, scores[r * LANE_VECTORS + n]);
            check += scores[r * LANE_VECTORS + n];
        }
        is_above = is_above
            || max(max(most.x, most.y), max(most.z, most.w)) - origin[r] > HEADROOM + RESCALE_THRESHOLD;
        // The sum of all scores shows if any score is −∞ or NaN.
        let all_finite = is_finite(check.x + check.y + check.z + check.w);
        let relative = select(origin[r], 0.0, origin[r] == p.mask.neg_inf);
        // One branch for all vectors, as in fused/gpu.wgsl. Weights use the registers of their
        // scores.
        var sum = vec4<f32>();
        if all_finite {
            /* unrolled */ for (var n = 0u; n < LANE_VECTORS; n++) {
                let w = weights_from(scores[r * LANE_VECTORS + n], relative);
                scores[r * LANE_VECTORS + n] = w;
                sum += w;
            }
        } else {
            /* unrolled */ for (var n = 0u; n < LANE_VECTORS; n++) {
                let t = scores[r * LANE_VECTORS + n];
                let w = select(weights_from(t, relative), vec4<f32>(), t == vec4<f32>(p.mask.neg_inf));
                scores[r * LANE_VECTORS + n] = w;
                sum += select(w, t, are_nan(t));
            }
        }
        /* unrolled */ for (var n = 0u; n < LANE_VECTORS; n++) {
            var w = scores[r * LANE_VECTORS + n];
            if HAS_DROPOUT {
                w = with_dropout(work, w, my_row(lane, r), j0 + my_key(lane, n));
            }
            f16_store4(P_FROM + my_row(lane, r) * P_STEP + my_key(lane, n), vec4<f16>(w));
        }
        tile_sum[r] = sum.x + sum.y + sum.z + sum.w;
    }
    return is_above;
}

// The weights without the dropped ones. Dropout's factor, which f16 might not hold, is applied at
// the end.
fn with_dropout(work: WorkTile, w: vec4<f32>, row: u32, j: u32) -> vec4<f32> {
    let place = head_query_of(work.kv_head, min(work.row0 + row, work.last_row));
    var x = w;
    /* unrolled */ for (var c = 0u; c < 4u; c++) {
        x[c] = select(x[c], 0.0, apply_dropout(1.0, work.b, place.x, place.y, j + c) == 0.0);
    }
    return x;
}

// Moves the sums of the channels of pass `pass_index` to and from the memory for scores.
fn store_sums(sub_row: u32, pass_index: u32) {
    /* unrolled */ for (var c = 0u; c < VALUE_FRAGMENTS; c++) {
        if c / KEY_FRAGMENTS == pass_index {
            /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                acc_store((sub_row + m * FRAGMENT) * S_STEP + c % KEY_FRAGMENTS * FRAGMENT, S_STEP, acc[m * VALUE_FRAGMENTS + c]);
            }
        }
    }
}

fn load_sums(sub_row: u32, pass_index: u32) {
    /* unrolled */ for (var c = 0u; c < VALUE_FRAGMENTS; c++) {
        if c / KEY_FRAGMENTS == pass_index {
            /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                acc[m * VALUE_FRAGMENTS + c] = acc_at((sub_row + m * FRAGMENT) * S_STEP + c % KEY_FRAGMENTS * FRAGMENT, S_STEP);
            }
        }
    }
}

fn rescale_sums(sub_row: u32, lane: u32) {
    for (var pass_index = 0u; pass_index < VALUE_PASSES; pass_index++) {
        store_sums(sub_row, pass_index);
        workgroupBarrier();
        /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
            for (var n = 0u; n < LANE_VECTORS; n++) {
                let o = my_row(lane, r) * S_STEP + my_key(lane, n);
                f32_store4(o, f32_at4(o) * factor[r]);
            }
        }
        workgroupBarrier();
        load_sums(sub_row, pass_index);
        workgroupBarrier();
    }
}

// Finishes the rows. The results are in the padding of their scores.
fn finish_rows(work: WorkTile, lane: u32) {
    /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
        f32_store(my_row(lane, r) * S_STEP + KEYS + lane % ROW_LANES, row_sum[r]);
    }
    workgroupBarrier();
    var ends: array<vec3<f32>, LANE_ROWS>;
    /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
        let row = my_row(lane, r);
        let all = f32_at4(row * S_STEP + KEYS);
        var sum = all.x;
        /* unrolled */ for (var n = 1u; n < ROW_LANES; n++) {
            sum += all[n];
        }
        let packed = min(work.row0 + row, work.last_row);
        let stores = lane % ROW_LANES == 0u && work.row0 + row <= work.last_row;
        ends[r] = finish_row(row_state(origin[r], sum, p.mask.neg_inf), work.z, packed, work.split, stores);
        if HAS_DROPOUT {
            ends[r].x *= p.dropout_scale;
        }
    }
    workgroupBarrier();
    /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
        if lane % ROW_LANES == 0u {
            f32_store4(my_row(lane, r) * S_STEP + KEYS, vec4<f32>(ends[r], 0.0));
        }
    }
}

fn store_rows(work: WorkTile, keys: vec2<u32>, sub_row: u32, lane: u32) {
    for (var pass_index = 0u; pass_index < VALUE_PASSES; pass_index++) {
        workgroupBarrier();
        store_sums(sub_row, pass_index);
        workgroupBarrier();
        for (var n = lane; n < ROWS * (KEYS / 4u); n += WORKGROUP) {
            let row = n / (KEYS / 4u);
            let start = n % (KEYS / 4u) * 4u;
            let col = pass_index * KEYS + start;
            if work.row0 + row <= work.last_row && col < p.value_dim {
                let end = f32_at4(row * S_STEP + KEYS).xyz;
                let sum = f32_at4(row * S_STEP + start) * end.x;
                let x = row_repaired(work.z, work.row0 + row, col, sum, end, keys);
                store_row(work.z, work.row0 + row, work.split, col, x);
            }
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let work = work_tile(id);
    if work.row0 > work.last_row {
        return;
    }
    let sub_row = lane / WIDTH * SUB_ROWS;
    if lane < 4u {
        flags[lane] = 0u;
    }
    let keys = keys_of_rows(work.b, work.kv_head, work.row0, work.last_row, work.split, lane);
    let end = keys.y;
    let last_key = max(end, 1u) - 1u;
    let align = select(4u, KEYS, HAS_BLOCKS);
    var at = next_tile(work, min(keys.x, end) / align * align, vec2<u32>(), end, lane);
    load_queries(work, sub_row, lane);
    /* unrolled */ for (var n = 0u; n < ROW_FRAGMENTS * VALUE_FRAGMENTS; n++) {
        acc[n] = Sums();
    }
    /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
        origin[r] = p.mask.neg_inf;
    }

    let k = k_source(work.b, work.kv_head);
    let v = v_source(work.b, work.kv_head, 0u);
    if at.y != 0u {
        stage_keys(k, at.x, last_key, lane);
    }
    workgroupBarrier();
    var is_first = true;
    var parity = 0u;
    while at.y != 0u {
        let j0 = at.x;
        let asks_pairs = PER_PAIR_MASK && at.y == 1u;
        multiply_keys(sub_row);
        at = next_tile(work, j0 + KEYS, at.zw, end, lane);
        workgroupBarrier();

        // Staged data is loaded while weights are computed, if registers have space.
        if V_EARLY {
            load_values(v, j0, last_key, 0u, lane);
        }
        if K_EARLY {
            load_keys(k, at.x, last_key, 0u, lane);
        }
        if lane == 0u {
            // The flags of the tile before, which no invocation reads any more.
            flags[ABOVE + (parity ^ 1u)] = 0u;
            flags[RESCALED + (parity ^ 1u)] = 0u;
        }
        /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
            factor[r] = 1.0;
        }
        // First assumes that no origin has to move. If one has to, repeats.
        var moves = is_first;
        var staged = false;
        loop {
            read_scores(work, keys, j0, asks_pairs, lane);
            if moves {
                move_origins(parity, lane);
            }
            if weigh(work, j0, lane) {
                flags[ABOVE + parity] = 1u;
            }
            if !staged {
                if V_EARLY {
                    store_values(j0, end, 0u, lane);
                } else {
                    stage_values(v, j0, end, last_key, lane);
                }
                if K_EARLY {
                    store_keys(0u, lane);
                } else {
                    stage_keys(k, at.x, last_key, lane);
                }
                staged = true;
            }
            workgroupBarrier();
            if moves || flags[ABOVE + parity] == 0u {
                break;
            }
            moves = true;
        }
        /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
            row_sum[r] += tile_sum[r];
        }
        if flags[RESCALED + parity] != 0u {
            rescale_sums(sub_row, lane);
        }
        add_values(sub_row);
        is_first = false;
        parity ^= 1u;
    }

    finish_rows(work, lane);
    store_rows(work, keys.xy, sub_row, lane);
}
