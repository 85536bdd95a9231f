// The loop of fused.wgsl for GPUs, for few packed rows: each key and value is loaded once for all
// rows. A workgroup has ROWS packed rows and one split of their keys, which it visits tile by tile.
//
// Constants: ROWS        packed rows of a workgroup
//            LANE_ROWS   rows of an invocation: ROWS, or ROWS / n; then each n-th of the workgroup
//                        takes an n-th of the rows, and loads keys that the other parts have cached
//            WORKGROUP   invocations
//            KEY_LANES   invocations that share a key: they load consecutive 16-byte words of a row
//            KEY_FOURS   keys of an invocation, in groups of four
//            V_SPLIT     invocations that share a word of v; each has V_VECTORS / V_SPLIT vectors
//            ROUND       vectors of an invocation that the reduction over KEY_LANES takes at once
//            AHEAD       true if keys and values are loaded into registers in advance
//            IN_RUNS     true if four keys from a multiple of four on lie in neighbouring rows
//            SHARED      weights and reduction use the same workgroup memory, which takes a barrier
//                        or two more per tile
// K_BLOCKS, V_BLOCKS and vectors are compiled in, so that all loads have constant bounds. All
// constants except V_BLOCKS and K_BLOCKS are powers of two.
//
// Rows of k and v are 16-byte words. The kernel loads a word by k_word(row, n) or v_word(row, n),
// without unpacking, and it stays so in registers. Its i-th vec4 is unpacked(storage, word, i), in
// order, with 128 / K_VECTORS bits. If K_SCALED, a number means (number - K_BIAS) · k_scale(row,
// n). The kernel subtracts K_BIAS once from each sum, not from each number. The same holds for
// values and the constants V_VECTORS, V_SCALED and V_BIAS. The functions finish_row and store_row
// take the results of a split, or the final results.
//
// Lower bounds per key, for all rows of the workgroup, C = 4 · KEY_FOURS:
//   global memory     16 · (K_BLOCKS + V_BLOCKS) bytes and the scales, once; each part of the
//                     workgroup, and for a word of v V_SPLIT invocations, load them again, from a
//                     cache or as the same address
//   multiply-adds     ROWS · (head_dim + value_dim)
//   workgroup memory  bytes: q 4 · ROWS · head_dim / C,
//                     weights ROWS · value_dim · V_SPLIT / V_VECTORS,
//                     reduction 8 · ROWS · KEY_LANES (0 with subgroups)
//
// For example, let C = 4, V_SPLIT = V_VECTORS and ROWS be the largest. Then 16 multiply-adds take a
// vector of workgroup memory. GPUs have both in this ratio (128 bytes and 128 multiply-adds a
// cycle). For 8 rows of f16 with 128 channels each, that is 512 bytes of global memory and 2048
// multiply-adds. Workgroup memory: 2048 + 512 bytes.
//
// The steps of a tile:
//
// - Each word of k in registers is multiplied by q in workgroup memory. All keys use the same
//   addresses.
// - The sums of KEY_LANES lanes are added. An owner invocation holds each score.
// - Weights are stored in workgroup memory.
// - p · v: each lane computes some channels for some groups of four keys.
//
// A vector of scores or weights always holds four consecutive keys of one row.
//
// Registers are scarce: 128, with as many waves as hide the latency of memory. Sums take up to 64.
// The kernel therefore loads little AHEAD:
//
// - a tile's next words of k, while it multiplies some
// - the first four words of v, while it computes weights
//
// It carries no words to the next tile. Workgroups have few tiles. Some drivers move such loads to
// the next tile, and then copy each register. If an invocation has no more than 128 registers
// (Apple, Qualcomm), it loads nothing ahead.
//
// In p · v of a whole tile, all keys exist, and STEPS steps are unrolled. Other tiles take a loop
// of few instructions, in which rows end at the last key.
//
// Needs: p.head_dim, p.mask, p.q, p.scale, p.value_dim; AHEAD, IN_RUNS, KEY_FOURS, KEY_LANES,
// K_BIAS, K_BLOCKS, K_SCALED, K_STORAGE, K_VECTORS, LANE_ROWS, LOWEST, PER_PAIR_MASK, REDUCE_SIZE,
// RESCALE_THRESHOLD, ROWS, SHARED, UNIT, V_BIAS, V_BLOCKS, V_SCALED, V_SPLIT, V_STORAGE,
// V_VECTORS, WORKGROUP; Query, Source, WorkTile; are_nan, finish_checked, key_row, k_scale,
// k_source, k_word, mask_mod, owned_first, owned_group, q_at4, query_of_row, reduce, rescale_of,
// row_repaired, row_state, rows_key_range, run_step, score_mod, split_keys, store_row, unpacked,
// v_scale, v_source, v_word, view_at, weights_of, work_tile.
// Gives: ALL_GROUPS, OWN, SCORES; decode, own_scores, scores, tile.

