// The loop of fused_backward.wgsl for matrix units: a workgroup takes SUBGROUPS · SUB_ROWS output
// rows and tiles of OTHERS opposite rows. A subgroup has the same SUB_ROWS output rows throughout,
// and holds the sums of their gradients in fragments. Their channels are in fragments with HELD,
// and in workgroup memory without it.
//
// Constants: FRAGMENT, SUB_ROWS, SUBGROUPS, OTHERS, WORKGROUP, HEAD and VALUE (channels, in whole
// fragments), HELD. The code of accesses to workgroup memory is in matrix/memory_*.wgsl.
//
// A staged row has the inputs of scores, then the inputs of gradients of weights. The steps of a
// tile, with barriers between them, after the opposite rows are staged:
//   scores = own · others, gradients of weights = own · others   (matrix units, one after the
//                                                                other, through the same memory)
//   factors of pairs, in f16   a row is a query's; an invocation has a run of its keys
//   sums += factors · others   (matrix units)
//
// Weights are at most one. They are multiplied by WEIGHT_SCALE, and so retain f16's eleven bits
// down to 2⁻²⁸. Gradients of scores may have any size. They are multiplied by a power of two, which
// is the same for the workgroup. It moves if a gradient would be too large. Eleven bits reach to
// 2⁻²⁶ of the largest gradient so far, and the last bit to 2⁻³⁶. The first tile with a gradient
// sets the scale; later tiles rarely move it. Gradients that are not finite do not count. The
// kernel finds the sums that they spoil at the end, and computes them again.
//
// Subgroups are as in fused/matrix.wgsl: invocations by index, WIDTH of them as one subgroup.
//
// Cost per pair, for head_dim = value_dim = D, R = SUB_ROWS, B = OTHERS. Operations of the matrix
// units: 6 · D for d_q or d_k, 4 · D for d_v. For d_k and d_v together: 8 · D. Bytes in workgroup
// memory: the same number over R for opposite rows, and 4 · D / OWNS to stage. Scores and gradients
// of weights take 8 each, and each stored factor takes 4. Without HELD, output rows take 4 · D / B.
// One exp2; 6 barriers per OWNS · B pairs.
//
// Needs: p.dropout_scale, p.head_dim, p.scale, p.value_dim; FRAGMENT, HAS_DROPOUT, HEAD, HELD,
// OF_KEYS, OF_SCORES, OF_VALUES, OTHERS, OWNS, SUBGROUPS, SUB_ROWS, VALUE, WORKGROUP; Left, Sums,
// WorkTile; acc_at, acc_store, acc_store_transposed, all_finite, f16_store4, f32_at4, f32_store4,
// found, found_all, head_count, left_at, left_transposed_at, other_rows, other_score_vector,
// other_value_vector, others_of, own_rows, own_score_vector, own_value_vector, pair_of, query_head,
// query_of, repaired, right_at, right_transposed_at, stats_of, store_of_scores, store_of_values,
// tile_seen, tiles_by_tensors, work_tile.
// Gives: F16_LEN, F32_LEN; main.

const WIDTH: u32 = WORKGROUP / SUBGROUPS;
const ROW_FRAGMENTS: u32 = SUB_ROWS / FRAGMENT;
const OTHER_FRAGMENTS: u32 = OTHERS / FRAGMENT;
const HEAD_FRAGMENTS: u32 = HEAD / FRAGMENT;
const VALUE_FRAGMENTS: u32 = VALUE / FRAGMENT;
// For an output row. d_v alone needs no gradients of weights.
const OWN_FRAGMENTS: u32 = HEAD_FRAGMENTS + select(0u, VALUE_FRAGMENTS, OF_SCORES);
const OWN_CHANNELS: u32 = OWN_FRAGMENTS * FRAGMENT;
// For the requested gradients: of the inputs of scores, then of values.
const SCORED_FRAGMENTS: u32 = select(0u, HEAD_FRAGMENTS, OF_SCORES);
const SUM_FRAGMENTS: u32 = SCORED_FRAGMENTS + select(0u, VALUE_FRAGMENTS, OF_VALUES);
// Queries and keys of a tile.
const QUERIES: u32 = select(OWNS, OTHERS, OF_KEYS);
const KEYS: u32 = select(OTHERS, OWNS, OF_KEYS);

