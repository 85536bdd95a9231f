// The loop of fused.wgsl for matrix units: a workgroup takes SUBGROUPS · SUB_ROWS packed rows and walks the keys KEYS at a
// time. A subgroup has the same SUB_ROWS rows throughout: their queries and their sums of the output stay in its fragments.
//
// Constants: FRAGMENT, SUB_ROWS, SUBGROUPS, KEYS, WORKGROUP, HEAD and VALUE (channels, in whole fragments), EXACT (head_dim
// is HEAD). The text of the accesses to workgroup memory is in matrix/memory_*.wgsl.
//
// Fragments cannot be looked into, so scores leave through workgroup memory, where invocations turn rows of them into
// weights, and weights come back as f16. The sums of the output cannot be scaled by rows either. So a row's weights are
// relative to an origin that is not its maximum but HEADROOM below an earlier one, and moves only when a score is RESCALE_THRESHOLD
// above that: weights are at most e^10 ≈ 2^14.4, which f16 holds, and small ones keep their bits for longer. When an
// origin moves, the sums go through workgroup memory once. On scores of normal size that never happens.
//
// A turn of the loop, between two barriers each:
//   output += weights · values of one tile; scores of the next = queries · its keys   (matrix units)
//   scores → weights; the tile's values and the keys of the one after are staged      (the rest)
// Workgroups that share a core fill each other's gaps.
//
// Counted per score, for head_dim = value_dim = D and R = SUB_ROWS: 4 · D operations of the matrix units; in workgroup memory
// 2 · D / R bytes of keys and as many of values, 8 of scores, 4 of weights, and 4 · D / ROWS to stage; one exp2; 2 barriers per
// ROWS · KEYS scores. With D = 128 and R = 32 that is 28 bytes, and 4 (ROWS = 128); with R = 16 it is 44.
//
// Needs: p.dropout_scale, p.first, p.group, p.head_dim, p.kv_heads, p.mask, p.q, p.scale, p.splits, p.value_dim;
// EXACT, FRAGMENT, HAS_BLOCKS, HAS_DROPOUT, HEAD, KEYS, NEXT, PER_PAIR_MASK, RESCALE_THRESHOLD, SPLITS, SUBGROUPS,
// SUB_ROWS, UNIT, VALUE, WORKGROUP; Left, Sums; acc_at, acc_store, apply_dropout, are_nan, f16_store4, f32_at4,
// f32_store4, finish_row, head_query_of, is_finite, k_source, key_row, keys_of_rows, left_at, load_k, load_q,
// mask_mod, next_tile, query_of_row, right_at, right_transposed_at, row_keys, row_repaired, row_state, score_mod,
// store_row, v_four, v_source, view_at, weight_of.
// Gives: F16_LEN, F32_LEN, ROWS; main.

const ROWS: u32 = SUBGROUPS * SUB_ROWS;
const ROW_FRAGMENTS: u32 = SUB_ROWS / FRAGMENT;
const HEAD_FRAGMENTS: u32 = HEAD / FRAGMENT;
const VALUE_FRAGMENTS: u32 = VALUE / FRAGMENT;
const KEY_FRAGMENTS: u32 = KEYS / FRAGMENT;

// Rows in workgroup memory are 16 bytes longer than what they hold, so that those eight apart differ in all banks.
const K_STEP: u32 = HEAD + 8u;
const V_STEP: u32 = VALUE + 8u;
const S_STEP: u32 = KEYS + 4u;
const P_STEP: u32 = KEYS + 8u;
const V_FROM: u32 = KEYS * K_STEP;
const P_FROM: u32 = V_FROM + KEYS * V_STEP;
const F16_LEN: u32 = P_FROM + ROWS * P_STEP;
const F32_LEN: u32 = ROWS * S_STEP;
// Queries pass through the same room, a quarter of their channels at least at a time. (By rows it would be subgroups in
// turn, and fragments that are loaded under a condition take twice the registers with some drivers.)
const Q_FRAGMENTS: u32 = min((F16_LEN / ROWS - 8u) / FRAGMENT, HEAD_FRAGMENTS);
const Q_CHANNELS: u32 = Q_FRAGMENTS * FRAGMENT;
const Q_STEP: u32 = Q_CHANNELS + 8u;

