// The loop of fused.wgsl for GPUs, for few packed rows: each key and value is loaded once for all of them.
// A workgroup has ROWS packed rows and one part of the keys that they see, and walks it a tile at a time.
//
// Constants: ROWS        packed rows of a workgroup
//            LANE_ROWS   of these, rows of an invocation: ROWS, or ROWS / 2 (each half of the workgroup then
//                        takes half of the rows, and loads for itself what the other half has in its cache)
//            WORKGROUP   invocations
//            KEY_LANES   invocations that share a key: consecutive 16-byte words of its row are loaded side
//                        by side
//            KEY_FOURS   keys of an invocation, in fours
//            V_SPLIT     invocations that share a word of v, each with VECTORS / V_SPLIT vectors of it
//            ROUND       vectors of an invocation that the reduction over KEY_LANES takes at once
//            SHARED      weights and reduction use the same workgroup memory: a barrier or two more per tile
// K_BLOCKS, V_BLOCKS, VECTORS are compiled in: what is loaded, and where it is used, has constant bounds.
// All but V_BLOCKS, K_BLOCKS are powers of two.
//
// Rows of k and v are 16-byte words: k_word(row, n), v_word(row, n) load one as it is, and stay in registers
// so. unpacked(word, i) are its i-th four numbers; they stand in order, 128 / VECTORS bits a four. A number
// means (number - BIAS) · k_scale(row, n) if SCALED (BIAS is taken once from each sum, not from each number),
// else itself. finish_row and store_row take what comes out: of a split of several, or the end.
//
// Floors per key, for all rows of the workgroup, C = 4 · KEY_FOURS:
//   global memory     16 · (K_BLOCKS + V_BLOCKS) bytes and the scales, once; if LANE_ROWS < ROWS twice, and a
//                     word of v V_SPLIT times, but then from a cache or as the same address
//   multiply-adds     ROWS · (head_dim + value_dim)
//   workgroup memory  bytes: q 4 · ROWS · head_dim / C; weights ROWS · value_dim · V_SPLIT / VECTORS;
//                     reduction 8 · ROWS · KEY_LANES, with subgroups 0
// C = 4 and V_SPLIT = VECTORS, the most rows: a vector of workgroup memory per 16 multiply-adds, which is
// what GPUs have of both (128 bytes and 128 multiply-adds a cycle). 8 rows of f16, 128 channels each: 512
// bytes of global memory, 2048 multiply-adds, 2048 + 512 bytes of workgroup memory.
// Instructions of a lane (navi31) per word of k or v and group of V_SPLIT lanes, 128 channels, 1 / 4 / 8 / 16
// rows: f32 17 / 36 / 56 / 122, f16 26 / 65 / 112 / 245, q8 74 / 170 / 283 / 606, q4 125 / 292 / 545 / 1086,
// of which multiply-adds are a quarter to a half; with subgroups 3 to 15 % fewer. While a word comes from
// memory an H100 issues about 140, most others 250: below that it waits for memory.
//
// A tile: words of k in registers, each against q in workgroup memory (the same for all keys: few addresses)
// → sums of KEY_LANES lanes added → scores with their owners → weights in workgroup memory → p · v, each lane
// some channels and some fours of keys. A vector of scores or weights is always four consecutive keys of one
// row. Words are loaded a step ahead, the next tile's with this one's last: 4 · KEY_FOURS of k while a word
// of each key is multiplied, 4 of v while a four of keys is added, and the others' first wait meanwhile: 8 to
// 12 words a lane. All go through variables of the loops: what a loop only uses later in the same turn, past
// branches, some drivers load later too.
//
// Needs: p.first, p.group, p.head_dim, p.kv_heads, p.mask, p.q, p.scale, p.splits, p.value_dim; BIAS, KEY_FOURS,
// KEY_LANES, K_BLOCKS, LANE_ROWS, LOWEST, PER_PAIR_MASK, REDUCE_SIZE, RESCALE_THRESHOLD, ROWS, SCALED, SHARED,
// SPLITS, UNIT, VECTORS, V_BLOCKS, V_SPLIT, WORKGROUP; are_nan, finish_row, k_scale, k_source, k_word, key_row,
// mask_mod, owned_first, owned_group, q_at4, query_of_row, reduce, rescale_of, row_repaired, row_state,
// rows_key_range, score_mod, split_keys, store_row, unpacked, v_scale, v_source, v_word, view_at, weights_of.
// Gives: ALL_GROUPS, OWN, SCORES; decode, tile.