// Rows in workgroup memory have 16 bytes of padding: see fused/matrix.wgsl.
const OTHER_STEP: u32 = HEAD + VALUE + 8u;
const GIVEN_STEP: u32 = KEYS + 8u;
const PAIR_STEP: u32 = KEYS + 4u;
const SUM_STEP: u32 = OTHERS + 4u;
const D_SCORES_FROM: u32 = OTHERS * OTHER_STEP;
const WEIGHTS_FROM: u32 = D_SCORES_FROM + select(0u, QUERIES * GIVEN_STEP, OF_SCORES);
const OWN_FROM: u32 = WEIGHTS_FROM + select(0u, QUERIES * GIVEN_STEP, OF_VALUES);
const F16_LEN: u32 = OWN_FROM + select(OWNS * (OWN_CHANNELS + 8u), 0u, HELD);
const F32_LEN: u32 = max(QUERIES * PAIR_STEP, OWNS * SUM_STEP);
// Output rows for fragments pass through the memory of the other data, some of their channels at a
// time.
const PASSING: u32 = select(OWN_FRAGMENTS, min((F16_LEN / OWNS - 8u) / FRAGMENT, OWN_FRAGMENTS), HELD);
const PASS_CHANNELS: u32 = PASSING * FRAGMENT;
const PASS_STEP: u32 = PASS_CHANNELS + 8u;
const PASS_FROM: u32 = select(OWN_FROM, 0u, HELD);
const HELD_FRAGMENTS: u32 = select(0u, OWN_FRAGMENTS, HELD);

// An invocation has KEYS / QUERY_LANES pairs of each of LANE_QUERIES queries. QUERY_LANES
// neighbours share a query.
const QUERY_LANES: u32 = max(WORKGROUP / QUERIES, 1u);
const LANE_QUERIES: u32 = max(QUERIES / WORKGROUP, 1u);
const LANE_VECTORS: u32 = KEYS / 4u / QUERY_LANES;
const LANE_PAIRS: u32 = LANE_QUERIES * LANE_VECTORS;

// Sums pass through the memory of pairs, OTHERS channels at a time.
const SCORED_PASSES: u32 = (SCORED_FRAGMENTS + OTHER_FRAGMENTS - 1u) / OTHER_FRAGMENTS;
const PASSES: u32 = SCORED_PASSES + (SUM_FRAGMENTS - SCORED_FRAGMENTS + OTHER_FRAGMENTS - 1u) / OTHER_FRAGMENTS;

const_assert OWNS == SUBGROUPS * SUB_ROWS && SUB_ROWS % FRAGMENT == 0u && OTHERS % FRAGMENT == 0u;
const_assert HEAD % FRAGMENT == 0u && VALUE % FRAGMENT == 0u && HEAD % 8u == 0u && VALUE % 8u == 0u;
const_assert OTHERS % 8u == 0u && OWNS % 8u == 0u && WORKGROUP % 2u == 0u && PASSING > 0u;
const_assert WORKGROUP % QUERIES == 0u || QUERIES % WORKGROUP == 0u;
const_assert KEYS % (4u * QUERY_LANES) == 0u;

const WEIGHT_SCALE: f32 = 16384.0;
// Gradients of scores below this value fit in f16. After the scale moves, the largest is in 2¹² ..
// 2¹³.
const LARGEST: f32 = 60000.0;

// Flags of this tile and of the last tile: 1 if a gradient of a score would be too large. (For the
// size of four see fused/matrix.wgsl.)
var<workgroup> is_above: array<u32, 4>;

