// The loop of fused.wgsl for GPUs: a workgroup takes ROWS packed rows and walks the keys KEYS at a
// time. Its invocations form a grid of LANES_X × LANES_Y. Each holds LANE_ROWS × LANE_KEYS scores
// and LANE_ROWS × SLICE / LANES_X sums of the output, always of the same rows.
//
// Constants: ROWS, KEYS, WORKGROUP
//            LANES_X  invocations that share a row: 8 or 16
//            CHUNK    channels of q and k per staging
//            SLICE    channels of v held
//            V_KEYS   rows of v per staging
//            P_KEYS   weights in workgroup memory at once
//            AHEAD    true if the next staged data is loaded into registers in advance
// Head and value dimension are not compiled in.
//
// Lower bound of the arithmetic, per row and key: head_dim (in every slice) + value_dim
// multiply-adds and one exp2. Difference, maximum, two additions and store take about 6 other
// instructions. The scale is multiplied into q during staging.
//
// Lower bound in workgroup memory, per invocation and channel or key:
//
//   q · kᵀ   LANE_ROWS · LANE_KEYS multiply-adds against (LANE_ROWS + LANE_KEYS) / 4 vector loads:
//            32 against 3 for 8 × 4, 64 against 4 for 8 × 8
//   p · v    LANE_ROWS · SLICE / LANES_X against (LANE_ROWS + SLICE / LANES_X) / 4: for 8 rows 32
//            against 3 with 4 channels of an invocation, 64 against 4 with 8
//
// Lower bound in global memory, elements per multiply-add: 1 / ROWS + 1 / KEYS in q · kᵀ, 1 / ROWS
// in p · v. The kernel stages q again for every tile of keys, but only the first time from outside
// a cache.
//
// If no mask cuts a tile, 62 to 76 % of its instructions are multiply-adds (NVK, RADV). Tiles with
// 8 × 8 scores have most. On Qualcomm's GPUs (Turnip) it is 62 to 67 %. The count includes scalar
// instructions and waits; benches/SHADERS.md lists the rest.
//
// The steps of a tile of keys:
//
// - q and k are staged by chunks → scores in registers.
// - The maxima of the rows pass through workgroup memory → weights in registers.
// - P_KEYS weights at a time are in workgroup memory, with V_KEYS rows of v.
//
// If AHEAD, the next staged data is loaded into registers while the invocations compute.
//
// Arrays of an invocation are in registers only if constants index them. Loops over them are marked
// to be unrolled (src/kernel/unroll.rs). Where one copy of a loop's code is enough, the loop
// rotates the vectors through the array's first element.
//
// Needs: p.fixed_split, p.head_dim, p.mask, p.q, p.scale, p.value_dim; AHEAD, CHUNK, HAS_BLOCKS,
// HAS_DROPOUT, KEYS, LANES_X, LOG2_E, LOWEST, PER_PAIR_MASK, P_KEYS, RESCALE_THRESHOLD, ROWS,
// SLICE, UNIT, V_KEYS, WORKGROUP; Query, Source, WorkTile; all_finite, apply_dropout, are_nan,
// component, finish_checked, head_query_of, is_finite, k_source, key_row, keys_of_rows, load_k,
// load_q, mask_mod, next_tile, query_of, repaired, rescale_of, row_keys, row_state, score_mod,
// store_row, v_four, v_source, view_at, work_tile, zero_past.
// Gives: main.

const LANES_Y: u32 = WORKGROUP / LANES_X;
const LANE_ROWS: u32 = ROWS / LANES_Y;
const LANE_KEYS: u32 = KEYS / LANES_X;
// The number of neighbouring keys among them.
const KEY_RUN: u32 = min(LANE_KEYS, 4u);
const ROW_VECTORS: u32 = LANE_ROWS / 4u;
const OUT_VECTORS: u32 = SLICE / LANES_X / 4u;
const SCORES: u32 = ROW_VECTORS * LANE_KEYS;
const CHUNK_VECTORS: u32 = CHUNK / 4u;
const SLICE_VECTORS: u32 = SLICE / 4u;
const P_VECTORS: u32 = P_KEYS / 4u;

const STAGE_ROWS: u32 = WORKGROUP / CHUNK_VECTORS;
const STAGE_KEYS: u32 = WORKGROUP / SLICE_VECTORS;
const Q_LOADS: u32 = ROWS * CHUNK_VECTORS / WORKGROUP;
const K_LOADS: u32 = KEYS * CHUNK_VECTORS / WORKGROUP;
const V_LOADS: u32 = V_KEYS * SLICE_VECTORS / WORKGROUP;

