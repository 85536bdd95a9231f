// The loop of fused.wgsl for drivers that run on a CPU.
//
// An invocation has ROWS / LANES queries of its own, with all of their q and of their sums in variables:
// every loop over them has constant bounds, so that the driver unrolls it. Keys and values come from
// workgroup_id and the loop's counter alone: uniform loads, which the compiler broadcasts, with no
// workgroup memory. A block of KEYS keys is scored, weighed and added before the next, so that each sum
// is read and written once per block.
//
// Constants: ROWS     packed rows of a workgroup, a multiple of LANES
//            LANES    invocations of a workgroup
//            KEYS     keys of a block
//            HEAD_VECTORS    vectors of four that hold head_dim
//            VALUE_VECTORS   vectors of four of value_dim that a workgroup computes (workgroup_id.y is the slice);
//                            not more than hold value_dim
// The loop must stay in the first-level cache of instructions; plan.rs counts its code.
//
// Floor, per query, key and channel of each kind: a multiplication and an addition (software drivers have no
// fused one). Bytes: k and v once per ROWS packed rows.

const Q: u32 = ROWS / LANES;
// Sums per score, added at the end: a chain of additions that depend on each other waits for each.
const CHAINS: u32 = select(1u, 4u, Q * KEYS <= 3u);

// Arrays of vectors are nested: Mesa unrolls a loop of up to 32 turns, and any that has as many turns as
// the array that it walks has elements.
const HEAD_PART: u32 = min(HEAD_VECTORS, 16u);
const HEAD_PARTS: u32 = (HEAD_VECTORS + HEAD_PART - 1u) / HEAD_PART;
const VALUE_PART: u32 = min(VALUE_VECTORS, 16u);
const VALUE_PARTS: u32 = (VALUE_VECTORS + VALUE_PART - 1u) / VALUE_PART;