// The registers of a subgroup: output rows (without HELD, of one step) and the sums of their
// gradients. Then, for a short time, scores or gradients of weights.
var<private> own: array<Left, ROW_FRAGMENTS * max(HELD_FRAGMENTS, 1u)>;
var<private> sums: array<Sums, ROW_FRAGMENTS * SUM_FRAGMENTS>;
var<private> pair_sums: array<Sums, ROW_FRAGMENTS * OTHER_FRAGMENTS>;
// An invocation's pairs: scores, then weights; gradients of weights, then of scores.
var<private> scores: array<vec4<f32>, LANE_PAIRS>;
var<private> d_scores: array<vec4<f32>, LANE_PAIRS>;

// The r-th query of an invocation, and the first of its n-th four keys, in the tile.
fn my_query(lane: u32, r: u32) -> u32 {
    return lane / QUERY_LANES + r * WORKGROUP;
}

fn my_key(lane: u32, n: u32) -> u32 {
    return (n * QUERY_LANES + lane % QUERY_LANES) * 4u;
}

fn stage_others(work: WorkTile, h: u32, other0: u32, last: u32, lane: u32) {
    for (var n = lane; n < OTHERS * (HEAD / 4u); n += WORKGROUP) {
        let row = n / (HEAD / 4u);
        let d = n % (HEAD / 4u) * 4u;
        var x = vec4<f32>();
        if d < p.head_dim {
            x = other_score_vector(other_rows(work, h, min(other0 + row, last)).x, d);
        }
        f16_store4(row * OTHER_STEP + d, vec4<f16>(x));
    }
    for (var n = lane; n < OTHERS * (VALUE / 4u); n += WORKGROUP) {
        let row = n / (VALUE / 4u);
        let d = n % (VALUE / 4u) * 4u;
        var x = vec4<f32>();
        if d < p.value_dim {
            x = other_value_vector(other_rows(work, h, min(other0 + row, last)).y, d);
        }
        f16_store4(row * OTHER_STEP + HEAD + d, vec4<f16>(x));
    }
}

// Stages channels first .. first + PASS_CHANNELS of all output rows, for loads into fragments.
fn stage_own(work: WorkTile, first: u32, lane: u32) {
    for (var n = lane; n < OWNS * (PASS_CHANNELS / 4u); n += WORKGROUP) {
        let row = n / (PASS_CHANNELS / 4u);
        let start = n % (PASS_CHANNELS / 4u) * 4u;
        let d = first + start;
        let rows = own_rows(work, min(work.own0 + row, work.last_own));
        var x = vec4<f32>();
        if d < HEAD {
            if d < p.head_dim {
                x = own_score_vector(rows.x, d);
            }
        } else if d - HEAD < p.value_dim {
            x = own_value_vector(rows.y, d - HEAD);
        }
        f16_store4(PASS_FROM + row * PASS_STEP + start, vec4<f16>(x));
    }
}

fn load_own(work: WorkTile, sub_row: u32, lane: u32) {
    if !HELD {
        stage_own(work, 0u, lane);
        return;
    }
    /* unrolled */ for (var c0 = 0u; c0 < HELD_FRAGMENTS; c0 += PASSING) {
        workgroupBarrier();
        stage_own(work, c0 * FRAGMENT, lane);
        workgroupBarrier();
        /* unrolled */ for (var c = c0; c < min(c0 + PASSING, HELD_FRAGMENTS); c++) {
            /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                own[m * HELD_FRAGMENTS + c] = left_at((sub_row + m * FRAGMENT) * PASS_STEP + (c - c0) * FRAGMENT, PASS_STEP);
            }
        }
    }
    workgroupBarrier();
}