const ROW_GROUPS: u32 = ROWS / LANE_ROWS;
const GROUP_LANES: u32 = WORKGROUP / ROW_GROUPS;
// Words of a key per lane.
const K_WORDS: u32 = (K_BLOCKS + KEY_LANES - 1u) / KEY_LANES;
const K_RAGGED: bool = K_BLOCKS % KEY_LANES != 0u;
const LANE_KEYS: u32 = KEY_FOURS * 4u;
// The loop takes a word of 8 vectors one number at a time, and rotates it to the front. If the loop
// were unrolled, drivers would unpack early, into 50 more registers.
const WORD_STEPS: u32 = select(1u, 4u, K_VECTORS == 8u);
const STEP_VECTORS: u32 = K_VECTORS / WORD_STEPS;
// Groups of lanes that share a key, in a row group and in all. Units of four keys, and keys of a
// tile.
const GROUPS: u32 = GROUP_LANES / KEY_LANES;
const ALL_GROUPS: u32 = WORKGROUP / KEY_LANES;
const UNITS: u32 = GROUPS * KEY_FOURS;
const KEYS: u32 = UNITS * 4u;
// Vectors of sums of a lane (index f * LANE_ROWS + r), and the vectors that it owns after the
// reduction.
const SCORES: u32 = LANE_ROWS * KEY_FOURS;
const OWN: u32 = max(1u, SCORES / KEY_LANES);
// Unrolled iterations of the loop over words. It is all of them, if these have at most 512
// multiply-adds, or half as many without AHEAD.
const K_WRITTEN: u32 = select(0u, K_WORDS, K_WORDS * K_VECTORS * SCORES <= select(16u, 32u, AHEAD));

// Columns are parts of words of v.
const PIECE: u32 = V_VECTORS / V_SPLIT;
const COLUMNS: u32 = min(V_BLOCKS * V_SPLIT, GROUP_LANES);
const SUBSETS: u32 = min(GROUP_LANES / COLUMNS, UNITS);
const V_STEPS: u32 = (UNITS + SUBSETS - 1u) / SUBSETS;
// Steps whose code is unrolled, at a time and before the loop. The more sums a step has, the fewer
// steps are unrolled.
const STEPS: u32 = clamp(4u / (LANE_ROWS * PIECE), 1u, V_STEPS);
const FIRST_STEPS: u32 = V_STEPS - (V_STEPS - 1u) / STEPS * STEPS;

// True if each step has a unit for every subset. Otherwise the last step has units past the tile.
const EVEN_STEPS: bool = UNITS % SUBSETS == 0u;

// Workgroup memory, in vectors. An odd step spreads the stores of owners over the banks.
const Q_SIZE: u32 = ROWS * K_WORDS * KEY_LANES * K_VECTORS;
const P_STEP: u32 = ROWS | 1u;
const P_AT: u32 = select(REDUCE_SIZE, 0u, SHARED);
// Zero weights for a unit past the tile.
const ZEROS_AT: u32 = max(P_AT + UNITS * P_STEP, REDUCE_SIZE);
const TILE_SIZE: u32 = max(ZEROS_AT + select(ROWS, 0u, EVEN_STEPS), WORKGROUP);
// Numbers of a row that its owners have. FOLDERS lanes fold them.
const OWN_ROWS: u32 = max(1u, LANE_ROWS / KEY_LANES);
const FOLD: u32 = min(KEY_LANES, SCORES) * OWN_ROWS * ALL_GROUPS / ROWS;
const FOLDERS: u32 = max(1u, FOLD / 16u);

const_assert WORKGROUP % KEY_LANES == 0u && GROUP_LANES % KEY_LANES == 0u && ROWS % LANE_ROWS == 0u;
const_assert SCORES <= KEY_LANES || SCORES % KEY_LANES == 0u;
const_assert V_VECTORS % V_SPLIT == 0u && ROWS <= WORKGROUP && ROWS * FOLDERS <= WORKGROUP;

