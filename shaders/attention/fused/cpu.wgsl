// The loop of fused.wgsl for drivers that run on a CPU.
//
// An invocation computes ROWS / LANES queries, with all of their q and sums in variables. All loops
// over them have constant bounds, so the driver unrolls them. The addresses of keys and values
// depend only on workgroup_id and the loop's counter. They are uniform loads, which the compiler
// broadcasts without workgroup memory. The kernel scores a block of KEYS keys, computes weights and
// adds them, then goes on to the next block. Each sum is thus read and written once per block.
//
// Constants: ROWS     packed rows of a workgroup, a multiple of LANES
//            LANES    invocations of a workgroup, as many as the driver computes at once
//            KEYS     keys of a block
//            HEAD_VECTORS    vectors of four that hold head_dim
//            VALUE_VECTORS   vectors of four of value_dim that a workgroup computes; not more than
//                            hold value_dim; workgroup_id.y is the slice
// The loop must fit in the first-level instruction cache; plan/fused_cpu.rs counts its code.
//
// Lower bound, per query, key and channel of each kind: a multiplication and an addition. (Software
// drivers have no fused one.) Bytes: k and v once per ROWS packed rows. lavapipe needs about 5.5
// instructions instead of two (docs/internals/kernels.md). Each loaded element of k and v takes
// five, once per query of an invocation, to check and broadcast it. Each block, query and channel
// of v takes three more. A sum that a loop changes is read, selected by the lane mask and written.
//
// Needs: p.first, p.group, p.head_dim, p.kv_heads, p.mask, p.q, p.scale, p.splits, p.value_dim;
// FULL, FULL_IS_PLAIN, HAS_BLOCKS, HAS_DROPOUT, HEAD_VECTORS, HIDDEN, HIDES_TILES, KEYS, LANES,
// LISTED, LOWEST, PER_PAIR_MASK, RESCALE_THRESHOLD, ROWS, RUN, SEEN_IS_PLAIN, SPLITS, UNIT,
// VALUE_VECTORS; Query; all_finite, any_nan, apply_dropout, block_of_row, documents_of_rows,
// finish_checked, first_seen_run, hides_by_query, k_last, k_source, k_whole, key_row, map_row,
// mask_mod, q_at4, query_of_row, repaired, rescale_of, row_state, rows_key_range, score_mod,
// split_keys, store_row, tile_column_state, v_last, v_source, v_whole, view_at, weight_of.
// Gives: main.