// pair_sums += own · others for a fragment of channels, with output rows in workgroup memory.
fn multiply_staged(sub_row: u32, c: u32) {
    /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
        own[m] = left_at(PASS_FROM + (sub_row + m * FRAGMENT) * PASS_STEP + c * FRAGMENT, PASS_STEP);
    }
    /* unrolled */ for (var j = 0u; j < OTHER_FRAGMENTS; j++) {
        let right = right_transposed_at(j * FRAGMENT * OTHER_STEP + c * FRAGMENT, OTHER_STEP);
        /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
            pair_sums[m * OTHER_FRAGMENTS + j] = coopMultiplyAdd(own[m], right, pair_sums[m * OTHER_FRAGMENTS + j]);
        }
    }
}

fn clear_pairs() {
    /* unrolled */ for (var n = 0u; n < ROW_FRAGMENTS * OTHER_FRAGMENTS; n++) {
        pair_sums[n] = Sums();
    }
}

// Stores the pairs in workgroup memory, one row per query.
fn store_pairs(sub_row: u32) {
    /* unrolled */ for (var j = 0u; j < OTHER_FRAGMENTS; j++) {
        /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
            if OF_KEYS {
                acc_store_transposed(j * FRAGMENT * PAIR_STEP + sub_row + m * FRAGMENT, PAIR_STEP, pair_sums[m * OTHER_FRAGMENTS + j]);
            } else {
                acc_store((sub_row + m * FRAGMENT) * PAIR_STEP + j * FRAGMENT, PAIR_STEP, pair_sums[m * OTHER_FRAGMENTS + j]);
            }
        }
    }
}

fn multiply_scores(sub_row: u32) {
    clear_pairs();
    if HELD {
        /* unrolled */ for (var c = 0u; c < min(HEAD_FRAGMENTS, HELD_FRAGMENTS); c++) {
            /* unrolled */ for (var j = 0u; j < OTHER_FRAGMENTS; j++) {
                let right = right_transposed_at(j * FRAGMENT * OTHER_STEP + c * FRAGMENT, OTHER_STEP);
                /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                    pair_sums[m * OTHER_FRAGMENTS + j] =
                        coopMultiplyAdd(own[m * HELD_FRAGMENTS + c], right, pair_sums[m * OTHER_FRAGMENTS + j]);
                }
            }
        }
    } else {
        for (var c = 0u; c < HEAD_FRAGMENTS; c++) {
            multiply_staged(sub_row, c);
        }
    }
    store_pairs(sub_row);
}

// Computes gradients of weights.
fn multiply_values(sub_row: u32) {
    clear_pairs();
    if HELD {
        /* unrolled */ for (var c = HEAD_FRAGMENTS; c < HELD_FRAGMENTS; c++) {
            /* unrolled */ for (var j = 0u; j < OTHER_FRAGMENTS; j++) {
                let right = right_transposed_at(j * FRAGMENT * OTHER_STEP + c * FRAGMENT, OTHER_STEP);
                /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                    pair_sums[m * OTHER_FRAGMENTS + j] =
                        coopMultiplyAdd(own[m * HELD_FRAGMENTS + c], right, pair_sums[m * OTHER_FRAGMENTS + j]);
                }
            }
        }
    } else {
        for (var c = HEAD_FRAGMENTS; c < OWN_FRAGMENTS; c++) {
            multiply_staged(sub_row, c);
        }
    }
    store_pairs(sub_row);
}