var<workgroup> q_tile: array<vec4<f32>, Q_SIZE>;
var<workgroup> tile: array<vec4<f32>, TILE_SIZE>;
// −K_BIAS · Σ q of the channels of a word [row, word].
var<workgroup> q_bias: array<f32, select(1u, ROWS * K_WORDS * KEY_LANES, K_BIAS != 0.0)>;
var<workgroup> fold: array<f32, ROWS * FOLD>;
// Per row: the reference point of scores, the highest score that moved it, and the factor of older
// sums. Then the sum of weights, and the row's keys.
var<workgroup> row_max: array<f32, ROWS>;
var<workgroup> row_top: array<atomic<u32>, ROWS>;
var<workgroup> row_rescale: array<f32, ROWS>;
var<workgroup> row_sum: array<f32, ROWS>;
var<workgroup> row_keys: array<vec2<u32>, ROWS>;
// 1 if a score of the tile exceeds its row's maximum by more than RESCALE_THRESHOLD, or is NaN.
var<workgroup> any_above: atomic<u32>;

// The registers of an invocation, in arrays that only constants index (src/kernel/unroll.rs).
// scores are its sums of q · kᵀ. After the reduction over KEY_LANES it owns some of the results.
// The other arrays have their weights and the sums of the weights.
var<private> scores: array<vec4<f32>, SCORES>;
var<private> own_scores: array<vec4<f32>, OWN>;
var<private> weights: array<vec4<f32>, OWN>;
var<private> own_sums: array<f32, OWN>;
// An invocation's sums of p · v, and the sums of the factors of v. At the end, V_BIAS times these
// factors is subtracted.
var<private> acc: array<vec4<f32>, LANE_ROWS * PIECE>;
var<private> biases: array<f32, LANE_ROWS>;
// The starts of its keys' rows; words in use, and words that are being loaded.
var<private> k_rows: array<u32, LANE_KEYS>;
var<private> k_words: array<vec4<u32>, LANE_KEYS>;
var<private> k_scales: array<f32, LANE_KEYS>;
var<private> next_k_words: array<vec4<u32>, LANE_KEYS>;
var<private> next_k_scales: array<f32, LANE_KEYS>;
var<private> v_words: array<vec4<u32>, 4>;
var<private> v_scales: vec4<f32>;

// The work of an invocation. In q · kᵀ: a word of KEY_LANES neighbouring words, of units group, +
// GROUPS, ... Then it owns vectors own_first, + KEY_LANES, ... of the sums of the workgroup. In p ·
// v: a column, units subset, + SUBSETS, ...
struct Lane {
    n: u32,
    word: u32,
    group: u32,
    row_group: u32,
    own_first: u32,
    own_group: u32,
    own_row: u32,
    column: u32,
    subset: u32,
}

fn lane_of(n: u32, slice: u32) -> Lane {
    let in_group = n % GROUP_LANES;
    let column = slice * COLUMNS + in_group % COLUMNS;
    let own_group = owned_group(n);
    return Lane(n, n % KEY_LANES, n / KEY_LANES % GROUPS, n / GROUP_LANES, owned_first(n), own_group % GROUPS,
        own_group / GROUPS * LANE_ROWS, column, min(in_group / COLUMNS, SUBSETS - 1u));
}

fn total_of(x: vec4<f32>) -> f32 {
    return (x.x + x.y) + (x.z + x.w);
}

fn owns(lane: Lane) -> bool {
    return lane.own_first < SCORES;
}

// The index of the n-th owned vector among the sums of a group. Then its row, and its unit of keys.
fn own_vector(n: u32, lane: Lane) -> u32 {
    return (n * KEY_LANES + lane.own_first) % SCORES;
}

fn own_row(n: u32, lane: Lane) -> u32 {
    return lane.own_row + own_vector(n, lane) % LANE_ROWS;
}

fn own_unit(n: u32, lane: Lane) -> u32 {
    return own_vector(n, lane) / LANE_ROWS * GROUPS + lane.own_group;
}

fn own_place(n: u32, lane: Lane) -> u32 {
    return P_AT + own_unit(n, lane) * P_STEP + own_row(n, lane);
}

// The place where a lane folds a number of its n-th vector. Vectors of one row have the same place.
fn fold_at(n: u32, lane: Lane) -> u32 {
    let each = FOLD / GROUPS;
    return own_row(n, lane) * FOLD + lane.own_group * each + lane.own_first / LANE_ROWS % each;
}