const_assert ROWS % (LANES_Y * 4u) == 0u && KEYS % (LANES_X * KEY_RUN) == 0u && SLICE % (LANES_X * 4u) == 0u;
const_assert 4u % KEY_RUN == 0u && CHUNK % 4u == 0u && STAGE_ROWS % 4u == 0u && WORKGROUP % 64u == 0u && WORKGROUP >= ROWS;
const_assert ROWS * CHUNK_VECTORS % WORKGROUP == 0u && KEYS * CHUNK_VECTORS % WORKGROUP == 0u;
const_assert V_KEYS * SLICE_VECTORS % WORKGROUP == 0u && V_KEYS % 4u == 0u;
const_assert KEYS % P_KEYS == 0u && P_KEYS % V_KEYS == 0u && P_KEYS % 4u == 0u;
const_assert LANE_ROWS * OUT_VECTORS <= 32u;

// A block of workgroup memory, in vectors. Three uses alternate: q and k, the maxima of the rows
// per lane, p and v. One invocation stores each vector as a whole.
const Q_SIZE: u32 = ROWS * CHUNK_VECTORS + ROWS / 4u;
const K_SIZE: u32 = KEYS * CHUNK_VECTORS + KEYS / 4u;
const P_SIZE: u32 = P_KEYS * (ROWS / 4u) + P_VECTORS;
const V_SIZE: u32 = V_KEYS * SLICE_VECTORS;
const STATS_STEP: u32 = ROWS / 4u + 1u;
const STATS_SIZE: u32 = LANES_X * STATS_STEP;
const TILE_SIZE: u32 = max(max(Q_SIZE + K_SIZE, P_SIZE + V_SIZE), STATS_SIZE);

var<workgroup> tile: array<vec4<f32>, TILE_SIZE>;
// Per row, in vectors of four: the reference point of scores, the sum of weights, the factor of
// older sums. The sum of weights is stored at the end.
var<workgroup> row_max: array<vec4<f32>, ROWS / 4u>;
var<workgroup> row_sum: array<vec4<f32>, ROWS / 4u>;
var<workgroup> row_rescale: array<vec4<f32>, ROWS / 4u>;
// The head and the query of each row.
var<workgroup> row_head_query: array<vec2<u32>, ROWS>;

// The offset of a lane's c-th key from its first key.
fn key_of(c: u32) -> u32 {
    return c / KEY_RUN * (LANES_X * KEY_RUN) + c % KEY_RUN;
}

// The start of row n of staged q or k. Every fourth row is shifted by a vector. This spreads the
// reads of neighbours (rows 2, 4 or 8 apart) over all banks.
fn tile_row(n: u32) -> u32 {
    return n * CHUNK_VECTORS + n / 4u;
}

// The start of key n of staged p: the weights of all rows for a key.
fn p_row(n: u32) -> u32 {
    return n * (ROWS / 4u) + n / 4u;
}

// Registers of an invocation: its scores of a tile, which become weights, and its sums of the
// output. The last array has the sums of the weights of its keys. Rows 4m .. 4m + 4 of key c are in
// scores[m * LANE_KEYS + c].
var<private> scores: array<vec4<f32>, SCORES>;
var<private> acc: array<vec4<f32>, LANE_ROWS * OUT_VECTORS>;
var<private> lane_sums: array<vec4<f32>, ROW_VECTORS>;
// Data that an invocation stages: the starts of its rows of q and of its keys, and the loaded data.
// The keys belong to this tile and to the next tile.
var<private> q_from: array<u32, Q_LOADS>;
var<private> k_from: array<u32, K_LOADS>;
var<private> next_k_from: array<u32, K_LOADS>;
var<private> next_q: array<vec4<f32>, Q_LOADS>;
var<private> next_k: array<vec4<f32>, K_LOADS>;
var<private> next_v: array<vec4<f32>, V_LOADS>;

// An invocation: its index n, and the block (x, y) of LANE_ROWS × LANE_KEYS that it computes.
struct Lane {
    n: u32,
    x: u32,
    y: u32,
}