const Q_LOADS: u32 = (ROWS * (Q_CHANNELS / 4u) + WORKGROUP - 1u) / WORKGROUP;
// Sums pass through the room for scores, so many channels as a row has keys at a time. Which, is asked of every fragment:
// one that an index chooses is in no register, unless the driver unrolls the loop.
const VALUE_PASSES: u32 = (VALUE_FRAGMENTS + KEY_FRAGMENTS - 1u) / KEY_FRAGMENTS;

const K_LOADS: u32 = (KEYS * (HEAD / 4u) + WORKGROUP - 1u) / WORKGROUP;
const V_LOADS: u32 = (KEYS * (VALUE / 4u) + WORKGROUP - 1u) / WORKGROUP;

// An invocation turns KEYS / ROW_LANES scores of each of LANE_ROWS rows into weights; ROW_LANES neighbours share a row.
const ROW_LANES: u32 = max(WORKGROUP / ROWS, 1u);
const LANE_ROWS: u32 = max(ROWS / WORKGROUP, 1u);
const LANE_VECTORS: u32 = KEYS / 4u / ROW_LANES;

const_assert SUB_ROWS % FRAGMENT == 0u && KEYS % FRAGMENT == 0u && HEAD % FRAGMENT == 0u && VALUE % FRAGMENT == 0u;
const_assert HEAD % 8u == 0u && VALUE % 8u == 0u && KEYS % 8u == 0u && ROWS % 8u == 0u && WORKGROUP >= 8u;
const_assert 4u * Q_FRAGMENTS >= HEAD_FRAGMENTS;
const_assert WORKGROUP % ROWS == 0u || ROWS % WORKGROUP == 0u;
const_assert KEYS % (4u * ROW_LANES) == 0u && (ROW_LANES == 1u || ROW_LANES == 2u || ROW_LANES == 4u);

// In units of scores (see UNIT).
const HEADROOM: f32 = select(6.0, 2.0, PER_PAIR_MASK);

// Beside these sums and queries registers hold the scores of a row, and the keys that come next only if few.
const K_EARLY: bool = HEAD + VALUE <= 128u;

// Whether an origin has moved: of this tile, and of the last. Two of four: what fragments are loaded from must begin at 16
// bytes, wherever a compiler puts it after this.
var<workgroup> rescaled: array<u32, 4>;

// x = [d..d+4] of a query or key, with zeros from head_dim on.
fn of_head(x: vec4<f16>, d: u32) -> vec4<f16> {
    if EXACT {
        return x;
    }
    return select(vec4<f16>(), x, vec4<u32>(d) + NEXT < vec4<u32>(p.head_dim));
}

// Row and first channel of the n-th four that an invocation stages of rows of so many channels.
fn staged_four(lane: u32, n: u32, channels: u32) -> vec2<u32> {
    let fours = channels / 4u;
    if WORKGROUP % fours == 0u {
        return vec2<u32>(lane / fours + n * (WORKGROUP / fours), lane % fours * 4u);
    }
    let e = lane + n * WORKGROUP;
    return vec2<u32>(e / fours, e % fours * 4u);
}

// Where the sums of fragments m, c pass.
fn acc_slot(sub_row: u32, m: u32, c: u32) -> u32 {
    return (sub_row + m * FRAGMENT) * S_STEP + c % KEY_FRAGMENTS * FRAGMENT;
}

// The largest over the neighbours that share a row.
fn reduce_max(x: f32) -> f32 {
    var most = x;
    if ROW_LANES > 1u {
        most = max(most, subgroupShuffleXor(most, 1u));
    }
    if ROW_LANES > 2u {
        most = max(most, subgroupShuffleXor(most, 2u));
    }
    return most;
}

fn reduce_sum(x: f32) -> f32 {
    var sum = x;
    if ROW_LANES > 1u {
        sum += subgroupShuffleXor(sum, 1u);
    }
    if ROW_LANES > 2u {
        sum += subgroupShuffleXor(sum, 2u);
    }
    return sum;
}