// The part of a word of v that a lane adds, moved to its front.
fn piece_of(word: vec4<u32>, piece: u32) -> vec4<u32> {
    if V_SPLIT == 1u {
        return word;
    } else if V_SPLIT == 2u {
        return select(word, word.zwzw, piece == 1u);
    } else {
        // Part of a 32-bit number: all of it, or every other nibble.
        let shares = max(V_SPLIT / 4u, 1u);
        let number = piece / shares;
        let pair = select(word.xy, word.zw, number >= 2u);
        let one = select(pair.x, pair.y, number % 2u == 1u);
        return vec4<u32>(one >> (piece % shares * 4u));
    }
}

// The sum of FOLD numbers of a row in `fold`, for lane n < ROWS of row n. Must be called in uniform
// control flow.
fn folded(lane: u32) -> f32 {
    workgroupBarrier();
    if FOLDERS > 1u {
        if lane < ROWS * FOLDERS {
            let at = lane / FOLDERS * FOLD + lane % FOLDERS;
            var x = fold[at];
            for (var n = FOLDERS; n < FOLD; n += FOLDERS) {
                x += fold[at + n];
            }
            fold[at] = x;
        }
        workgroupBarrier();
    }
    var x = fold[min(lane, ROWS - 1u) * FOLD];
    for (var n = 1u; n < select(FOLD, FOLDERS, FOLDERS > 1u); n++) {
        x += fold[min(lane, ROWS - 1u) * FOLD + n];
    }
    return x;
}

// Bits of x whose order as an integer is the order of floats.
fn ordered_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    return bits ^ select(0x80000000u, 0xffffffffu, bits >= 0x80000000u);
}

// The inverse of ordered_bits.
fn float_of(bits: u32) -> f32 {
    return bitcast<f32>(bits ^ select(0xffffffffu, 0x80000000u, bits >= 0x80000000u));
}

// q [row, word, vector, lane], zero past head_dim.
fn stage_queries(work: WorkTile, lane: u32) {
    for (var n = lane; n < Q_SIZE; n += WORKGROUP) {
        let word = n / K_VECTORS / KEY_LANES % K_WORDS * KEY_LANES + n % KEY_LANES;
        let d = (word * K_VECTORS + n / KEY_LANES % K_VECTORS) * 4u;
        let query = query_at(work, n / (K_WORDS * KEY_LANES * K_VECTORS));
        var x = vec4<f32>();
        if d < p.head_dim {
            let at = view_at(p.q, query.b, query.h, query.i, d);
            x = q_at4(at, p.q.strides.w, p.head_dim - d) * (p.scale * UNIT);
        }
        q_tile[n] = x;
    }
}

fn query_at(work: WorkTile, row: u32) -> Query {
    return query_of_row(work.b, work.kv_head, min(work.row0 + row, work.last_row));
}

fn prepare_rows(work: WorkTile, lane: u32) {
    if !EVEN_STEPS && lane < ROWS {
        tile[ZEROS_AT + lane] = vec4<f32>();
    }
    if lane < ROWS {
        let query = query_at(work, lane);
        row_keys[lane] = vec2<u32>(query.first, query.end);
        row_max[lane] = LOWEST;
        atomicStore(&row_top[lane], ordered_bits(LOWEST));
    }
    if lane == 0u {
        atomicStore(&any_above, 0u);
    }
}

fn sum_queries(lane: u32) {
    for (var n = lane; n < ROWS * K_WORDS * KEY_LANES; n += WORKGROUP) {
        var sum = vec4<f32>();
        for (var i = 0u; i < K_VECTORS; i++) {
            sum += q_tile[(n / KEY_LANES * K_VECTORS + i) * KEY_LANES + n % KEY_LANES];
        }
        q_bias[n] = -K_BIAS * total_of(sum);
    }
}

// The rows of keys t ..= t + 3. Unless all of them exist, the last key's row replaces later ones.
fn four_rows(s: Source, t: u32, last: u32, all_exist: bool) -> vec4<u32> {
    if IN_RUNS {
        let first = select(min(t, last), t, all_exist);
        let row = key_row(s, first);
        // Only rows of keys that exist are sums that fit in a u32.
        let n = vec4<u32>(0u, 1u, 2u, 3u);
        return row + select(min(n, vec4<u32>(last - first)), n, all_exist) * run_step(s);
    } else {
        let keys = min(vec4<u32>(t, t + 1u, t + 2u, t + 3u), vec4<u32>(last));
        return vec4<u32>(key_row(s, keys.x), key_row(s, keys.y), key_row(s, keys.z), key_row(s, keys.w));
    }
}