// Turns scores into weights after dropout, and gradients of weights into gradients of scores.
// Returns the bits of the largest finite gradient of a score, by size.
fn weigh(work: WorkTile, h: u32, other0: u32, end: u32, lane: u32) -> u32 {
    var most = vec4<u32>();
    for (var r = 0u; r < LANE_QUERIES; r++) {
        let at = my_query(lane, r);
        let i = select(min(work.own0 + at, work.last_own), min(other0 + at, end - 1u), OF_KEYS);
        var query = query_of(work.b, h, i);
        if OF_KEYS && other0 + at >= end {
            query.end = 0u;
        }
        let stats = stats_of(work.b, h, i);
        // The loop rotates the vectors through scores[0] and d_scores[0].
        for (var n = 0u; n < LANE_VECTORS; n++) {
            let j = select(other0, work.own0, OF_KEYS) + my_key(lane, n);
            let dots = scores[0];
            let d_weights = d_scores[0];
            var weights = vec4<f32>();
            var gradients = vec4<f32>();
            /* unrolled */ for (var c = 0u; c < 4u; c++) {
                let key = select(j + c, min(j + c, work.last_own), OF_KEYS);
                let pair = pair_of(query, key, dots[c], d_weights[c], stats);
                weights[c] = pair.weight;
                gradients[c] = pair.d_score;
            }
            let size = bitcast<vec4<u32>>(gradients) & vec4<u32>(0x7fffffffu);
            most = max(most, select(size, vec4<u32>(), size >= vec4<u32>(0x7f800000u)));
            /* unrolled */ for (var m = 0u; m < LANE_PAIRS - 1u; m++) {
                scores[m] = scores[m + 1u];
                d_scores[m] = d_scores[m + 1u];
            }
            scores[LANE_PAIRS - 1u] = weights;
            d_scores[LANE_PAIRS - 1u] = gradients;
        }
    }
    return max(max(most.x, most.y), max(most.z, most.w));
}

fn store_weights(lane: u32) {
    let factor = WEIGHT_SCALE / select(1.0, p.dropout_scale, HAS_DROPOUT);
    /* unrolled */ for (var r = 0u; r < LANE_QUERIES; r++) {
        /* unrolled */ for (var n = 0u; n < LANE_VECTORS; n++) {
            f16_store4(WEIGHTS_FROM + my_query(lane, r) * GIVEN_STEP + my_key(lane, n), vec4<f16>(scores[r * LANE_VECTORS + n] * factor));
        }
    }
}

fn store_d_scores(scale: f32, lane: u32) {
    /* unrolled */ for (var r = 0u; r < LANE_QUERIES; r++) {
        /* unrolled */ for (var n = 0u; n < LANE_VECTORS; n++) {
            f16_store4(D_SCORES_FROM + my_query(lane, r) * GIVEN_STEP + my_key(lane, n), vec4<f16>(d_scores[r * LANE_VECTORS + n] * scale));
        }
    }
}

// The scale for the largest gradient of a score over all invocations. Before the first gradient,
// scale is zero.
fn moved(scale: f32, most: u32, lane: u32) -> f32 {
    found[lane].x = most;
    workgroupBarrier();
    if lane == 0u {
        var all = 0u;
        for (var n = 0u; n < WORKGROUP; n++) {
            all = max(all, found[n].x);
        }
        found_all.x = all;
    }
    let exponent = workgroupUniformLoad(&found_all).x >> 23u;
    // 2¹² over the largest power of two that is not above the largest gradient.
    let to = bitcast<f32>(clamp(266u - exponent, 2u, 252u) << 23u);
    return select(min(scale, to), to, scale == 0.0);
}

fn rescale(factor: f32, sub_row: u32, lane: u32) {
    for (var pass_index = 0u; pass_index < SCORED_PASSES; pass_index++) {
        store_sums(sub_row, pass_index);
        workgroupBarrier();
        for (var n = lane; n < OWNS * (OTHERS / 4u); n += WORKGROUP) {
            let o = n / (OTHERS / 4u) * SUM_STEP + n % (OTHERS / 4u) * 4u;
            f32_store4(o, f32_at4(o) * factor);
        }
        workgroupBarrier();
        load_scored(sub_row, pass_index);
        workgroupBarrier();
    }
}