// 32 neighbours compute 4 × 8 blocks, so that they load as few different data as possible.
fn lane_of(n: u32) -> Lane {
    let block = n / 32u;
    return Lane(n, n % 8u + block % (LANES_X / 8u) * 8u, n / 8u % 4u + block / (LANES_X / 8u) * 4u);
}

// The first vector of an invocation's rows.
fn my_rows(lane: Lane) -> u32 {
    return lane.y * ROW_VECTORS;
}

// The row or key of q and k that an invocation stages, and the channel of a chunk.
fn stage_row(lane: Lane) -> u32 {
    return lane.n / CHUNK_VECTORS;
}

fn stage_d(lane: Lane) -> u32 {
    return lane.n % CHUNK_VECTORS * 4u;
}

// The key and the channel of v that an invocation stages.
fn stage_key(lane: Lane) -> u32 {
    return lane.n / SLICE_VECTORS;
}

fn stage_col(lane: Lane, col0: u32) -> u32 {
    return min(col0 + lane.n % SLICE_VECTORS * 4u, (p.value_dim - 1u) & ~3u);
}

// Finds the starts of the key rows from j0 on.
fn find_keys(k: Source, j0: u32, last_key: u32, lane: Lane) {
    /* unrolled */ for (var n = 0u; n < K_LOADS; n++) {
        next_k_from[n] = key_row(k, min(j0 + stage_row(lane) + n * STAGE_ROWS, last_key));
    }
}

fn use_found_keys() {
    /* unrolled */ for (var n = 0u; n < K_LOADS; n++) {
        k_from[n] = next_k_from[n];
    }
}

// Loads channels d0 .. d0 + CHUNK of q and of the keys into registers.
fn load_chunk(k: Source, d0: u32, of_next_tile: bool, lane: Lane) {
    let d = d0 + stage_d(lane);
    /* unrolled */ for (var n = 0u; n < Q_LOADS; n++) {
        next_q[n] = load_q(q_from[n], d, p.head_dim);
    }
    /* unrolled */ for (var n = 0u; n < K_LOADS; n++) {
        next_k[n] = load_k(k, select(k_from[n], next_k_from[n], of_next_tile), d, p.head_dim);
    }
}

fn load_values(v: Source, j0: u32, col: u32, last_key: u32, lane: Lane) {
    /* unrolled */ for (var n = 0u; n < V_LOADS; n++) {
        next_v[n] = v_four(v, key_row(v, min(j0 + stage_key(lane) + n * STAGE_KEYS, last_key)), col);
    }
}

// Stores the loaded chunk, channels from d0 on, in workgroup memory.
fn store_chunk(d0: u32, lane: Lane) {
    if d0 + CHUNK > p.head_dim {
        /* unrolled */ for (var n = 0u; n < Q_LOADS; n++) {
            next_q[n] = zero_past(next_q[n], d0 + stage_d(lane), p.head_dim);
        }
        /* unrolled */ for (var n = 0u; n < K_LOADS; n++) {
            next_k[n] = zero_past(next_k[n], d0 + stage_d(lane), p.head_dim);
        }
    }
    let to = tile_row(stage_row(lane)) + lane.n % CHUNK_VECTORS;
    /* unrolled */ for (var n = 0u; n < Q_LOADS; n++) {
        // The scale is in q, not in the exponent's fma. A row of one key is then exactly its value.
        tile[to + n * tile_row(STAGE_ROWS)] = next_q[n] * (p.scale * UNIT);
    }
    /* unrolled */ for (var n = 0u; n < K_LOADS; n++) {
        tile[Q_SIZE + to + n * tile_row(STAGE_ROWS)] = next_k[n];
    }
}

fn store_values(j0: u32, end: u32, lane: Lane) {
    let j = j0 + stage_key(lane);
    /* unrolled */ for (var n = 0u; n < V_LOADS; n++) {
        // Elements past the last key can be NaN, which a weight of zero would not hide.
        tile[P_SIZE + lane.n + n * WORKGROUP] = select(vec4<f32>(), next_v[n], j + n * STAGE_KEYS < end);
    }
}