// Finds the rows of a tile's keys.
fn find_keys(k: Source, t0: u32, last: u32, lane: Lane) {
    /* unrolled */ for (var f = 0u; f < KEY_FOURS; f++) {
        let rows = four_rows(k, t0 + (f * GROUPS + lane.group) * 4u, last, false);
        /* unrolled */ for (var c = 0u; c < 4u; c++) {
            k_rows[f * 4u + c] = rows[c];
        }
    }
}

// Starts loading the n-th words of a lane's keys.
fn load_keys(k: Source, n: u32, lane: Lane) {
    var word = n * KEY_LANES + lane.word;
    if K_RAGGED {
        word = min(word, K_BLOCKS - 1u);
    }
    /* unrolled */ for (var c = 0u; c < LANE_KEYS; c++) {
        next_k_words[c] = k_word(k, k_rows[c], word);
        if K_SCALED {
            next_k_scales[c] = k_scale(k, k_rows[c], word);
        }
    }
}

// Moves loaded words into use.
fn use_loaded_keys(n: u32, lane: Lane) {
    /* unrolled */ for (var c = 0u; c < LANE_KEYS; c++) {
        k_words[c] = next_k_words[c];
        if K_RAGGED {
            // Zero, even if the word has NaN.
            k_words[c] = select(vec4<u32>(), k_words[c], n * KEY_LANES + lane.word < K_BLOCKS);
        }
        if K_SCALED {
            k_scales[c] = next_k_scales[c];
        }
    }
}

// Loads the words of the four keys from t on.
fn load_values(v: Source, t: u32, last: u32, all_exist: bool, lane: Lane) {
    let word = min(lane.column / V_SPLIT, V_BLOCKS - 1u);
    let rows = four_rows(v, t, last, all_exist);
    /* unrolled */ for (var c = 0u; c < 4u; c++) {
        v_words[c] = v_word(v, rows[c], word);
        if V_SCALED {
            v_scales[c] = v_scale(v, rows[c], word);
        }
    }
}

// scores += the n-th words' part of q · kᵀ
fn multiply_keys(n: u32, lane: Lane) {
    var sums: array<vec4<f32>, SCORES>;
    /* unrolled */ for (var i = 0u; i < SCORES; i++) {
        if K_BIAS != 0.0 {
            // Σ q · (number − K_BIAS) = Σ q · number − K_BIAS · Σ q
            let row = lane.row_group * LANE_ROWS + i % LANE_ROWS;
            sums[i] = vec4<f32>(q_bias[(row * K_WORDS + n) * KEY_LANES + lane.word]);
        } else if K_SCALED {
            sums[i] = vec4<f32>();
        } else {
            sums[i] = scores[i];
        }
    }
    let from_q = (lane.row_group * LANE_ROWS * K_WORDS + n) * (K_VECTORS * KEY_LANES) + lane.word;
    for (var step = 0u; step < WORD_STEPS; step++) {
        /* unrolled */ for (var i = 0u; i < STEP_VECTORS; i++) {
            /* unrolled */ for (var f = 0u; f < KEY_FOURS; f++) {
                let k0 = unpacked(K_STORAGE, k_words[f * 4u], i);
                let k1 = unpacked(K_STORAGE, k_words[f * 4u + 1u], i);
                let k2 = unpacked(K_STORAGE, k_words[f * 4u + 2u], i);
                let k3 = unpacked(K_STORAGE, k_words[f * 4u + 3u], i);
                /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
                    let vector = r * K_WORDS * K_VECTORS + step * STEP_VECTORS + i;
                    let q = q_tile[from_q + vector * KEY_LANES];
                    var t = sums[f * LANE_ROWS + r];
                    t = fma(vec4<f32>(q.x), vec4<f32>(k0.x, k1.x, k2.x, k3.x), t);
                    t = fma(vec4<f32>(q.y), vec4<f32>(k0.y, k1.y, k2.y, k3.y), t);
                    t = fma(vec4<f32>(q.z), vec4<f32>(k0.z, k1.z, k2.z, k3.z), t);
                    t = fma(vec4<f32>(q.w), vec4<f32>(k0.w, k1.w, k2.w, k3.w), t);
                    sums[f * LANE_ROWS + r] = t;
                }
            }
        }
        if WORD_STEPS > 1u {
            /* unrolled */ for (var c = 0u; c < LANE_KEYS; c++) {
                k_words[c] = k_words[c].yzwx;
            }
        }
    }
    /* unrolled */ for (var f = 0u; f < KEY_FOURS; f++) {
        let scale = vec4<f32>(k_scales[f * 4u], k_scales[f * 4u + 1u], k_scales[f * 4u + 2u], k_scales[f * 4u + 3u]);
        /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
            let i = f * LANE_ROWS + r;
            if K_SCALED {
                scores[i] = fma(sums[i], scale, scores[i]);
            } else {
                scores[i] = sums[i];
            }
        }
    }
}