// The factors of pairs, with output rows as rows.
fn given_at(place: u32, row: u32, other: u32) -> Left {
    if OF_KEYS {
        return left_transposed_at(place + other * GIVEN_STEP + row, GIVEN_STEP);
    } else {
        return left_at(place + row * GIVEN_STEP + other, GIVEN_STEP);
    }
}

fn add_to_scored(sub_row: u32) {
    for (var j = 0u; j < OTHER_FRAGMENTS; j++) {
        var g: array<Left, ROW_FRAGMENTS>;
        /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
            g[m] = given_at(D_SCORES_FROM, sub_row + m * FRAGMENT, j * FRAGMENT);
        }
        /* unrolled */ for (var c = 0u; c < SCORED_FRAGMENTS; c++) {
            let right = right_at(j * FRAGMENT * OTHER_STEP + c * FRAGMENT, OTHER_STEP);
            /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                sums[m * SUM_FRAGMENTS + c] = coopMultiplyAdd(g[m], right, sums[m * SUM_FRAGMENTS + c]);
            }
        }
    }
}

fn add_to_valued(sub_row: u32) {
    for (var j = 0u; j < OTHER_FRAGMENTS; j++) {
        var g: array<Left, ROW_FRAGMENTS>;
        /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
            g[m] = given_at(WEIGHTS_FROM, sub_row + m * FRAGMENT, j * FRAGMENT);
        }
        /* unrolled */ for (var c = SCORED_FRAGMENTS; c < SUM_FRAGMENTS; c++) {
            let right = right_at(j * FRAGMENT * OTHER_STEP + HEAD + (c - SCORED_FRAGMENTS) * FRAGMENT, OTHER_STEP);
            /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                sums[m * SUM_FRAGMENTS + c] = coopMultiplyAdd(g[m], right, sums[m * SUM_FRAGMENTS + c]);
            }
        }
    }
}

// Moves the sums of the channels of pass `pass_index` to and from the memory of pairs.
fn store_sums(sub_row: u32, pass_index: u32) {
    /* unrolled */ for (var c = 0u; c < SCORED_FRAGMENTS; c++) {
        if c / OTHER_FRAGMENTS == pass_index {
            /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                acc_store((sub_row + m * FRAGMENT) * SUM_STEP + c % OTHER_FRAGMENTS * FRAGMENT, SUM_STEP, sums[m * SUM_FRAGMENTS + c]);
            }
        }
    }
    /* unrolled */ for (var c = SCORED_FRAGMENTS; c < SUM_FRAGMENTS; c++) {
        if SCORED_PASSES + (c - SCORED_FRAGMENTS) / OTHER_FRAGMENTS == pass_index {
            let col = (c - SCORED_FRAGMENTS) % OTHER_FRAGMENTS * FRAGMENT;
            /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                acc_store((sub_row + m * FRAGMENT) * SUM_STEP + col, SUM_STEP, sums[m * SUM_FRAGMENTS + c]);
            }
        }
    }
}

fn load_scored(sub_row: u32, pass_index: u32) {
    /* unrolled */ for (var c = 0u; c < SCORED_FRAGMENTS; c++) {
        if c / OTHER_FRAGMENTS == pass_index {
            /* unrolled */ for (var m = 0u; m < ROW_FRAGMENTS; m++) {
                sums[m * SUM_FRAGMENTS + c] = acc_at((sub_row + m * FRAGMENT) * SUM_STEP + c % OTHER_FRAGMENTS * FRAGMENT, SUM_STEP);
            }
        }
    }
}