// scores += the staged chunk of q · kᵀ
fn multiply_keys(lane: Lane) {
    let from_q = tile_row(lane.y * LANE_ROWS);
    let from_k = Q_SIZE + tile_row(lane.x * KEY_RUN);
    // Not unrolled, and the value loop below only four times. FXC takes seconds for each further
    // copy of the code.
    for (var d = 0u; d < CHUNK_VECTORS; d++) {
        /* unrolled */ for (var m = 0u; m < ROW_VECTORS; m++) {
            let o = from_q + d + tile_row(m * 4u);
            let q0 = tile[o];
            let q1 = tile[o + CHUNK_VECTORS];
            let q2 = tile[o + 2u * CHUNK_VECTORS];
            let q3 = tile[o + 3u * CHUNK_VECTORS];
            /* unrolled */ for (var c = 0u; c < LANE_KEYS; c++) {
                let k = tile[from_k + d + tile_row(key_of(c))];
                var t = scores[m * LANE_KEYS + c];
                t = fma(vec4<f32>(q0.x, q1.x, q2.x, q3.x), vec4<f32>(k.x), t);
                t = fma(vec4<f32>(q0.y, q1.y, q2.y, q3.y), vec4<f32>(k.y), t);
                t = fma(vec4<f32>(q0.z, q1.z, q2.z, q3.z), vec4<f32>(k.z), t);
                t = fma(vec4<f32>(q0.w, q1.w, q2.w, q3.w), vec4<f32>(k.w), t);
                scores[m * LANE_KEYS + c] = t;
            }
        }
    }
}

// Sets scores to −∞ where a query does not see a key. Applies bias and softcap to the other scores,
// pair by pair.
fn mask_pairs(work: WorkTile, j0: u32, keys: vec4<u32>, lane: Lane) {
    for (var m = 0u; m < ROW_VECTORS; m++) {
        var queries: array<Query, 4>;
        /* unrolled */ for (var r = 0u; r < 4u; r++) {
            let place = row_head_query[(my_rows(lane) + m) * 4u + r];
            queries[r] = query_of(work.b, place.x, place.y);
        }
        // The loop rotates the vectors through scores[0].
        for (var c = 0u; c < LANE_KEYS; c++) {
            let j = j0 + lane.x * KEY_RUN + key_of(c);
            var t = vec4<f32>(p.mask.neg_inf);
            /* unrolled */ for (var r = 0u; r < 4u; r++) {
                if j >= max(queries[r].first, keys.x) && j < min(queries[r].end, keys.y) {
                    if mask_mod(queries[r], j) {
                        t[r] = score_mod(scores[0][r], queries[r], j);
                    }
                }
            }
            /* unrolled */ for (var n = 0u; n < SCORES - 1u; n++) {
                scores[n] = scores[n + 1u];
            }
            scores[SCORES - 1u] = t;
        }
    }
}

fn mask_edges(j0: u32, keys: vec4<u32>, lane: Lane) {
    /* unrolled */ for (var m = 0u; m < ROW_VECTORS; m++) {
        let o = (my_rows(lane) + m) * 4u;
        let front = vec4<u32>(row_keys[o], row_keys[o + 1u]);
        let back = vec4<u32>(row_keys[o + 2u], row_keys[o + 3u]);
        let first = max(vec4<u32>(front.xz, back.xz), vec4<u32>(keys.x));
        let past = min(vec4<u32>(front.yw, back.yw), vec4<u32>(keys.y));
        /* unrolled */ for (var c = 0u; c < LANE_KEYS; c++) {
            let j = vec4<u32>(j0 + lane.x * KEY_RUN + key_of(c));
            let x = scores[m * LANE_KEYS + c];
            scores[m * LANE_KEYS + c] = select(vec4<f32>(p.mask.neg_inf), x, (j >= first) & (j < past));
        }
    }
}

// Updates row_max and row_rescale for the tile: maxima of this lane's keys, then over the lanes.
// One invocation handles four rows.
fn move_row_max(keys_left: u32, lane: Lane) {
    /* unrolled */ for (var m = 0u; m < ROW_VECTORS; m++) {
        var most = scores[m * LANE_KEYS];
        /* unrolled */ for (var c = 1u; c < LANE_KEYS; c++) {
            most = max(most, scores[m * LANE_KEYS + c]);
        }
        tile[lane.x * STATS_STEP + my_rows(lane) + m] = most;
    }
    workgroupBarrier();
    if lane.n < ROWS / 4u {
        var most = vec4<f32>(p.mask.neg_inf);
        // Four at a time: all at once would set the kernel's register maximum.
        for (var n = 0u; n < min((keys_left + KEY_RUN - 1u) / KEY_RUN, LANES_X); n += 4u) {
            let o = n * STATS_STEP + lane.n;
            most = max(most, max(max(tile[o], tile[o + STATS_STEP]),
                max(tile[o + 2u * STATS_STEP], tile[o + 3u * STATS_STEP])));
        }
        let old = row_max[lane.n];
        // The difference is exact. The sum of large numbers would be rounded up.
        let moves = most - old > vec4<f32>(RESCALE_THRESHOLD);
        let rescale = vec4<f32>(rescale_of(old.x, most.x), rescale_of(old.y, most.y), rescale_of(old.z, most.z),
            rescale_of(old.w, most.w));
        row_rescale[lane.n] = select(vec4<f32>(1.0), rescale, moves);
        row_max[lane.n] = select(old, most, moves);
    }
    workgroupBarrier();
}