// As multiply_keys, for loaded words. It also loads the tile's next words.
fn add_words(n: u32, k: Source, lane: Lane) {
    if !AHEAD {
        load_keys(k, n, lane);
    }
    use_loaded_keys(n, lane);
    if AHEAD && n + 1u < K_WORDS {
        load_keys(k, n + 1u, lane);
    }
    multiply_keys(n, lane);
}

// Computes the scores of a tile.
fn score(k: Source, v: Source, t0: u32, last: u32, lane: Lane) {
    /* unrolled */ for (var n = 0u; n < SCORES; n++) {
        scores[n] = vec4<f32>();
    }
    find_keys(k, t0, last, lane);
    if AHEAD {
        load_keys(k, 0u, lane);
    }
    /* unrolled */ for (var n = 0u; n < K_WRITTEN; n++) {
        add_words(n, k, lane);
    }
    if K_WRITTEN < K_WORDS {
        for (var n = K_WRITTEN; n < K_WORDS; n++) {
            add_words(n, k, lane);
        }
    }
    // The last tile's weights are no longer used.
    if SHARED || REDUCE_SIZE == 0u {
        workgroupBarrier();
    }
    if AHEAD {
        load_values(v, t0 + lane.subset * 4u, last, false, lane);
    }
    reduce(lane.n);
    if SHARED && REDUCE_SIZE != 0u {
        workgroupBarrier();
    }
}

// Sets scores to −∞ where a query does not see a key. Applies bias and softcap to the other scores,
// pair by pair.
fn mask_scores(work: WorkTile, t0: u32, end: u32, lane: Lane) {
    let neg_inf = p.mask.neg_inf;
    // The loop rotates the vectors through own_scores[0].
    for (var n = 0u; n < OWN; n++) {
        let row = own_row(n, lane);
        let t = t0 + own_unit(n, lane) * 4u + vec4<u32>(0u, 1u, 2u, 3u);
        let bounds = row_keys[row];
        let seen = (t >= vec4<u32>(bounds.x)) & (t < vec4<u32>(min(bounds.y, end)));
        var x = own_scores[0];
        if PER_PAIR_MASK {
            let query = query_at(work, row);
            /* unrolled */ for (var e = 0u; e < 4u; e++) {
                var y = neg_inf;
                if seen[e] {
                    if mask_mod(query, t[e]) {
                        y = score_mod(x[e], query, t[e]);
                    }
                }
                x[e] = y;
            }
        } else {
            x = select(vec4<f32>(neg_inf), x, seen);
        }
        /* unrolled */ for (var m = 0u; m < OWN - 1u; m++) {
            own_scores[m] = own_scores[m + 1u];
        }
        own_scores[OWN - 1u] = x;
    }
}

// Computes weights, assuming that no maximum moves. Returns true if one has to.
fn weigh(lane: Lane) -> bool {
    var in_reach = true;
    /* unrolled */ for (var n = 0u; n < OWN; n++) {
        let top = row_max[own_row(n, lane)];
        // False for a NaN.
        in_reach = in_reach && all(own_scores[n] <= vec4<f32>(top + RESCALE_THRESHOLD));
        weights[n] = weights_of(own_scores[n], top, p.mask.neg_inf);
        if owns(lane) {
            tile[own_place(n, lane)] = weights[n];
        }
    }
    if owns(lane) && !in_reach {
        /* unrolled */ for (var n = 0u; n < OWN; n++) {
            let most = max(max(own_scores[n].x, own_scores[n].y), max(own_scores[n].z, own_scores[n].w));
            // Not if it is NaN.
            if most > LOWEST {
                atomicMax(&row_top[own_row(n, lane)], ordered_bits(most));
            }
        }
        atomicStore(&any_above, 1u);
    }
    return workgroupUniformLoad(&any_above) != 0u;
}