// So many channels of all rows' queries, where fragments can be loaded from.
fn stage_queries(b: u32, kv_head: u32, row0: u32, last_row: u32, h0: u32, lane: u32) {
    workgroupBarrier();
    for (var n = 0u; n < Q_LOADS; n++) {
        let e = staged_four(lane, n, Q_CHANNELS);
        if e.x < ROWS {
            let place = head_query_of(kv_head, min(row0 + e.x, last_row));
            let d = h0 * FRAGMENT + e.y;
            let x = load_q(view_at(p.q, b, place.x, place.y, 0u), d, p.head_dim);
            f16_store4(e.x * Q_STEP + e.y, of_head(vec4<f16>(x), d));
        }
    }
    workgroupBarrier();
}

// Of what is staged of a subgroup's queries.
fn q_fragment(sub_row: u32, m: u32, h: u32) -> Left {
    return left_at((sub_row + m * FRAGMENT) * Q_STEP + h * FRAGMENT, Q_STEP);
}

// Whether a row is of one of the subgroups from first on.
fn row_in_pass(row: u32, first: u32, subgroups: u32) -> bool {
    return row / SUB_ROWS >= first && row / SUB_ROWS - first < subgroups;
}

@compute @workgroup_size(WORKGROUP)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_id) subgroup_id: u32,
    @builtin(num_subgroups) subgroups: u32,
) {
    // Subgroups as wide as planned go through this once. Were they wider, fewer would take turns; were they narrower, those
    // too many repeat the last one's work.
    for (var first = 0u; first < SUBGROUPS; first += subgroups) {
        attend(id, lane, first, min(first + subgroup_id, SUBGROUPS - 1u), subgroups);
        workgroupBarrier();
    }
}