// Rescales the sums to the new maxima.
fn rescale_sums(lane: Lane) {
    var rescales = false;
    for (var m = 0u; m < ROW_VECTORS; m++) {
        rescales = rescales || any(row_rescale[my_rows(lane) + m] != vec4<f32>(1.0));
    }
    if rescales {
        /* unrolled */ for (var m = 0u; m < ROW_VECTORS; m++) {
            let rescale = row_rescale[my_rows(lane) + m];
            lane_sums[m] *= rescale;
            /* unrolled */ for (var n = 0u; n < OUT_VECTORS; n++) {
                acc[m * 4u * OUT_VECTORS + n] *= rescale.x;
                acc[(m * 4u + 1u) * OUT_VECTORS + n] *= rescale.y;
                acc[(m * 4u + 2u) * OUT_VECTORS + n] *= rescale.z;
                acc[(m * 4u + 3u) * OUT_VECTORS + n] *= rescale.w;
            }
        }
    }
}

// Turns scores into weights.
fn weigh(lane: Lane) {
    // The sum of all scores of a lane shows if any score is −∞ or NaN.
    var check = vec4<f32>();
    /* unrolled */ for (var n = 0u; n < SCORES; n++) {
        check += scores[n];
    }
    // One branch for all vectors. With one per vector, drivers move the values of both sides
    // between registers.
    if is_finite(check.x + check.y + check.z + check.w) {
        /* unrolled */ for (var m = 0u; m < ROW_VECTORS; m++) {
            let high = row_max[my_rows(lane) + m];
            /* unrolled */ for (var c = 0u; c < LANE_KEYS; c++) {
                let w = exp2((scores[m * LANE_KEYS + c] - high) * (LOG2_E / UNIT));
                scores[m * LANE_KEYS + c] = w;
                lane_sums[m] += w;
            }
        }
    } else {
        /* unrolled */ for (var m = 0u; m < ROW_VECTORS; m++) {
            let high = row_max[my_rows(lane) + m];
            /* unrolled */ for (var c = 0u; c < LANE_KEYS; c++) {
                let t = scores[m * LANE_KEYS + c];
                let w = select(exp2((t - high) * (LOG2_E / UNIT)), vec4<f32>(), t == vec4<f32>(p.mask.neg_inf));
                scores[m * LANE_KEYS + c] = w;
                lane_sums[m] += select(w, t, are_nan(t));
            }
        }
    }
}

fn drop_weights(b: u32, j0: u32, lane: Lane) {
    /* unrolled */ for (var m = 0u; m < ROW_VECTORS; m++) {
        /* unrolled */ for (var r = 0u; r < 4u; r++) {
            let place = row_head_query[(my_rows(lane) + m) * 4u + r];
            /* unrolled */ for (var c = 0u; c < LANE_KEYS; c++) {
                let j = j0 + lane.x * KEY_RUN + key_of(c);
                scores[m * LANE_KEYS + c][r] = apply_dropout(scores[m * LANE_KEYS + c][r], b, place.x, place.y, j);
            }
        }
    }
}

// Stores P_KEYS weights in workgroup memory, from the first-th run of the tile on.
fn store_weights(first: u32, lane: Lane) {
    /* unrolled */ for (var c = 0u; c < LANE_KEYS; c += KEY_RUN) {
        // The index of keys outside this part wraps around to a large number.
        let run = c / KEY_RUN * LANES_X + lane.x - first;
        if run < P_KEYS / KEY_RUN {
            let to = p_row(run * KEY_RUN) + my_rows(lane);
            /* unrolled */ for (var n = 0u; n < KEY_RUN; n++) {
                /* unrolled */ for (var m = 0u; m < ROW_VECTORS; m++) {
                    tile[to + n * (ROWS / 4u) + m] = scores[m * LANE_KEYS + c + n];
                }
            }
        }
    }
}