// Updates row_max and row_rescale for the tile.
fn move_row_max(lane: Lane) {
    if lane.n < ROWS {
        let old = row_max[lane.n];
        let high = max(old, float_of(atomicLoad(&row_top[lane.n])));
        row_rescale[lane.n] = rescale_of(old, high);
        row_max[lane.n] = high;
    }
    if lane.n == 0u {
        atomicStore(&any_above, 0u);
    }
    workgroupBarrier();
}

// Rescales the sums and the tile's weights to the new maxima.
fn weigh_anew(lane: Lane) {
    /* unrolled */ for (var n = 0u; n < OWN; n++) {
        let row = own_row(n, lane);
        let nan = select(vec4<f32>(), own_scores[n], are_nan(own_scores[n]));
        own_sums[n] = own_sums[n] * row_rescale[row] + total_of(nan);
        weights[n] = weights_of(own_scores[n], row_max[row], p.mask.neg_inf);
        if owns(lane) {
            tile[own_place(n, lane)] = weights[n];
        }
    }
    /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
        let factor = row_rescale[lane.row_group * LANE_ROWS + r];
        biases[r] *= factor;
        /* unrolled */ for (var i = 0u; i < PIECE; i++) {
            acc[r * PIECE + i] *= factor;
        }
    }
    workgroupBarrier();
}

// acc += p · v of the n-th groups of four keys, whose words are loaded.
fn add_values(n: u32, lane: Lane) {
    let piece = lane.column % V_SPLIT;
    let w0 = piece_of(v_words[0], piece);
    let w1 = piece_of(v_words[1], piece);
    let w2 = piece_of(v_words[2], piece);
    let w3 = piece_of(v_words[3], piece);
    let scales = v_scales;
    let unit = n * SUBSETS + lane.subset;
    var from_p = P_AT + unit * P_STEP + lane.row_group * LANE_ROWS;
    if !EVEN_STEPS {
        from_p = select(from_p, ZEROS_AT + lane.row_group * LANE_ROWS, unit >= UNITS);
    }
    /* unrolled */ for (var i = 0u; i < PIECE; i++) {
        let x0 = unpacked(V_STORAGE, w0, i);
        let x1 = unpacked(V_STORAGE, w1, i);
        let x2 = unpacked(V_STORAGE, w2, i);
        let x3 = unpacked(V_STORAGE, w3, i);
        /* unrolled */ for (var r = 0u; r < LANE_ROWS; r++) {
            var w = tile[from_p + r];
            if V_SCALED {
                w *= scales;
                if i == 0u && V_BIAS != 0.0 {
                    biases[r] += total_of(w);
                }
            }
            var t = acc[r * PIECE + i];
            t = fma(vec4<f32>(w.x), x0, t);
            t = fma(vec4<f32>(w.y), x1, t);
            t = fma(vec4<f32>(w.z), x2, t);
            t = fma(vec4<f32>(w.w), x3, t);
            acc[r * PIECE + i] = t;
        }
    }
}

// Adds the values of a tile. If AHEAD, the words of the first step are loaded.
fn add_tile(v: Source, t0: u32, end: u32, last: u32, all_exist: bool, lane: Lane) {
    /* unrolled */ for (var n = 0u; n < OWN; n++) {
        own_sums[n] += total_of(weights[n]);
    }
    if all_exist && STEPS > 1u {
        // Loads and sums of several steps are independent, so drivers arrange them as registers
        // allow.
        /* unrolled */ for (var n = 0u; n < FIRST_STEPS; n++) {
            if !AHEAD || n > 0u {
                load_values(v, t0 + (n * SUBSETS + lane.subset) * 4u, last, EVEN_STEPS, lane);
            }
            add_values(n, lane);
        }
        for (var n = FIRST_STEPS; n < V_STEPS; n += STEPS) {
            /* unrolled */ for (var m = 0u; m < STEPS; m++) {
                load_values(v, t0 + ((n + m) * SUBSETS + lane.subset) * 4u, last, EVEN_STEPS, lane);
                add_values(n + m, lane);
            }
        }
    } else {
        // Not a minimum: some drivers would then unroll the loop.
        let steps = select((end - t0 + SUBSETS * 4u - 1u) / (SUBSETS * 4u), V_STEPS, end - t0 >= KEYS);
        for (var n = 0u; n < steps; n++) {
            if !AHEAD || n > 0u {
                load_values(v, t0 + (n * SUBSETS + lane.subset) * 4u, last, false, lane);
            }
            add_values(n, lane);
        }
    }
}