fn attend(id: vec3<u32>, lane: u32, first: u32, subgroup: u32, subgroups: u32) {
    let rows = p.mask.q_len * p.group;
    let tile_x = id.x + p.first.x;
    let row0 = select(tile_x, tile_x / p.splits, SPLITS) * ROWS;
    let split = select(0u, tile_x % p.splits, SPLITS);
    let z = id.z + p.first.z;
    let b = z / p.kv_heads;
    let kv_head = z % p.kv_heads;
    let head_dim = p.head_dim;
    let value_dim = p.value_dim;
    if row0 >= rows {
        return;
    }
    let neg_inf = p.mask.neg_inf;
    let last_row = min(row0 + ROWS, rows) - 1u;
    let sub_row = subgroup * SUB_ROWS;
    if lane < 2u {
        rescaled[lane] = 0u;
    }
    let keys = keys_of_rows(b, kv_head, row0, last_row, split, lane);
    let end = keys.y;
    let last_key = max(end, 1u) - 1u;
    let align = select(4u, KEYS, HAS_BLOCKS);
    var at = next_tile(b, kv_head, row0, last_row, min(keys.x, end) / align * align, end);

    var q: array<Left, ROW_FRAGMENTS * HEAD_FRAGMENTS>;
    // Written out, for the same reason.
    stage_queries(b, kv_head, row0, last_row, 0u, lane);
    for (var m = 0u; m < ROW_FRAGMENTS; m++) {
        for (var h = 0u; h < Q_FRAGMENTS; h++) {
            q[m * HEAD_FRAGMENTS + h] = q_fragment(sub_row, m, h);
        }
    }
    if Q_FRAGMENTS < HEAD_FRAGMENTS {
        stage_queries(b, kv_head, row0, last_row, Q_FRAGMENTS, lane);
        for (var m = 0u; m < ROW_FRAGMENTS; m++) {
            for (var h = Q_FRAGMENTS; h < min(2u * Q_FRAGMENTS, HEAD_FRAGMENTS); h++) {
                q[m * HEAD_FRAGMENTS + h] = q_fragment(sub_row, m, h - Q_FRAGMENTS);
            }
        }
    }
    if 2u * Q_FRAGMENTS < HEAD_FRAGMENTS {
        stage_queries(b, kv_head, row0, last_row, 2u * Q_FRAGMENTS, lane);
        for (var m = 0u; m < ROW_FRAGMENTS; m++) {
            for (var h = 2u * Q_FRAGMENTS; h < min(3u * Q_FRAGMENTS, HEAD_FRAGMENTS); h++) {
                q[m * HEAD_FRAGMENTS + h] = q_fragment(sub_row, m, h - 2u * Q_FRAGMENTS);
            }
        }
    }
    if 3u * Q_FRAGMENTS < HEAD_FRAGMENTS {
        stage_queries(b, kv_head, row0, last_row, 3u * Q_FRAGMENTS, lane);
        for (var m = 0u; m < ROW_FRAGMENTS; m++) {
            for (var h = 3u * Q_FRAGMENTS; h < min(4u * Q_FRAGMENTS, HEAD_FRAGMENTS); h++) {
                q[m * HEAD_FRAGMENTS + h] = q_fragment(sub_row, m, h - 3u * Q_FRAGMENTS);
            }
        }
    }
    var acc: array<Sums, ROW_FRAGMENTS * VALUE_FRAGMENTS>;
    for (var n = 0u; n < ROW_FRAGMENTS * VALUE_FRAGMENTS; n++) {
        acc[n] = Sums();
    }
    workgroupBarrier();

    let k = k_source(b, kv_head);
    let v = v_source(b, kv_head, 0u);
    if at.y != 0u {
        for (var n = 0u; n < K_LOADS; n++) {
            let e = staged_four(lane, n, HEAD);
            if e.x < KEYS {
                let x = load_k(k, key_row(k, min(at.x + e.x, last_key)), e.y, head_dim);
                f16_store4(e.x * K_STEP + e.y, of_head(vec4<f16>(x), e.y));
            }
        }
    }

    // Of this invocation's rows.
    let my_row = select(lane, lane / ROW_LANES, ROW_LANES > 1u);
    let row_lane = lane % ROW_LANES;
    var origin: array<f32, LANE_ROWS>;
    var row_sum: array<f32, LANE_ROWS>;
    var factor: array<f32, LANE_ROWS>;
    for (var r = 0u; r < LANE_ROWS; r++) {
        origin[r] = neg_inf;
        row_sum[r] = 0.0;
        factor[r] = 1.0;
    }
    var pending = false;
    var parity = 0u;
    loop {
        // Keys of this tile, and values and weights of the one before, are in place.
        workgroupBarrier();
        if pending {
            if rescaled[parity ^ 1u] != 0u {
                for (var pass_index = 0u; pass_index < VALUE_PASSES; pass_index++) {
                    for (var c = 0u; c < VALUE_FRAGMENTS; c++) {
                        if c / KEY_FRAGMENTS == pass_index {
                            for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                                acc_store(acc_slot(sub_row, m, c), S_STEP, acc[m * VALUE_FRAGMENTS + c]);
                            }
                        }
                    }
                    workgroupBarrier();
                    for (var r = 0u; r < LANE_ROWS; r++) {
                        let start = (my_row + r * WORKGROUP) * S_STEP + row_lane * 4u;
                        for (var n = 0u; n < LANE_VECTORS; n++) {
                            let o = start + n * 4u * ROW_LANES;
                            f32_store4(o, f32_at4(o) * factor[r]);
                        }
                    }
                    workgroupBarrier();
                    for (var c = 0u; c < VALUE_FRAGMENTS; c++) {
                        if c / KEY_FRAGMENTS == pass_index {
                            for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                                acc[m * VALUE_FRAGMENTS + c] = acc_at(acc_slot(sub_row, m, c), S_STEP);
                            }
                        }
                    }
                    workgroupBarrier();
                }
            }
            for (var j = 0u; j < KEY_FRAGMENTS; j++) {
                var w: array<Left, ROW_FRAGMENTS>;
                for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                    w[m] = left_at(P_FROM + (sub_row + m * FRAGMENT) * P_STEP + j * FRAGMENT, P_STEP);
                }
                for (var c = 0u; c < VALUE_FRAGMENTS; c++) {
                    let right = right_at(V_FROM + j * FRAGMENT * V_STEP + c * FRAGMENT, V_STEP);
                    for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                        let o = m * VALUE_FRAGMENTS + c;
                        acc[o] = coopMultiplyAdd(w[m], right, acc[o]);
                    }
                }
            }
        }
        if at.y == 0u {
            break;
        }
        let j0 = at.x;
        let state = at.y;
        for (var j = 0u; j < KEY_FRAGMENTS; j++) {
            var s: array<Sums, ROW_FRAGMENTS>;
            for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                s[m] = Sums();
            }
            for (var h = 0u; h < HEAD_FRAGMENTS; h++) {
                let right = right_transposed_at(j * FRAGMENT * K_STEP + h * FRAGMENT, K_STEP);
                for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                    s[m] = coopMultiplyAdd(q[m * HEAD_FRAGMENTS + h], right, s[m]);
                }
            }
            for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                acc_store((sub_row + m * FRAGMENT) * S_STEP + j * FRAGMENT, S_STEP, s[m]);
            }
        }
        at = next_tile(b, kv_head, row0, last_row, j0 + KEYS, end);
        workgroupBarrier();

        // What is staged travels while weights are computed, as far as registers hold it.
        var next_v: array<vec4<f16>, V_LOADS>;
        var next_k: array<vec4<f16>, K_LOADS>;
        for (var n = 0u; n < V_LOADS; n++) {
            let e = staged_four(lane, n, VALUE);
            let j = min(j0 + e.x, last_key);
            next_v[n] = vec4<f16>(v_four(v, key_row(v, j), min(e.y, (value_dim - 1u) & ~3u)));
        }
        for (var n = 0u; n < select(0u, K_LOADS, K_EARLY); n++) {
            let e = staged_four(lane, n, HEAD);
            next_k[n] = vec4<f16>(load_k(k, key_row(k, min(at.x + e.x, last_key)), e.y, head_dim));
        }

        if lane == 0u {
            // Of the tile before, which nobody reads any more.
            rescaled[parity ^ 1u] = 0u;
        }
        for (var r = 0u; r < LANE_ROWS; r++) {
            let row = my_row + r * WORKGROUP;
            let start = row * S_STEP;
            var s: array<vec4<f32>, LANE_VECTORS>;
            for (var n = 0u; n < LANE_VECTORS; n++) {
                s[n] = f32_at4(start + (n * ROW_LANES + row_lane) * 4u) * (p.scale * UNIT);
            }
            if PER_PAIR_MASK && state == 1u {
                let query = query_of_row(b, kv_head, min(row0 + row, last_row));
                let seen = vec2<u32>(max(query.first, keys.x), min(query.end, end));
                for (var n = 0u; n < LANE_VECTORS; n++) {
                    // The vectors take turns in s[0]: one copy of the text, and no indices into registers.
                    let j = j0 + (n * ROW_LANES + row_lane) * 4u;
                    var t = vec4<f32>(neg_inf);
                    for (var c = 0u; c < 4u; c++) {
                        if j + c >= seen.x && j + c < seen.y {
                            if mask_mod(query, j + c) {
                                t[c] = score_mod(s[0][c], query, j + c);
                            }
                        }
                    }
                    for (var m = 0u; m + 1u < LANE_VECTORS; m++) {
                        s[m] = s[m + 1u];
                    }
                    s[LANE_VECTORS - 1u] = t;
                }
            } else if j0 < keys.z || j0 + KEYS > keys.w {
                let bounds = row_keys[row];
                let seen = vec2<u32>(max(bounds.x, keys.x), min(bounds.y, end));
                for (var n = 0u; n < LANE_VECTORS; n++) {
                    let j = vec4<u32>(j0 + (n * ROW_LANES + row_lane) * 4u) + NEXT;
                    s[n] = select(vec4<f32>(neg_inf), s[n], (j >= vec4<u32>(seen.x)) & (j < vec4<u32>(seen.y)));
                }
            }

            var most4 = s[0];
            var check4 = s[0];
            for (var n = 1u; n < LANE_VECTORS; n++) {
                most4 = max(most4, s[n]);
                check4 += s[n];
            }
            let most = reduce_max(max(max(most4.x, most4.y), max(most4.z, most4.w)));
            // The sum of all scores shows at once whether any is −∞ or NaN.
            let all_finite = is_finite(check4.x + check4.y + check4.z + check4.w);
            factor[r] = 1.0;
            // The difference is exact where the sum, of large numbers, would be rounded up.
            if most - origin[r] > HEADROOM + RESCALE_THRESHOLD {
                let to = most - HEADROOM;
                // As long as no key was seen there is nothing to scale.
                if origin[r] != neg_inf {
                    factor[r] = weight_of(origin[r] - to);
                    rescaled[parity] = 1u;
                }
                row_sum[r] *= factor[r];
                origin[r] = to;
            }
            let relative = select(origin[r], 0.0, origin[r] == neg_inf);
            var sum = vec4<f32>();
            for (var n = 0u; n < LANE_VECTORS; n++) {
                var w = vec4<f32>(weight_of(s[n].x - relative), weight_of(s[n].y - relative),
                    weight_of(s[n].z - relative), weight_of(s[n].w - relative));
                var w_sum = w;
                if !all_finite {
                    w = select(w, vec4<f32>(), s[n] == vec4<f32>(neg_inf));
                    w_sum = select(w, s[n], are_nan(s[n]));
                }
                sum += w_sum;
                if HAS_DROPOUT {
                    let place = head_query_of(kv_head, min(row0 + row, last_row));
                    for (var c = 0u; c < 4u; c++) {
                        // Its factor, which f16 might not hold, comes in the end.
                        let j = j0 + (n * ROW_LANES + row_lane) * 4u + c;
                        w[c] = select(w[c], 0.0, apply_dropout(1.0, b, place.x, place.y, j) == 0.0);
                    }
                }
                f16_store4(P_FROM + row * P_STEP + (n * ROW_LANES + row_lane) * 4u, vec4<f16>(w));
            }
            row_sum[r] += sum.x + sum.y + sum.z + sum.w;
        }

        for (var n = 0u; n < select(K_LOADS, 0u, K_EARLY); n++) {
            let e = staged_four(lane, n, HEAD);
            next_k[n] = vec4<f16>(load_k(k, key_row(k, min(at.x + e.x, last_key)), e.y, head_dim));
        }
        for (var n = 0u; n < V_LOADS; n++) {
            let e = staged_four(lane, n, VALUE);
            if e.x < KEYS {
                // What is not of a key may be anything, which a weight of zero would not hide.
                f16_store4(V_FROM + e.x * V_STEP + e.y, select(vec4<f16>(), next_v[n], j0 + e.x < end));
            }
        }
        for (var n = 0u; n < K_LOADS; n++) {
            let e = staged_four(lane, n, HEAD);
            if e.x < KEYS {
                f16_store4(e.x * K_STEP + e.y, of_head(next_k[n], e.y));
            }
        }
        pending = true;
        parity ^= 1u;
    }

    // The ends of the rows lie where their scores leave room.
    workgroupBarrier();
    for (var r = 0u; r < LANE_ROWS; r++) {
        let row = my_row + r * WORKGROUP;
        let packed = min(row0 + row, last_row);
        let sum = reduce_sum(row_sum[r]);
        let stores = row_lane == 0u && row0 + row <= last_row && row_in_pass(row, first, subgroups);
        var ended = finish_row(row_state(origin[r], sum, neg_inf), z, packed, split, stores);
        if HAS_DROPOUT {
            ended.x *= p.dropout_scale;
        }
        if row_lane == 0u {
            f32_store4(row * S_STEP + KEYS, vec4<f32>(ended, 0.0));
        }
    }
    for (var pass_index = 0u; pass_index < VALUE_PASSES; pass_index++) {
        workgroupBarrier();
        for (var c = 0u; c < VALUE_FRAGMENTS; c++) {
            if c / KEY_FRAGMENTS == pass_index {
                for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                    acc_store(acc_slot(sub_row, m, c), S_STEP, acc[m * VALUE_FRAGMENTS + c]);
                }
            }
        }
        workgroupBarrier();
        for (var n = lane; n < ROWS * (KEYS / 4u); n += WORKGROUP) {
            let row = n / (KEYS / 4u);
            let start = n % (KEYS / 4u) * 4u;
            let col = pass_index * KEYS + start;
            if row0 + row <= last_row && col < value_dim && row_in_pass(row, first, subgroups) {
                let ended = f32_at4(row * S_STEP + KEYS).xyz;
                let sum = f32_at4(row * S_STEP + start) * ended.x;
                store_row(z, row0 + row, split, col, row_repaired(z, row0 + row, col, sum, ended, keys.xy));
            }
        }
    }
}