const ROW_GROUPS: u32 = ROWS / LANE_ROWS;
const GROUP_LANES: u32 = WORKGROUP / ROW_GROUPS;
// Words of a key that a lane has.
const K_WORDS: u32 = (K_BLOCKS + KEY_LANES - 1u) / KEY_LANES;
const K_RAGGED: bool = K_BLOCKS % KEY_LANES != 0u;
const LANE_KEYS: u32 = KEY_FOURS * 4u;
// A word of 8 vectors is taken a number at a time, which then stands in front: drivers may not unroll a loop
// of 8.
const WORD_STEPS: u32 = select(1u, 4u, VECTORS == 8u);
const STEP_VECTORS: u32 = VECTORS / WORD_STEPS;
// Groups of lanes that share a key, in a half and in all; units of four keys, keys of a tile.
const GROUPS: u32 = GROUP_LANES / KEY_LANES;
const ALL_GROUPS: u32 = WORKGROUP / KEY_LANES;
const UNITS: u32 = GROUPS * KEY_FOURS;
const KEYS: u32 = UNITS * 4u;
// Vectors of sums of a lane, number f * LANE_ROWS + r, and those it owns after the reduction.
const SCORES: u32 = LANE_ROWS * KEY_FOURS;
const OWN: u32 = max(1u, SCORES / KEY_LANES);

// Columns are pieces of words of v.
const PIECE: u32 = VECTORS / V_SPLIT;
const COLUMNS: u32 = min(V_BLOCKS * V_SPLIT, GROUP_LANES);
const SUBSETS: u32 = min(GROUP_LANES / COLUMNS, UNITS);
const V_STEPS: u32 = (UNITS + SUBSETS - 1u) / SUBSETS;

// Scales multiply what is fewer, the values or the weights.
const SCALES_VALUES: bool = SCALED && LANE_ROWS > 4u * PIECE;

// Workgroup memory, in vectors. An odd step spreads what owners store over the banks.
const Q_SIZE: u32 = ROWS * K_WORDS * KEY_LANES * VECTORS;
const P_STEP: u32 = ROWS | 1u;
const P_AT: u32 = select(REDUCE_SIZE, 0u, SHARED);
// The weights of a unit past the tile.
const ZEROS_AT: u32 = max(P_AT + UNITS * P_STEP, REDUCE_SIZE);
const TILE_SIZE: u32 = max(ZEROS_AT + select(ROWS, 0u, UNITS % SUBSETS == 0u), WORKGROUP);
// Numbers of a row that its owners have, folded by FOLDERS lanes.
const OWN_ROWS: u32 = max(1u, LANE_ROWS / KEY_LANES);
const FOLD: u32 = min(KEY_LANES, SCORES) * OWN_ROWS * ALL_GROUPS / ROWS;
const FOLDERS: u32 = max(1u, FOLD / 16u);

const_assert WORKGROUP % KEY_LANES == 0u && GROUP_LANES % KEY_LANES == 0u && ROWS % LANE_ROWS == 0u;
const_assert SCORES <= KEY_LANES || SCORES % KEY_LANES == 0u;
const_assert VECTORS % V_SPLIT == 0u && ROWS <= WORKGROUP && ROWS * FOLDERS <= WORKGROUP;

var<workgroup> q_tile: array<vec4<f32>, Q_SIZE>;
var<workgroup> tile: array<vec4<f32>, TILE_SIZE>;
// −BIAS · Σ q of the channels of a word [row, word].
var<workgroup> q_bias: array<f32, select(1u, ROWS * K_WORDS * KEY_LANES, SCALED)>;
var<workgroup> fold: array<f32, ROWS * FOLD>;
// Of the rows: what scores are relative to; what older sums are to be multiplied by; the sum of the weights,
// in the end; the interval of keys.
var<workgroup> row_max: array<f32, ROWS>;
var<workgroup> row_rescale: array<f32, ROWS>;
var<workgroup> row_sum: array<f32, ROWS>;
var<workgroup> row_keys: array<vec2<u32>, ROWS>;
// Whether a score of the tile is further above its row's top than RESCALE_THRESHOLD, or is NaN.
var<workgroup> any_above: atomic<u32>;