// Sums the weights and finishes the rows. The results are in row_rescale, row_max and row_sum.
fn finish_rows(work: WorkTile, keys: vec2<u32>, lane: Lane) {
    /* unrolled */ for (var n = 0u; n < OWN; n++) {
        let at = fold_at(n, lane);
        if owns(lane) {
            if n < OWN_ROWS {
                fold[at] = own_sums[n];
            } else {
                fold[at] += own_sums[n];
            }
        }
    }
    let total = folded(lane.n);
    if lane.n < ROWS {
        let row = work.row0 + lane.n;
        let state = row_state(row_max[lane.n], total, p.mask.neg_inf);
        let stores = row <= work.last_row && work.slice == 0u;
        let ends = finish_checked(state, work.z, min(row, work.last_row), work.split, keys, stores);
        row_rescale[lane.n] = ends.x;
        row_max[lane.n] = ends.y;
        row_sum[lane.n] = ends.z;
    }
}

// Adds the sums of the columns' subsets and stores them.
fn store_columns(work: WorkTile, keys: vec2<u32>, lane: Lane) {
    if V_BIAS != 0.0 {
        /* unrolled */ for (var n = 0u; n < LANE_ROWS * PIECE; n++) {
            acc[n] -= V_BIAS * biases[n / PIECE];
        }
    }
    for (var n = 0u; n < LANE_ROWS * PIECE; n++) {
        workgroupBarrier();
        tile[lane.n] = acc[0];
        // The loop rotates them through acc[0]: one copy of the code.
        /* unrolled */ for (var m = 0u; m < LANE_ROWS * PIECE - 1u; m++) {
            acc[m] = acc[m + 1u];
        }
        workgroupBarrier();
        if lane.n % GROUP_LANES < COLUMNS {
            var sum = tile[lane.n];
            for (var m = 1u; m < SUBSETS; m++) {
                sum += tile[lane.n + m * COLUMNS];
            }
            let row = lane.row_group * LANE_ROWS + n / PIECE;
            let channel = (lane.column * PIECE + n % PIECE) * 4u;
            if work.row0 + row <= work.last_row && lane.column < V_BLOCKS * V_SPLIT && channel < p.value_dim {
                let ends = vec3<f32>(row_rescale[row], row_max[row], row_sum[row]);
                let x = row_repaired(work.z, work.row0 + row, channel, sum * ends.x, ends, keys);
                store_row(work.z, work.row0 + row, work.split, channel, x);
            }
        }
    }
}

fn decode(id: vec3<u32>, index: u32) {
    let work = work_tile(id);
    if work.row0 > work.last_row {
        return;
    }
    let lane = lane_of(index, work.slice);
    let range = rows_key_range(work.b, work.kv_head, work.row0, work.last_row - work.row0 + 1u);
    // A multiple of four: a page has all keys of a group. Masks hide the keys before the range.
    let keys = split_keys(vec2<u32>(range.any_row.x & ~3u, range.any_row.y), work.split);
    let start = keys.x;
    let end = keys.y;
    let last = max(end, 1u) - 1u;
    let k = k_source(work.b, work.kv_head);
    let v = v_source(work.b, work.kv_head, 0u);

    // The code names q_tile before tile. naga declares variables in the order of their first use.
    // Some drivers lay them out in that order, and load whole vectors only at aligned addresses.
    stage_queries(work, index);
    prepare_rows(work, index);
    if K_BIAS != 0.0 {
        workgroupBarrier();
        sum_queries(index);
    }
    workgroupBarrier();

    for (var t0 = start; t0 < end; t0 += KEYS) {
        score(k, v, t0, last, lane);
        let is_masked = PER_PAIR_MASK || t0 < range.every_row.x || t0 + KEYS > min(range.every_row.y, end);
        if is_masked {
            mask_scores(work, t0, end, lane);
        }
        if weigh(lane) {
            move_row_max(lane);
            weigh_anew(lane);
        }
        add_tile(v, t0, end, last, !is_masked, lane);
    }

    finish_rows(work, keys, lane);
    store_columns(work, keys, lane);
}