fn store_gradients(work: WorkTile, scale: f32, sub_row: u32, lane: u32) {
    let of_scores = 1.0 / select(scale, 1.0, scale == 0.0);
    let of_values = select(1.0, p.dropout_scale, HAS_DROPOUT) / WEIGHT_SCALE;
    // One copy of the code for both, with the repair in it.
    for (var pass_index = 0u; pass_index < PASSES; pass_index++) {
        let values = pass_index >= SCORED_PASSES;
        let first = select(pass_index, pass_index - SCORED_PASSES, values) * OTHERS;
        workgroupBarrier();
        store_sums(sub_row, pass_index);
        workgroupBarrier();
        for (var n = lane; n < OWNS * (OTHERS / 4u); n += WORKGROUP) {
            let row = n / (OTHERS / 4u);
            let start = n % (OTHERS / 4u) * 4u;
            let col = first + start;
            let own_row = work.own0 + row;
            if own_row <= work.last_own && col < select(p.head_dim, p.value_dim, values) {
                var x = f32_at4(row * SUM_STEP + start) * select(of_scores, of_values, values);
                var scale_left = p.scale;
                if !all_finite(x) {
                    x = repaired(work, own_row, col, values);
                    scale_left = 1.0;
                }
                if values {
                    store_of_values(work, own_row, col, x);
                } else {
                    store_of_scores(work, own_row, col, x * scale_left);
                }
            }
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let work = work_tile(workgroup);
    let sub_row = lane / WIDTH * SUB_ROWS;
    if lane < 4u {
        is_above[lane] = 0u;
    }
    load_own(work, sub_row, lane);
    /* unrolled */ for (var n = 0u; n < ROW_FRAGMENTS * SUM_FRAGMENTS; n++) {
        sums[n] = Sums();
    }
    var scale = 0.0;
    var parity = 0u;
    for (var head = 0u; head < head_count(); head++) {
        let h = query_head(work, head);
        let range = others_of(work, h, lane);
        var looked = 0u;
        for (var other0 = range.x; other0 < range.y; other0 += OTHERS) {
            let last = min(other0 + OTHERS, range.y) - 1u;
            looked = tiles_by_tensors(work, h, range, other0, looked, lane);
            if (looked & 1u) == 0u || !tile_seen(work, h, other0, last) {
                continue;
            }
            workgroupBarrier();
            stage_others(work, h, other0, last, lane);
            workgroupBarrier();
            multiply_scores(sub_row);
            workgroupBarrier();
            /* unrolled */ for (var r = 0u; r < LANE_QUERIES; r++) {
                /* unrolled */ for (var n = 0u; n < LANE_VECTORS; n++) {
                    scores[r * LANE_VECTORS + n] = f32_at4(my_query(lane, r) * PAIR_STEP + my_key(lane, n));
                }
            }
            if OF_SCORES {
                workgroupBarrier();
                multiply_values(sub_row);
                workgroupBarrier();
                /* unrolled */ for (var r = 0u; r < LANE_QUERIES; r++) {
                    /* unrolled */ for (var n = 0u; n < LANE_VECTORS; n++) {
                        d_scores[r * LANE_VECTORS + n] = f32_at4(my_query(lane, r) * PAIR_STEP + my_key(lane, n));
                    }
                }
            }
            let most = weigh(work, h, other0, range.y, lane);
            if OF_VALUES {
                store_weights(lane);
            }
            if OF_SCORES {
                // First assumes that the scale does not have to move. If it has to, repeats.
                store_d_scores(scale, lane);
                let size = bitcast<f32>(most);
                if size * scale > LARGEST || (scale == 0.0 && size > 0.0) {
                    is_above[parity] = 1u;
                }
                if lane == 0u {
                    // The flag of the tile before, which no invocation reads any more.
                    is_above[parity ^ 1u] = 0u;
                }
            }
            workgroupBarrier();
            if OF_SCORES {
                if is_above[parity] != 0u {
                    let to = moved(scale, most, lane);
                    if scale != 0.0 {
                        rescale(to / scale, sub_row, lane);
                    }
                    scale = to;
                    store_d_scores(scale, lane);
                    workgroupBarrier();
                }
                add_to_scored(sub_row);
            }
            if OF_VALUES {
                add_to_valued(sub_row);
            }
            parity ^= 1u;
        }
    }
    store_gradients(work, scale, sub_row, lane);
}