const LANE_ROWS: u32 = ROWS / LANES;
const_assert RUN % KEYS == 0u;
// Independent sums per score, added at the end. Additions in one chain would wait for each other.
const CHAINS: u32 = select(1u, 4u, LANE_ROWS * KEYS <= 4u);

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

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    // No data is shared. With a barrier, llvmpipe makes a coroutine of the function. Bounds checks
    // then select a pointer instead of branching around the load.
    workgroupBarrier();
    let z = workgroup.z + p.first.z;
    let b = z / p.kv_heads;
    let kv_head = z % p.kv_heads;
    let packed = p.mask.q_len * p.group;
    let x = workgroup.x + p.first.x;
    let row0 = select(x, x / p.splits, SPLITS) * ROWS;
    let split = select(0u, x % p.splits, SPLITS);
    let neg_inf = p.mask.neg_inf;

    // The last slice starts early enough that no load needs a bounds check.
    let slice_col = (workgroup.y + p.first.y) * VALUE_VECTORS * 4u;
    let col0 = min(slice_col, (p.value_dim + 3u) / 4u * 4u - VALUE_VECTORS * 4u);

    let k = k_source(b, kv_head);
    let v = v_source(b, kv_head, col0);
    // Valid channels in the last vector of k and of v.
    let k_rest = p.head_dim - (HEAD_VECTORS - 1u) * 4u;
    let v_rest = p.value_dim - col0 - (VALUE_VECTORS - 1u) * 4u;

    var queries: array<Query, LANE_ROWS>;
    var q: array<array<array<vec4<f32>, HEAD_INNER>, HEAD_OUTER>, LANE_ROWS>;
    var acc: array<array<array<vec4<f32>, VALUE_INNER>, VALUE_OUTER>, LANE_ROWS>;
    var row_max: array<f32, LANE_ROWS>;
    var row_sum: array<f32, LANE_ROWS>;
    var nan_carry: array<f32, LANE_ROWS>;
    for (var r = 0u; r < LANE_ROWS; r++) {
        let row = min(row0 + r * LANES + lane, packed - 1u);
        queries[r] = query_of_row(b, kv_head, row);
        let at = view_at(p.q, b, queries[r].h, queries[r].i, 0u);
        for (var outer = 0u; outer < HEAD_OUTER; outer++) {
            for (var n = 0u; n < HEAD_INNER; n++) {
                let d = outer * HEAD_INNER + n;
                if d < HEAD_VECTORS {
                    let x = q_at4(at + d * 4u * p.q.strides.w, p.q.strides.w, p.head_dim - d * 4u);
                    q[r][outer][n] = x * (p.scale * UNIT);
                }
            }
        }
        for (var outer = 0u; outer < VALUE_OUTER; outer++) {
            for (var n = 0u; n < VALUE_INNER; n++) {
                let d = outer * VALUE_INNER + n;
                if d < VALUE_VECTORS {
                    acc[r][outer][n] = vec4<f32>();
                }
            }
        }
        row_max[r] = LOWEST;
        row_sum[r] = 0.0;
        nan_carry[r] = 0.0;
    }

    // The valid channels, as a value per lane. For a scalar condition, LLVM makes a branch and
    // moves code into it.
    let zero = queries[0].i >> 31u;
    let k_exist = vec4<u32>(0u, 1u, 2u, 3u) + zero < vec4<u32>(k_rest);
    let v_exist = vec4<u32>(0u, 1u, 2u, 3u) + zero < vec4<u32>(v_rest);

    var range = rows_key_range(b, kv_head, row0, min(ROWS, packed - row0));
    range.any_row = split_keys(range.any_row, split);
    var stop = range.any_row.y;
    var asks = PER_PAIR_MASK;
    // Rows and column of the map, computed once. Drivers without vector division divide lane by
    // lane.
    var map_rows: array<u32, LANE_ROWS>;
    var rows = vec2<u32>();
    var col = 0u;
    if HAS_BLOCKS {
        stop = range.any_row.x;
        rows = vec2<u32>(map_row(row0 / p.group), map_row((min(row0 + ROWS, packed) - 1u) / p.group));
        col = stop / p.mask.block.y;
        for (var r = 0u; r < LANE_ROWS; r++) {
            map_rows[r] = map_row(queries[r].i);
        }
    }
    var documents = vec2<u32>();
    // A run is a whole number of blocks, so the sums of the remaining blocks do not change.
    var looked = 0u;
    if HIDES_TILES {
        documents = documents_of_rows(b, kv_head, row0, 1u, min(row0 + ROWS, packed));
    }
    for (var j = range.any_row.x; j < range.any_row.y; j = min(j + KEYS, stop)) {
        if HIDES_TILES {
            if j >= looked {
                let run = first_seen_run(b, kv_head, documents, j, range.any_row.y);
                j = run.x;
                looked = j + RUN;
                asks = !SEEN_IS_PLAIN || run.y == 0u || hides_by_query();
            }
            if j >= range.any_row.y {
                break;
            }
        }
        if HAS_BLOCKS {
            // A separate loop, because drivers that mask lanes execute the rest of a loop after
            // `continue`.
            while j == stop && j < range.any_row.y {
                // The end of the map's column.
                stop = min((col + 1u) * p.mask.block.y, range.any_row.y);
                let state = tile_column_state(b, kv_head, rows, col, stop - 1u);
                asks = !(FULL_IS_PLAIN && state == FULL);
                if state == HIDDEN {
                    j = stop;
                } else {
                    for (var r = 0u; r < LANE_ROWS; r++) {
                        queries[r].block = block_of_row(queries[r], map_rows[r], col);
                    }
                }
                col += 1u;
            }
            if j >= range.any_row.y {
                break;
            }
        }
        // Keys past the range can hold any value, even NaN.
        let last = stop - 1u;
        var s: array<array<f32, KEYS>, LANE_ROWS>;
        var chains: array<array<array<f32, CHAINS>, KEYS>, LANE_ROWS>;
        for (var r = 0u; r < LANE_ROWS; r++) {
            for (var c = 0u; c < KEYS; c++) {
                for (var e = 0u; e < CHAINS; e++) {
                    chains[r][c][e] = 0.0;
                }
            }
        }
        // A list is read once, not for each vector.
        var k_rows: array<u32, KEYS>;
        var v_rows: array<u32, KEYS>;
        if LISTED {
            for (var c = 0u; c < KEYS; c++) {
                k_rows[c] = key_row(k, min(j + c, last));
                v_rows[c] = key_row(v, min(j + c, last));
            }
        }
        for (var outer = 0u; outer < HEAD_OUTER; outer++) {
            for (var n = 0u; n < HEAD_INNER; n++) {
                let d = outer * HEAD_INNER + n;
                if d < HEAD_VECTORS {
                    var x: array<vec4<f32>, KEYS>;
                    for (var c = 0u; c < KEYS; c++) {
                        var row = 0u;
                        if LISTED {
                            row = k_rows[c];
                        } else {
                            row = key_row(k, min(j + c, last));
                        }
                        if d + 1u < HEAD_VECTORS {
                            x[c] = k_whole(k, row, d * 4u);
                        } else {
                            x[c] = k_last(k, row, d * 4u, k_rest, k_exist);
                        }
                    }
                    /* unrolled */ for (var e = 0u; e < 4u; e++) {
                        for (var r = 0u; r < LANE_ROWS; r++) {
                            for (var c = 0u; c < KEYS; c++) {
                                chains[r][c][e % CHAINS] += x[c][e] * q[r][outer][n][e];
                            }
                        }
                    }
                }
            }
        }
        for (var r = 0u; r < LANE_ROWS; r++) {
            for (var c = 0u; c < KEYS; c++) {
                s[r][c] = chains[r][c][0];
                for (var e = 1u; e < CHAINS; e++) {
                    s[r][c] += chains[r][c][e];
                }
            }
        }
        // Without branches. Otherwise the compiler would move each score into the branch that uses
        // it, and hold all of k in registers.
        if asks || j < range.every_row.x || j + KEYS > min(range.every_row.y, stop) {
            for (var r = 0u; r < LANE_ROWS; r++) {
                for (var c = 0u; c < KEYS; c++) {
                    var seen = (j + c >= queries[r].first) & (j + c < min(queries[r].end, stop));
                    var x = s[r][c];
                    if PER_PAIR_MASK {
                        // Past the range, use any other key, because rules read tensors at its
                        // index.
                        let key = select(j, j + c, seen);
                        seen = select(false, mask_mod(queries[r], key), seen);
                        x = score_mod(x, queries[r], key);
                    }
                    s[r][c] = select(neg_inf, x, seen);
                }
            }
        }
        // A NaN is not below. The code counts because compilers turn "not at most" into "above".
        var below_limit = 0u;
        for (var r = 0u; r < LANE_ROWS; r++) {
            let limit = row_max[r] + RESCALE_THRESHOLD;
            for (var c = 0u; c < KEYS; c++) {
                below_limit += select(0u, 1u, s[r][c] <= limit);
            }
        }
        if below_limit != LANE_ROWS * KEYS {
            if opaque_true() {
                for (var r = 0u; r < LANE_ROWS; r++) {
                    var new_max = row_max[r];
                    for (var c = 0u; c < KEYS; c++) {
                        new_max = max(new_max, s[r][c]);
                        nan_carry[r] += select(0.0, s[r][c], any_nan(vec4<f32>(s[r][c])));
                    }
                    let rescale = rescale_of(row_max[r], new_max);
                    row_max[r] = new_max;
                    row_sum[r] *= rescale;
                    for (var outer = 0u; outer < VALUE_OUTER; outer++) {
                        for (var n = 0u; n < VALUE_INNER; n++) {
                            let d = outer * VALUE_INNER + n;
                            if d < VALUE_VECTORS {
                                acc[r][outer][n] *= rescale;
                            }
                        }
                    }
                }
            }
        }
        for (var r = 0u; r < LANE_ROWS; r++) {
            var t = 0.0;
            for (var c = 0u; c < KEYS; c++) {
                s[r][c] = select(weight_of(s[r][c] - row_max[r]), 0.0, s[r][c] == neg_inf);
                t += s[r][c];
                if HAS_DROPOUT {
                    s[r][c] = apply_dropout(s[r][c], b, queries[r].h, queries[r].i, j + c);
                }
            }
            row_sum[r] += t;
        }
        for (var outer = 0u; outer < VALUE_OUTER; outer++) {
            for (var n = 0u; n < VALUE_INNER; n++) {
                let d = outer * VALUE_INNER + n;
                if d < VALUE_VECTORS {
                    var x: array<vec4<f32>, KEYS>;
                    for (var c = 0u; c < KEYS; c++) {
                        var row = 0u;
                        if LISTED {
                            row = v_rows[c];
                        } else {
                            row = key_row(v, min(j + c, last));
                        }
                        if d + 1u < VALUE_VECTORS {
                            x[c] = v_whole(v, row, d * 4u);
                        } else {
                            x[c] = v_last(v, row, d * 4u, v_rest, v_exist);
                        }
                    }
                    for (var r = 0u; r < LANE_ROWS; r++) {
                        var t = x[0] * s[r][0];
                        for (var c = 1u; c < KEYS; c++) {
                            t += x[c] * s[r][c];
                        }
                        acc[r][outer][n] += t;
                    }
                }
            }
        }
    }

    for (var r = 0u; r < LANE_ROWS; r++) {
        let row = row0 + r * LANES + lane;
        if row < packed {
            let end = finish_checked(row_state(row_max[r], row_sum[r] + nan_carry[r], neg_inf), z, row, split, range.any_row, slice_col == 0u);
            for (var outer = 0u; outer < VALUE_OUTER; outer++) {
                let outer_col = col0 + outer * VALUE_INNER * 4u;
                var broken = 0u;
                for (var n = 0u; n < VALUE_INNER; n++) {
                    let col = outer_col + n * 4u;
                    if outer * VALUE_INNER + n < VALUE_VECTORS {
                        if col >= slice_col {
                            let x = acc[r][outer][n] * end.x;
                            store_row(z, row, split, col, x);
                            broken |= select(0u, 1u << n, !all_finite(x));
                        }
                    }
                }
                // A separate loop, so that all channels share one copy of its code.
                while broken != 0u {
                    let col = outer_col + firstTrailingBit(broken) * 4u;
                    broken &= broken - 1u;
                    store_row(z, row, split, col, repaired(queries[r], col, end.yz, range.any_row));
                }
            }
        }
    }
}