// acc += p · v of the V_KEYS staged values. Their weights start at the first-th staged weight.
fn add_values(first: u32, lane: Lane) {
    for (var j0 = 0u; j0 < V_KEYS; j0 += 4u) {
        let from_p = p_row(first + j0) + my_rows(lane);
        let from_v = P_SIZE + lane.x + j0 * SLICE_VECTORS;
        /* unrolled */ for (var j = 0u; j < 4u; j++) {
            /* unrolled */ for (var n = 0u; n < OUT_VECTORS; n++) {
                let v = tile[from_v + j * SLICE_VECTORS + n * LANES_X];
                /* unrolled */ for (var m = 0u; m < ROW_VECTORS; m++) {
                    let w = tile[from_p + p_row(j) + m];
                    acc[m * 4u * OUT_VECTORS + n] = fma(vec4<f32>(w.x), v, acc[m * 4u * OUT_VECTORS + n]);
                    acc[(m * 4u + 1u) * OUT_VECTORS + n] = fma(vec4<f32>(w.y), v, acc[(m * 4u + 1u) * OUT_VECTORS + n]);
                    acc[(m * 4u + 2u) * OUT_VECTORS + n] = fma(vec4<f32>(w.z), v, acc[(m * 4u + 2u) * OUT_VECTORS + n]);
                    acc[(m * 4u + 3u) * OUT_VECTORS + n] = fma(vec4<f32>(w.w), v, acc[(m * 4u + 3u) * OUT_VECTORS + n]);
                }
            }
        }
    }
}

// Sums the weights over the lanes of a row and finishes the rows. The results are in row_rescale,
// row_max and row_sum.
fn finish_rows(work: WorkTile, keys: vec2<u32>, lane: Lane) {
    /* unrolled */ for (var m = 0u; m < ROW_VECTORS; m++) {
        tile[lane.x * STATS_STEP + my_rows(lane) + m] = lane_sums[m];
    }
    workgroupBarrier();
    if lane.n < ROWS / 4u {
        var total = vec4<f32>();
        for (var n = 0u; n < LANES_X; n++) {
            total += tile[n * STATS_STEP + lane.n];
        }
        let top = row_max[lane.n];
        let row = work.row0 + lane.n * 4u;
        var ends = mat3x4<f32>();
        // Not unrolled: FXC takes seconds for each further copy of the code.
        for (var r = 0u; r < 4u; r++) {
            let end = end_of(work, row + r, keys, component(top, r), component(total, r));
            let is_r = vec4<u32>(0u, 1u, 2u, 3u) == vec4<u32>(r);
            ends[0] = select(ends[0], vec4<f32>(end.x), is_r);
            ends[1] = select(ends[1], vec4<f32>(end.y), is_r);
            ends[2] = select(ends[2], vec4<f32>(end.z), is_r);
        }
        row_rescale[lane.n] = ends[0];
        row_max[lane.n] = ends[1];
        row_sum[lane.n] = ends[2];
    }
    workgroupBarrier();
}

fn end_of(work: WorkTile, row: u32, keys: vec2<u32>, top: f32, total: f32) -> vec3<f32> {
    let stores = row <= work.last_row && work.slice == 0u;
    return finish_checked(row_state(top, total, p.mask.neg_inf), work.z, min(row, work.last_row), work.split, keys, stores);
}