// The part of a word of v that a lane adds, moved to its front.
fn piece_of(word: vec4<u32>, piece: u32) -> vec4<u32> {
    if V_SPLIT == 1u {
        return word;
    }
    if V_SPLIT == 2u {
        return select(word, word.zwzw, piece == 1u);
    }
    // Of a number of 32 bits: all, or every other nibble.
    let shares = max(V_SPLIT / 4u, 1u);
    let number = piece / shares;
    let pair = select(word.xy, word.zw, number >= 2u);
    let one = select(pair.x, pair.y, number % 2u == 1u);
    return vec4<u32>(one >> (piece % shares * 4u));
}

// Numbers in `fold`, FOLD a row → one, for lane n < ROWS of row n; called in uniform control flow.
fn folded(lane: u32, adds: bool) -> f32 {
    workgroupBarrier();
    if FOLDERS > 1u {
        if lane < ROWS * FOLDERS {
            let at = lane / FOLDERS * FOLD + lane % FOLDERS;
            var x = fold[at];
            for (var n = FOLDERS; n < FOLD; n += FOLDERS) {
                x = select(max(x, fold[at + n]), x + fold[at + n], adds);
            }
            fold[at] = x;
        }
        workgroupBarrier();
    }
    var x = fold[min(lane, ROWS - 1u) * FOLD];
    for (var n = 1u; n < select(FOLD, FOLDERS, FOLDERS > 1u); n++) {
        let y = fold[min(lane, ROWS - 1u) * FOLD + n];
        x = select(max(x, y), x + y, adds);
    }
    return x;
}