// Always true. The loop in it makes the loop around it not an innermost one: LLVM turns the bounds checks
// of an innermost loop's loads from conditional moves into branches, which is slower.
fn always() -> bool {
    var most = 0u;
    for (var i = 0u; i < p.kv_heads; i++) {
        most = max(most, i);
    }
    return most < p.kv_heads;
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    // Shares nothing. With a barrier llvmpipe makes a coroutine of the function, where a bounds check is a
    // choice of pointers and not a branch around the load.
    workgroupBarrier();
    let z = workgroup.z + p.first.z;
    let b = z / p.kv_heads;
    let kv_head = z % p.kv_heads;
    let packed = p.mask.q_len * p.group;
    let x = workgroup.x + p.first.x;
    let row0 = select(x, x / p.splits, SPLITS) * ROWS;
    let split = select(0u, x % p.splits, SPLITS);
    let neg_inf = p.mask.neg_inf;

    // The last slice lies back as far as it must, so that no load needs a bound.
    let own = (workgroup.y + p.first.y) * VALUE_VECTORS * 4u;
    let col0 = min(own, (p.value_dim + 3u) / 4u * 4u - VALUE_VECTORS * 4u);

    let k = k_source(b, kv_head);
    let v = v_source(b, kv_head, col0);

    var queries: array<Query, Q>;
    var q: array<array<array<vec4<f32>, HEAD_PART>, HEAD_PARTS>, Q>;
    var sums: array<array<array<vec4<f32>, VALUE_PART>, VALUE_PARTS>, Q>;
    var top: array<f32, Q>;
    var total: array<f32, Q>;
    var lost: array<f32, Q>;
    for (var r = 0u; r < Q; r++) {
        let row = min(row0 + r * LANES + lane, packed - 1u);
        queries[r] = query_of_row(b, kv_head, row);
        let at = view_at(p.q, b, queries[r].h, queries[r].i, 0u);
        for (var part = 0u; part < HEAD_PARTS; part++) {
            for (var n = 0u; n < HEAD_PART; n++) {
                let d = part * HEAD_PART + n;
                if d < HEAD_VECTORS {
                    let x = q_at4(at + d * 4u * p.q.strides.w, p.q.strides.w, p.head_dim - d * 4u);
                    q[r][part][n] = x * (p.scale * UNIT);
                }
            }
        }
        for (var part = 0u; part < VALUE_PARTS; part++) {
            for (var n = 0u; n < VALUE_PART; n++) {
                let d = part * VALUE_PART + n;
                if d < VALUE_VECTORS {
                    sums[r][part][n] = vec4<f32>();
                }
            }
        }
        top[r] = LOWEST;
        total[r] = 0.0;
        lost[r] = 0.0;
    }

    var range = range_of(b, kv_head, row0, min(ROWS, packed - row0));
    range.all = share_of_split(range.all, split);
    var stop = range.all.y;
    var asks = PER_PAIR_MASK;
    if HAS_BLOCKS {
        stop = range.all.x;
    }
    for (var j = range.all.x; j < range.all.y; j = min(j + KEYS, stop)) {
        if HAS_BLOCKS {
            if j == stop {
                // As far as the map has one column.
                stop = min((j / p.mask.block.y + 1u) * p.mask.block.y, range.all.y);
                let state = tile_state(b, kv_head, row0, min(row0 + ROWS, packed) - 1u, j, stop - 1u);
                if state == HIDDEN {
                    j = stop;
                    continue;
                }
                asks = !(FULL_IS_PLAIN && state == FULL);
            }
        }
        // Keys past the range may hold anything, NaN too.
        let last = stop - 1u;
        var s: array<array<f32, KEYS>, Q>;
        var chains: array<array<array<f32, CHAINS>, KEYS>, Q>;
        for (var r = 0u; r < Q; r++) {
            for (var c = 0u; c < KEYS; c++) {
                for (var e = 0u; e < CHAINS; e++) {
                    chains[r][c][e] = 0.0;
                }
            }
        }
        for (var part = 0u; part < HEAD_PARTS; part++) {
            for (var n = 0u; n < HEAD_PART; n++) {
                let d = part * HEAD_PART + n;
                if d < HEAD_VECTORS {
                    var x: array<vec4<f32>, KEYS>;
                    for (var c = 0u; c < KEYS; c++) {
                        x[c] = k_four(k, row_of(k, min(j + c, last)), d * 4u);
                    }
                    for (var e = 0u; e < 4u; e++) {
                        for (var r = 0u; r < Q; r++) {
                            for (var c = 0u; c < KEYS; c++) {
                                chains[r][c][e % CHAINS] += x[c][e] * q[r][part][n][e];
                            }
                        }
                    }
                }
            }
        }
        for (var r = 0u; r < Q; r++) {
            for (var c = 0u; c < KEYS; c++) {
                s[r][c] = chains[r][c][0];
                for (var e = 1u; e < CHAINS; e++) {
                    s[r][c] += chains[r][c][e];
                }
            }
        }
        if asks || j < range.each.x || j + KEYS > min(range.each.y, stop) {
            for (var r = 0u; r < Q; r++) {
                for (var c = 0u; c < KEYS; c++) {
                    var x = neg_inf;
                    if j + c >= queries[r].first && j + c < min(queries[r].end, stop) {
                        x = s[r][c];
                        if PER_PAIR_MASK {
                            if mask_mod(queries[r], j + c) {
                                x = score_mod(x, queries[r], j + c);
                            } else {
                                x = neg_inf;
                            }
                        }
                    }
                    s[r][c] = x;
                }
            }
        }
        // A NaN is not calm. Counted, because compilers turn "not at most" into "above".
        var calm = 0u;
        for (var r = 0u; r < Q; r++) {
            let most = top[r] + RESCALE_THRESHOLD;
            for (var c = 0u; c < KEYS; c++) {
                calm += select(0u, 1u, s[r][c] <= most);
            }
        }
        if calm != Q * KEYS {
            if always() {
                for (var r = 0u; r < Q; r++) {
                    var high = top[r];
                    for (var c = 0u; c < KEYS; c++) {
                        high = max(high, s[r][c]);
                        // A NaN is carried by addition: max, exp and log lose it on some drivers.
                        lost[r] += select(0.0, s[r][c], any_nan(vec4<f32>(s[r][c])));
                    }
                    let w = select(weight_of(top[r] - high), 0.0, top[r] == LOWEST && high != LOWEST);
                    top[r] = high;
                    total[r] *= w;
                    for (var part = 0u; part < VALUE_PARTS; part++) {
                        for (var n = 0u; n < VALUE_PART; n++) {
                            let d = part * VALUE_PART + n;
                            if d < VALUE_VECTORS {
                                sums[r][part][n] *= w;
                            }
                        }
                    }
                }
            }
        }
        for (var r = 0u; r < Q; r++) {
            var t = 0.0;
            for (var c = 0u; c < KEYS; c++) {
                // exp2(−∞) is 0, which WGSL does not promise.
                s[r][c] = select(weight_of(s[r][c] - top[r]), 0.0, s[r][c] == neg_inf);
                t += s[r][c];
                if HAS_DROPOUT {
                    s[r][c] = apply_dropout(s[r][c], b, queries[r].h, queries[r].i, j + c);
                }
            }
            total[r] += t;
        }
        for (var part = 0u; part < VALUE_PARTS; part++) {
            for (var n = 0u; n < VALUE_PART; n++) {
                let d = part * VALUE_PART + n;
                if d < VALUE_VECTORS {
                    var x: array<vec4<f32>, KEYS>;
                    for (var c = 0u; c < KEYS; c++) {
                        x[c] = v_four(v, row_of(v, min(j + c, last)), d * 4u);
                    }
                    for (var r = 0u; r < Q; r++) {
                        var t = x[0] * s[r][0];
                        for (var c = 1u; c < KEYS; c++) {
                            t += x[c] * s[r][c];
                        }
                        sums[r][part][n] += t;
                    }
                }
            }
        }
    }

    for (var r = 0u; r < Q; r++) {
        let row = row0 + r * LANES + lane;
        if row < packed {
            let end = row_end(own_total(top[r], total[r] + lost[r]), z, row, split, own == 0u);
            for (var part = 0u; part < VALUE_PARTS; part++) {
                let part_col = col0 + part * VALUE_PART * 4u;
                var broken = 0u;
                for (var n = 0u; n < VALUE_PART; n++) {
                    let col = part_col + n * 4u;
                    if part * VALUE_PART + n < VALUE_VECTORS {
                        if col >= own {
                            let x = sums[r][part][n] * end.x;
                            store_row(z, row, split, col, x);
                            broken |= select(0u, 1u << n, any_nan(x));
                        }
                    }
                }
                // Apart: one copy of its text for all channels of the part.
                while broken != 0u {
                    let col = part_col + firstTrailingBit(broken) * 4u;
                    broken &= broken - 1u;
                    store_row(z, row, split, col, repaired(queries[r], col, end.yz, range.all));
                }
            }
        }
    }
}