fn store_rows(work: WorkTile, keys: vec2<u32>, lane: Lane) {
    var broken = 0u;
    /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
        let row = work.row0 + lane.y * LANE_ROWS + r;
        let scale = row_rescale[my_rows(lane) + r / 4u][r % 4u];
        /* unrolled */ for (var n = 0u; n < OUT_VECTORS; n++) {
            let col = work.slice * SLICE + (n * LANES_X + lane.x) * 4u;
            let sum = acc[r * OUT_VECTORS + n] * scale;
            if row <= work.last_row && col < p.value_dim {
                store_row(work.z, row, work.split, col, sum);
                broken |= select(0u, 1u << (r * OUT_VECTORS + n), !all_finite(sum));
            }
        }
    }
    while broken != 0u {
        let n = firstTrailingBit(broken);
        broken &= broken - 1u;
        let row = lane.y * LANE_ROWS + n / OUT_VECTORS;
        let col = work.slice * SLICE + (n % OUT_VECTORS * LANES_X + lane.x) * 4u;
        let q = query_of(work.b, row_head_query[row].x, row_head_query[row].y);
        let total = vec2<f32>(row_max[row / 4u][row % 4u], row_sum[row / 4u][row % 4u]);
        store_row(work.z, work.row0 + row, work.split, col, repaired(q, col, total, keys));
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let work = work_tile(id);
    let col0 = work.slice * SLICE;
    if work.row0 > work.last_row || col0 >= p.value_dim {
        return;
    }
    let lane = lane_of(index);
    if index < ROWS {
        row_head_query[index] = head_query_of(work.kv_head, min(work.row0 + index, work.last_row));
    }
    if index < ROWS / 4u {
        row_max[index] = vec4<f32>(LOWEST);
    }
    let keys = keys_of_rows(work.b, work.kv_head, work.row0, work.last_row, work.split, index);
    let end = keys.y;
    let last_key = max(end, 1u) - 1u;
    /* unrolled */ for (var n = 0u; n < Q_LOADS; n++) {
        let place = row_head_query[stage_row(lane) + n * STAGE_ROWS];
        q_from[n] = view_at(p.q, work.b, place.x, place.y, 0u);
    }
    let k = k_source(work.b, work.kv_head);
    let v = v_source(work.b, work.kv_head, 0u);
    let v_col = stage_col(lane, col0);

    // With fixed splits, a row's tiles do not depend on the first key of its neighbours.
    let align = select(4u, KEYS, HAS_BLOCKS || p.fixed_split != 0u);
    // A split without keys has no tile.
    let start = select(keys.x / align * align, end, keys.x >= end);
    var at = next_tile(work, start, vec2<u32>(), end, index);
    if AHEAD && at.y != 0u {
        find_keys(k, at.x, last_key, lane);
        use_found_keys();
        load_chunk(k, 0u, false, lane);
        load_values(v, at.x, v_col, last_key, lane);
    }
    while at.y != 0u {
        let j0 = at.x;
        let asks_pairs = PER_PAIR_MASK && at.y == 1u;
        at = next_tile(work, j0 + KEYS, at.zw, end, index);

        find_keys(k, select(j0, at.x, AHEAD), last_key, lane);
        if !AHEAD {
            use_found_keys();
        }
        /* unrolled */ for (var n = 0u; n < SCORES; n++) {
            scores[n] = vec4<f32>();
        }
        for (var d0 = 0u; d0 < p.head_dim; d0 += CHUNK) {
            if !AHEAD {
                load_chunk(k, d0, false, lane);
            }
            store_chunk(d0, lane);
            workgroupBarrier();
            if AHEAD {
                // After the last chunk, loads the next tile's first chunk.
                let is_last = d0 + CHUNK >= p.head_dim;
                load_chunk(k, select(d0 + CHUNK, 0u, is_last), is_last, lane);
            }
            multiply_keys(lane);
            workgroupBarrier();
        }
        if AHEAD {
            use_found_keys();
        }

        if asks_pairs {
            mask_pairs(work, j0, keys, lane);
        } else if j0 < keys.z || j0 + KEYS > keys.w {
            mask_edges(j0, keys, lane);
        }
        move_row_max(end - j0, lane);
        rescale_sums(lane);
        weigh(lane);
        if HAS_DROPOUT {
            drop_weights(work.b, j0, lane);
        }

        let steps = (min(end - j0, KEYS) + V_KEYS - 1u) / V_KEYS;
        for (var step = 0u; step < steps; step++) {
            let j1 = j0 + step * V_KEYS;
            if !AHEAD {
                load_values(v, j1, v_col, last_key, lane);
            }
            if step % (P_KEYS / V_KEYS) == 0u {
                store_weights(step / (P_KEYS / V_KEYS) * (P_KEYS / KEY_RUN), lane);
            }
            store_values(j1, end, lane);
            workgroupBarrier();
            if AHEAD {
                load_values(v, select(j1 + V_KEYS, at.x, step + 1u == steps), v_col, last_key, lane);
            }
            add_values(step % (P_KEYS / V_KEYS) * V_KEYS, lane);
            workgroupBarrier();
        }
    }

    finish_rows(work, keys.xy, lane);
    store_rows(work, keys.xy, lane);
}