fn decode(id: vec3<u32>, lane: u32) {
    let rows = p.mask.q_len * p.group;
    let tile_x = id.x + p.first.x;
    let row0 = select(tile_x, tile_x / p.splits, SPLITS) * ROWS;
    let split = select(0u, tile_x % p.splits, SPLITS);
    let z = id.z + p.first.z;
    let b = z / p.kv_heads;
    let kv_head = z % p.kv_heads;
    let neg_inf = p.mask.neg_inf;
    if row0 >= rows {
        return;
    }

    let range = rows_key_range(b, kv_head, row0, min(ROWS, rows - row0));
    let keys = split_keys(range.any_row, split);
    let start = keys.x;
    let end = keys.y;
    let last = max(end, 1u) - 1u;
    let k = k_source(b, kv_head);
    let v = v_source(b, kv_head, 0u);

    // q [row, word, vector, lane], zero past head_dim.
    for (var n = lane; n < Q_SIZE; n += WORKGROUP) {
        let word = n / VECTORS / KEY_LANES % K_WORDS * KEY_LANES + n % KEY_LANES;
        let d = (word * VECTORS + n / KEY_LANES % VECTORS) * 4u;
        let query = query_of_row(b, kv_head, min(row0 + n / (K_WORDS * KEY_LANES * VECTORS), rows - 1u));
        var x = vec4<f32>();
        if d < p.head_dim {
            let at = view_at(p.q, query.b, query.h, query.i, d);
            x = q_at4(at, p.q.strides.w, p.head_dim - d) * (p.scale * UNIT);
        }
        q_tile[n] = x;
    }
    // Named second: naga declares variables in the order of their first use, some drivers lay them out in
    // that order, and load vectors whole only where they are aligned.
    if UNITS % SUBSETS != 0u && lane < ROWS {
        tile[ZEROS_AT + lane] = vec4<f32>();
    }
    if lane < ROWS {
        let query = query_of_row(b, kv_head, min(row0 + lane, rows - 1u));
        row_keys[lane] = vec2<u32>(query.first, query.end);
        row_max[lane] = LOWEST;
    }
    if lane == 0u {
        atomicStore(&any_above, 0u);
    }
    // What this lane computes of q · kᵀ: a word of KEY_LANES neighbouring ones, of units my_group, + GROUPS,
    // ...
    let my_word = lane % KEY_LANES;
    let my_group = lane / KEY_LANES % GROUPS;
    let my_row_group = lane / GROUP_LANES;
    // The scores that it owns: vectors own_first, + KEY_LANES, ... of groups all over the workgroup.
    let own_first = owned_first(lane);
    let own_group = owned_group(lane) % GROUPS;
    let own_row = owned_group(lane) / GROUPS * LANE_ROWS;
    let owns = own_first < SCORES;
    // And of p · v: a column, units my_subset, + SUBSETS, ...
    let my_column = lane % GROUP_LANES % COLUMNS;
    let my_subset = min(lane % GROUP_LANES / COLUMNS, SUBSETS - 1u);
    let column = (id.y + p.first.y) * COLUMNS + my_column;
    let v_word_at = min(column / V_SPLIT, V_BLOCKS - 1u);

    var acc: array<vec4<f32>, LANE_ROWS * PIECE>;
    for (var n = 0u; n < LANE_ROWS * PIECE; n++) {
        acc[n] = vec4<f32>();
    }
    // The sums of what it has multiplied numbers by: so often is BIAS to be taken from its sums.
    var biases: array<f32, LANE_ROWS>;
    for (var r = 0u; r < LANE_ROWS; r++) {
        biases[r] = 0.0;
    }
    // Of the weights that it owns.
    var own_sums: array<vec4<f32>, OWN>;
    for (var n = 0u; n < OWN; n++) {
        own_sums[n] = vec4<f32>();
    }

    var k_rows: array<u32, LANE_KEYS>;
    var k_words: array<vec4<u32>, LANE_KEYS>;
    var k_scales: array<f32, LANE_KEYS>;
    var v_words: array<vec4<u32>, 4>;
    var v_scales = vec4<f32>(1.0);
    for (var c = 0u; c < LANE_KEYS; c++) {
        k_scales[c] = 1.0;
    }
    if SCALED {
        workgroupBarrier();
        for (var n = lane; n < ROWS * K_WORDS * KEY_LANES; n += WORKGROUP) {
            var sum = vec4<f32>();
            for (var i = 0u; i < VECTORS; i++) {
                sum += q_tile[(n / KEY_LANES * VECTORS + i) * KEY_LANES + n % KEY_LANES];
            }
            q_bias[n] = -BIAS * (sum.x + sum.y + sum.z + sum.w);
        }
    }
    if start < end {
        for (var c = 0u; c < LANE_KEYS; c++) {
            let t = start + (c / 4u * GROUPS + my_group) * 4u + c % 4u;
            k_rows[c] = key_row(k, min(t, last));
            let word = min(my_word, K_BLOCKS - 1u);
            k_words[c] = k_word(k, k_rows[c], word);
            if SCALED {
                k_scales[c] = k_scale(k, k_rows[c], word);
            }
        }
        for (var c = 0u; c < 4u; c++) {
            let row = key_row(v, min(start + my_subset * 4u + c, last));
            v_words[c] = v_word(v, row, v_word_at);
            if SCALED {
                v_scales[c] = v_scale(v, row, v_word_at);
            }
        }
    }
    workgroupBarrier();

    for (var t0 = start; t0 < end; t0 += KEYS) {
        var next_rows: array<u32, LANE_KEYS>;
        for (var c = 0u; c < LANE_KEYS; c++) {
            let t = t0 + KEYS + (c / 4u * GROUPS + my_group) * 4u + c % 4u;
            next_rows[c] = key_row(k, min(t, last));
        }

        // q · kᵀ
        var s: array<vec4<f32>, SCORES>;
        for (var n = 0u; n < SCORES; n++) {
            s[n] = vec4<f32>();
        }
        for (var n = 0u; n < K_WORDS; n++) {
            var words = k_words;
            let scales = k_scales;
            let is_last = n + 1u == K_WORDS;
            let word = min(select((n + 1u) * KEY_LANES, 0u, is_last) + my_word, K_BLOCKS - 1u);
            for (var c = 0u; c < LANE_KEYS; c++) {
                let row = select(k_rows[c], next_rows[c], is_last);
                k_words[c] = k_word(k, row, word);
                if SCALED {
                    k_scales[c] = k_scale(k, row, word);
                }
            }
            if K_RAGGED {
                // Nothing, even of what is NaN there.
                for (var c = 0u; c < LANE_KEYS; c++) {
                    words[c] = select(vec4<u32>(), words[c], n * KEY_LANES + my_word < K_BLOCKS);
                }
            }
            var word_sums: array<vec4<f32>, SCORES>;
            for (var i = 0u; i < SCORES; i++) {
                word_sums[i] = vec4<f32>();
                if SCALED {
                    // Σ q · (number − BIAS) = Σ q · number − BIAS · Σ q
                    let row = my_row_group * LANE_ROWS + i % LANE_ROWS;
                    word_sums[i] = vec4<f32>(q_bias[(row * K_WORDS + n) * KEY_LANES + my_word]);
                }
            }
            let from_q = (my_row_group * LANE_ROWS * K_WORDS + n) * (VECTORS * KEY_LANES) + my_word;
            for (var word_step = 0u; word_step < WORD_STEPS; word_step++) {
                for (var i = 0u; i < STEP_VECTORS; i++) {
                    for (var f = 0u; f < KEY_FOURS; f++) {
                        let k0 = unpacked(words[f * 4u], i);
                        let k1 = unpacked(words[f * 4u + 1u], i);
                        let k2 = unpacked(words[f * 4u + 2u], i);
                        let k3 = unpacked(words[f * 4u + 3u], i);
                        for (var r = 0u; r < LANE_ROWS; r++) {
                            let vector = r * K_WORDS * VECTORS + word_step * STEP_VECTORS + i;
                            let q = q_tile[from_q + vector * KEY_LANES];
                            var t = word_sums[f * LANE_ROWS + r];
                            if !SCALED {
                                t = s[f * LANE_ROWS + r];
                            }
                            t = fma(vec4<f32>(q.x), vec4<f32>(k0.x, k1.x, k2.x, k3.x), t);
                            t = fma(vec4<f32>(q.y), vec4<f32>(k0.y, k1.y, k2.y, k3.y), t);
                            t = fma(vec4<f32>(q.z), vec4<f32>(k0.z, k1.z, k2.z, k3.z), t);
                            t = fma(vec4<f32>(q.w), vec4<f32>(k0.w, k1.w, k2.w, k3.w), t);
                            if SCALED {
                                word_sums[f * LANE_ROWS + r] = t;
                            } else {
                                s[f * LANE_ROWS + r] = t;
                            }
                        }
                    }
                }
                if WORD_STEPS > 1u {
                    for (var c = 0u; c < LANE_KEYS; c++) {
                        words[c] = words[c].yzwx;
                    }
                }
            }
            if SCALED {
                for (var i = 0u; i < SCORES; i++) {
                    let f = i / LANE_ROWS * 4u;
                    let scale = vec4<f32>(scales[f], scales[f + 1u], scales[f + 2u], scales[f + 3u]);
                    if K_WORDS == 1u {
                        s[i] = word_sums[i] * scale;
                    } else {
                        s[i] = fma(word_sums[i], scale, s[i]);
                    }
                }
            }
        }
        k_rows = next_rows;

        var own_scores: array<vec4<f32>, OWN>;
        // Last tile's weights are done with.
        if SHARED || REDUCE_SIZE == 0u {
            workgroupBarrier();
        }
        reduce(lane, &s, &own_scores);
        if SHARED && REDUCE_SIZE != 0u {
            workgroupBarrier();
        }

        // Masks
        let edge = t0 < range.every_row.x || t0 + KEYS > min(range.every_row.y, end);
        if PER_PAIR_MASK || edge {
            for (var n = 0u; n < OWN; n++) {
                let j = (n * KEY_LANES + own_first) % SCORES;
                let row = own_row + j % LANE_ROWS;
                let t = t0 + (j / LANE_ROWS * GROUPS + own_group) * 4u + vec4<u32>(0u, 1u, 2u, 3u);
                let bounds = row_keys[row];
                let seen = (t >= vec4<u32>(bounds.x)) & (t < vec4<u32>(min(bounds.y, end)));
                if PER_PAIR_MASK {
                    let query = query_of_row(b, kv_head, min(row0 + row, rows - 1u));
                    for (var e = 0u; e < 4u; e++) {
                        var x = neg_inf;
                        if seen[e] {
                            if mask_mod(query, t[e]) {
                                x = score_mod(own_scores[n][e], query, t[e]);
                            }
                        }
                        own_scores[n][e] = x;
                    }
                } else {
                    own_scores[n] = select(vec4<f32>(neg_inf), own_scores[n], seen);
                }
            }
        }

        // Weights, as if no top had to move.
        var in_reach = true;
        var weights: array<vec4<f32>, OWN>;
        for (var n = 0u; n < OWN; n++) {
            let j = (n * KEY_LANES + own_first) % SCORES;
            let row = own_row + j % LANE_ROWS;
            let top = row_max[row];
            // A NaN is not.
            in_reach = in_reach && all(own_scores[n] <= vec4<f32>(top + RESCALE_THRESHOLD));
            weights[n] = weights_of(own_scores[n], top, neg_inf);
            if owns {
                tile[P_AT + (j / LANE_ROWS * GROUPS + own_group) * P_STEP + row] = weights[n];
            }
        }
        if owns && !in_reach {
            atomicOr(&any_above, 1u);
        }
        let must_rescale = workgroupUniformLoad(&any_above) != 0u;
        if must_rescale {
            for (var n = 0u; n < OWN; n++) {
                let j = (n * KEY_LANES + own_first) % SCORES;
                let m = max(max(own_scores[n].x, own_scores[n].y), max(own_scores[n].z, own_scores[n].w));
                let at = fold_at(n, own_first, own_group, own_row + j % LANE_ROWS);
                if owns {
                    if n < OWN_ROWS {
                        fold[at] = m;
                    } else {
                        fold[at] = max(fold[at], m);
                    }
                }
            }
            let most = folded(lane, false);
            if lane < ROWS {
                let top = row_max[lane];
                let high = max(top, most);
                row_rescale[lane] = rescale_of(top, high);
                row_max[lane] = high;
            }
            if lane == 0u {
                atomicStore(&any_above, 0u);
            }
            workgroupBarrier();
            for (var n = 0u; n < OWN; n++) {
                let j = (n * KEY_LANES + own_first) % SCORES;
                let row = own_row + j % LANE_ROWS;
                own_sums[n] = own_sums[n] * row_rescale[row] + select(vec4<f32>(), own_scores[n], are_nan(own_scores[n]));
                weights[n] = weights_of(own_scores[n], row_max[row], neg_inf);
                if owns {
                    tile[P_AT + (j / LANE_ROWS * GROUPS + own_group) * P_STEP + row] = weights[n];
                }
            }
            for (var r = 0u; r < LANE_ROWS; r++) {
                let factor = row_rescale[my_row_group * LANE_ROWS + r];
                biases[r] *= factor;
                for (var i = 0u; i < PIECE; i++) {
                    acc[r * PIECE + i] *= factor;
                }
            }
            workgroupBarrier();
        }
        for (var n = 0u; n < OWN; n++) {
            own_sums[n] += weights[n];
        }

        // p · v
        // Not a minimum, by which some drivers would unroll the loop, and move its loads down to where they
        // are used.
        let whole = end - t0 >= KEYS;
        let steps = select((end - t0 + SUBSETS * 4u - 1u) / (SUBSETS * 4u), V_STEPS, whole);
        for (var n = 0u; n < steps; n++) {
            // Taken before more is loaded, which may then take their place.
            let w0 = piece_of(v_words[0], column % V_SPLIT);
            let w1 = piece_of(v_words[1], column % V_SPLIT);
            let w2 = piece_of(v_words[2], column % V_SPLIT);
            let w3 = piece_of(v_words[3], column % V_SPLIT);
            let scales = v_scales;
            let t = select(t0 + (n + 1u) * (SUBSETS * 4u), t0 + KEYS, n + 1u == steps) + my_subset * 4u;
            for (var c = 0u; c < 4u; c++) {
                let row = key_row(v, min(t + c, last));
                v_words[c] = v_word(v, row, v_word_at);
                if SCALED {
                    v_scales[c] = v_scale(v, row, v_word_at);
                }
            }
            let unit = n * SUBSETS + my_subset;
            var from_p = P_AT + unit * P_STEP + my_row_group * LANE_ROWS;
            if UNITS % SUBSETS != 0u {
                from_p = select(from_p, ZEROS_AT + my_row_group * LANE_ROWS, unit >= UNITS);
            }
            for (var i = 0u; i < PIECE; i++) {
                var x0 = unpacked(w0, i);
                var x1 = unpacked(w1, i);
                var x2 = unpacked(w2, i);
                var x3 = unpacked(w3, i);
                if SCALES_VALUES {
                    x0 = fma(x0, vec4<f32>(scales.x), vec4<f32>(-BIAS * scales.x));
                    x1 = fma(x1, vec4<f32>(scales.y), vec4<f32>(-BIAS * scales.y));
                    x2 = fma(x2, vec4<f32>(scales.z), vec4<f32>(-BIAS * scales.z));
                    x3 = fma(x3, vec4<f32>(scales.w), vec4<f32>(-BIAS * scales.w));
                }
                for (var r = 0u; r < LANE_ROWS; r++) {
                    var w = tile[from_p + r];
                    if SCALED && !SCALES_VALUES {
                        w *= scales;
                        if i == 0u {
                            biases[r] += (w.x + w.y) + (w.z + w.w);
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
    }

    // The sums of the weights.
    for (var n = 0u; n < OWN; n++) {
        let j = (n * KEY_LANES + own_first) % SCORES;
        let at = fold_at(n, own_first, own_group, own_row + j % LANE_ROWS);
        let total = own_sums[n].x + own_sums[n].y + own_sums[n].z + own_sums[n].w;
        if owns {
            if n < OWN_ROWS {
                fold[at] = total;
            } else {
                fold[at] += total;
            }
        }
    }
    let total = folded(lane, true);
    if lane < ROWS {
        let row = min(row0 + lane, rows - 1u);
        let first_slice = id.y + p.first.y == 0u;
        let finish = finish_row(row_state(row_max[lane], total, neg_inf), z, row, split, row0 + lane < rows && first_slice);
        row_rescale[lane] = finish.x;
        row_max[lane] = finish.y;
        row_sum[lane] = finish.z;
    }

    if SCALED && !SCALES_VALUES {
        for (var n = 0u; n < LANE_ROWS * PIECE; n++) {
            acc[n] -= BIAS * biases[n / PIECE];
        }
    }
    // The sums of a column's subsets.
    for (var n = 0u; n < LANE_ROWS * PIECE; n++) {
        workgroupBarrier();
        tile[lane] = acc[0];
        // They take turns in sums[0]: one copy of the text, and no indices into registers.
        for (var m = 0u; m + 1u < LANE_ROWS * PIECE; m++) {
            acc[m] = acc[m + 1u];
        }
        workgroupBarrier();
        if lane % GROUP_LANES < COLUMNS {
            var sum = tile[lane];
            for (var m = 1u; m < SUBSETS; m++) {
                sum += tile[lane + m * COLUMNS];
            }
            let row = my_row_group * LANE_ROWS + n / PIECE;
            let channel = (column * PIECE + n % PIECE) * 4u;
            if row0 + row < rows && column < V_BLOCKS * V_SPLIT && channel < p.value_dim {
                let ends = vec3<f32>(row_rescale[row], row_max[row], row_sum[row]);
                let x = row_repaired(z, row0 + row, channel, sum * ends.x, ends, keys);
                store_row(z, row0 + row, split, channel, x);
            }
        }
    }
}

// Where a lane folds the n-th vector that it owns: vectors of the same row go to the same place.
fn fold_at(n: u32, own_first: u32, own_group: u32, row: u32) -> u32 {
    let each = FOLD / GROUPS;
    return row * FOLD + own_group * each + own_first / LANE_ROWS % each;
}
