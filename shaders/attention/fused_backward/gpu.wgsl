// The loop of fused_backward.wgsl for GPUs: a workgroup takes OWNS own rows and walks the others as
// tiles. Own rows are output rows, the others are opposite rows (see fused_backward.wgsl). The
// invocations form a grid of LANES_X × OWNS / 4. Each holds scores and gradients of weights of 4
// output rows by LANE_OTHERS opposite rows. It also holds 4 output rows by SLICE / LANES_X channels
// of each gradient.
//
// Constants: WORKGROUP
//            CHUNK      channels of both sides per staging
//            SLICE      channels of the gradients held
//            V_OTHERS   opposite rows per staging of a slice
//            AHEAD      true if the next staged data is loaded into registers in advance
// Head and value dimension are not compiled in. If a gradient has more channels than SLICE, the
// grid has several slices, and each scores all pairs again.
//
// Lower bound of the arithmetic, per pair: head_dim + value_dim multiply-adds for score and
// gradient of weight in every slice. Each channel of a slice adds one or two. Workgroup memory, per
// invocation: 16 · LANE_OTHERS / 4 multiply-adds of vectors against 4 + LANE_OTHERS vector loads in
// the scores. In the sums: 4 · SLICE / LANES_X / 4 against 1 + SLICE / LANES_X / 4.
//
// Measured without one part at a time, for 64 rows of 64 channels on an NVIDIA H100
// (benches/PREDICTIONS.md). Products of scores take 1.9 of the 4.6 ms of d_q, sums 1.0, loads 0.7,
// weights 0.2. They hardly overlap.
//
// The steps of a tile of opposite rows:
//
// - Both sides are staged by chunks → scores and gradients of weights in registers.
// - The factors of the pairs are computed in registers, then stored in workgroup memory.
// - V_OTHERS opposite rows at a time are staged → sums.
//
// Needs: p.head_dim, p.scale, p.value_dim; AHEAD, CHUNK, NORMALISES, OF_KEYS, OF_SCORES, OF_VALUES,
// OWNS, SLICE, V_OTHERS, WORKGROUP; Query, WorkTile; all_finite, head_count, loop_stats,
// other_rows, other_score_vector, other_value_vector, others_of, own_rows, own_score_vector,
// own_value_vector, pair_of, query_head, query_of, store_of_scores, store_of_values,
// store_repaired, store_total, tile_seen, tiles_by_tensors, total_of, work_tile.
// Gives: main.

const OTHERS: u32 = OWNS;
const LANES_Y: u32 = OWNS / 4u;
const LANES_X: u32 = WORKGROUP / LANES_Y;
const LANE_OTHERS: u32 = OTHERS / LANES_X;
const LANE_VECTORS: u32 = SLICE / LANES_X / 4u;
const GRADIENTS: u32 = 4u * LANE_VECTORS;
const CHUNK_VECTORS: u32 = CHUNK / 4u;
// A staged row of a chunk has one vector of padding. This spreads the reads of neighbours over all
// banks.
const CHUNK_STEP: u32 = CHUNK_VECTORS + 1u;
const SLICE_VECTORS: u32 = SLICE / 4u;
const STAGED_SIZE: u32 = max((OWNS + OTHERS) * CHUNK_STEP, V_OTHERS * SLICE_VECTORS);
// Padded for the same reason.
const GIVEN_STEP: u32 = LANES_Y + 1u;

const STAGE_ROWS: u32 = WORKGROUP / CHUNK_VECTORS;
const STAGE_OTHERS: u32 = WORKGROUP / SLICE_VECTORS;
// Vectors of one side's chunk that an invocation loads.
const SIDE_LOADS: u32 = OWNS * CHUNK_VECTORS / WORKGROUP;
const SLICE_LOADS: u32 = V_OTHERS * SLICE_VECTORS / WORKGROUP;
// Vectors that an invocation loads before it stages them. Without AHEAD, registers for more may be
// missing.
const SIDE_AT_ONCE: u32 = select(1u, SIDE_LOADS, AHEAD);
const SLICE_AT_ONCE: u32 = select(1u, SLICE_LOADS, AHEAD);
const LOADS: u32 = max(2u * SIDE_AT_ONCE, SLICE_AT_ONCE);

const_assert OTHERS % LANES_X == 0u && SLICE % (LANES_X * 4u) == 0u && CHUNK % 4u == 0u && OTHERS % V_OTHERS == 0u;
// Every invocation makes the same number of iterations. FXC refuses a barrier after another loop
// that contains a branch.
const_assert OWNS * CHUNK_VECTORS % WORKGROUP == 0u && V_OTHERS * SLICE_VECTORS % WORKGROUP == 0u;

// Chunks of both sides, or a slice of some opposite rows.
var<workgroup> staged: array<vec4<f32>, STAGED_SIZE>;
// The factors of pairs: for each opposite row, vectors of four output rows.
var<workgroup> given: array<vec4<f32>, OTHERS * GIVEN_STEP>;
// The starts of rows, in tensors of scores and of values.
var<workgroup> own_from: array<vec2<u32>, OWNS>;
var<workgroup> other_from: array<vec2<u32>, OTHERS>;
// lse, dot and total (loop_stats) of the tile's queries, which are output or opposite rows.
var<workgroup> query_stats: array<vec4<f32>, OWNS>;

// An invocation's pairs, a vector for each c. Its output rows are y + r · LANES_Y (r = 0 .. 4), its
// opposite row is x + c · LANES_X. First the running sums. Then scores, which become weights. Then
// gradients of weights, which become gradients of scores.
var<private> sums: array<vec4<f32>, LANE_OTHERS>;
var<private> scores: array<vec4<f32>, LANE_OTHERS>;
var<private> d_scores: array<vec4<f32>, LANE_OTHERS>;
// Sums of the weights of these pairs, for each output row.
var<private> row_sums: vec4<f32>;
// Channels 4 (x + n · LANES_X) .. of the slice, of each output row.
var<private> scored: array<vec4<f32>, GRADIENTS>;
var<private> valued: array<vec4<f32>, GRADIENTS>;
// Vectors that are loaded and not staged yet.
var<private> next: array<vec4<f32>, LOADS>;

// Loads a part of a chunk of both sides into `next`. Chunks of scores, `chunks` of them, come
// before chunks of values.
fn load_chunk(chunk: u32, chunks: u32, part: u32, lane: u32) {
    let of_values = chunk >= chunks;
    let d = select(chunk, chunk - chunks, of_values) * CHUNK + lane % CHUNK_VECTORS * 4u;
    let row = lane / CHUNK_VECTORS + part * SIDE_AT_ONCE * STAGE_ROWS;
    /* unrolled */ for (var n = 0u; n < LOADS; n++) {
        next[n] = vec4<f32>();
    }
    if of_values {
        if d < p.value_dim {
            /* unrolled */ for (var n = 0u; n < SIDE_AT_ONCE; n++) {
                next[n] = own_value_vector(own_from[row + n * STAGE_ROWS].y, d);
                next[SIDE_AT_ONCE + n] = other_value_vector(other_from[row + n * STAGE_ROWS].y, d);
            }
        }
    } else {
        if d < p.head_dim {
            /* unrolled */ for (var n = 0u; n < SIDE_AT_ONCE; n++) {
                next[n] = own_score_vector(own_from[row + n * STAGE_ROWS].x, d);
                next[SIDE_AT_ONCE + n] = other_score_vector(other_from[row + n * STAGE_ROWS].x, d);
            }
        }
    }
}

// Stages a chunk. With AHEAD the chunk has one part, which is already loaded.
fn stage_chunk(chunk: u32, chunks: u32, lane: u32) {
    for (var part = 0u; part < SIDE_LOADS / SIDE_AT_ONCE; part++) {
        if !AHEAD {
            load_chunk(chunk, chunks, part, lane);
        }
        let row = lane / CHUNK_VECTORS + part * SIDE_AT_ONCE * STAGE_ROWS;
        let to = row * CHUNK_STEP + lane % CHUNK_VECTORS;
        /* unrolled */ for (var n = 0u; n < SIDE_AT_ONCE; n++) {
            staged[to + n * STAGE_ROWS * CHUNK_STEP] = next[n];
            staged[to + (OWNS + n * STAGE_ROWS) * CHUNK_STEP] = next[SIDE_AT_ONCE + n];
        }
    }
}

// sums += the staged chunk's part of own · other
fn multiply_chunk(x: u32, y: u32) {
    let own = y * CHUNK_STEP;
    let other = (OWNS + x) * CHUNK_STEP;
    for (var d = 0u; d < CHUNK_VECTORS; d++) {
        let a0 = staged[own + d];
        let a1 = staged[own + LANES_Y * CHUNK_STEP + d];
        let a2 = staged[own + 2u * LANES_Y * CHUNK_STEP + d];
        let a3 = staged[own + 3u * LANES_Y * CHUNK_STEP + d];
        /* unrolled */ for (var c = 0u; c < LANE_OTHERS; c++) {
            let k = staged[other + c * LANES_X * CHUNK_STEP + d];
            var t = sums[c];
            t = fma(vec4<f32>(a0.x, a1.x, a2.x, a3.x), vec4<f32>(k.x), t);
            t = fma(vec4<f32>(a0.y, a1.y, a2.y, a3.y), vec4<f32>(k.y), t);
            t = fma(vec4<f32>(a0.z, a1.z, a2.z, a3.z), vec4<f32>(k.z), t);
            t = fma(vec4<f32>(a0.w, a1.w, a2.w, a3.w), vec4<f32>(k.w), t);
            sums[c] = t;
        }
    }
}

fn clear_sums() {
    /* unrolled */ for (var c = 0u; c < LANE_OTHERS; c++) {
        sums[c] = vec4<f32>();
    }
}

// Computes scores and gradients of weights. With AHEAD, it first loads the next chunk, or the slice
// that add_tile stages first, then multiplies.
fn multiply(work: WorkTile, lane: u32) {
    let chunks = (p.head_dim + CHUNK - 1u) / CHUNK;
    var all = chunks;
    if OF_SCORES {
        all += (p.value_dim + CHUNK - 1u) / CHUNK;
    }
    clear_sums();
    if AHEAD {
        load_chunk(0u, chunks, 0u, lane);
    }
    for (var chunk = 0u; chunk < all; chunk++) {
        stage_chunk(chunk, chunks, lane);
        workgroupBarrier();
        if chunk == chunks {
            /* unrolled */ for (var c = 0u; c < LANE_OTHERS; c++) {
                scores[c] = sums[c];
            }
            clear_sums();
        }
        if AHEAD {
            if chunk + 1u < all {
                load_chunk(chunk + 1u, chunks, 0u, lane);
            } else if OF_SCORES || OF_VALUES {
                load_slice(0u, work.col0, OF_VALUES, 0u, lane);
            }
        }
        multiply_chunk(lane % LANES_X, lane / LANES_X);
        workgroupBarrier();
    }
    /* unrolled */ for (var c = 0u; c < LANE_OTHERS; c++) {
        if OF_SCORES {
            d_scores[c] = sums[c];
        } else {
            scores[c] = sums[c];
        }
    }
}

// The index of an invocation's n-th output row.
fn own_of(y: u32, n: u32) -> u32 {
    return y + n * LANES_Y;
}

// Turns scores into weights after dropout, and gradients of weights into gradients of scores.
fn weigh(work: WorkTile, h: u32, other0: u32, end: u32, x: u32, y: u32) {
    var queries: array<Query, 4>;
    if !OF_KEYS {
        /* unrolled */ for (var r = 0u; r < 4u; r++) {
            queries[r] = query_of(work.b, h, min(work.own0 + own_of(y, r), work.last_own));
        }
    }
    // The loop rotates the vectors through scores[0] and d_scores[0].
    for (var c = 0u; c < LANE_OTHERS; c++) {
        let other = other0 + x + c * LANES_X;
        let dots = scores[0];
        let d_weights = d_scores[0];
        var weights = vec4<f32>();
        var gradients = vec4<f32>();
        var probabilities = vec4<f32>();
        if OF_KEYS {
            queries[0] = query_of(work.b, h, min(other, end - 1u));
            if other >= end {
                queries[0].end = 0u;
            }
        }
        /* unrolled */ for (var r = 0u; r < 4u; r++) {
            let j = select(other, min(work.own0 + own_of(y, r), work.last_own), OF_KEYS);
            let stats = query_stats[select(own_of(y, r), x + c * LANES_X, OF_KEYS)].xyz;
            let pair = pair_of(queries[select(r, 0u, OF_KEYS)], j, dots[r], d_weights[r], stats);
            weights[r] = pair.weight;
            gradients[r] = pair.d_score;
            probabilities[r] = pair.probability;
        }
        if NORMALISES {
            row_sums += probabilities;
        }
        /* unrolled */ for (var n = 0u; n < LANE_OTHERS - 1u; n++) {
            scores[n] = scores[n + 1u];
            d_scores[n] = d_scores[n + 1u];
        }
        scores[LANE_OTHERS - 1u] = weights;
        d_scores[LANE_OTHERS - 1u] = gradients;
    }
}

// Loads a part of the slice of V_OTHERS opposite rows, from row `first` on, into `next`.
fn load_slice(first: u32, col0: u32, of_values: bool, part: u32, lane: u32) {
    let row = first + lane / SLICE_VECTORS + part * SLICE_AT_ONCE * STAGE_OTHERS;
    let d = col0 + lane % SLICE_VECTORS * 4u;
    /* unrolled */ for (var n = 0u; n < LOADS; n++) {
        next[n] = vec4<f32>();
    }
    if of_values {
        if d < p.value_dim {
            /* unrolled */ for (var n = 0u; n < SLICE_AT_ONCE; n++) {
                next[n] = other_value_vector(other_from[row + n * STAGE_OTHERS].y, d);
            }
        }
    } else {
        if d < p.head_dim {
            /* unrolled */ for (var n = 0u; n < SLICE_AT_ONCE; n++) {
                next[n] = other_score_vector(other_from[row + n * STAGE_OTHERS].x, d);
            }
        }
    }
}

// Stages a slice. With AHEAD the slice has one part, which is already loaded.
fn stage_slice(first: u32, col0: u32, of_values: bool, lane: u32) {
    for (var part = 0u; part < SLICE_LOADS / SLICE_AT_ONCE; part++) {
        if !AHEAD {
            load_slice(first, col0, of_values, part, lane);
        }
        /* unrolled */ for (var n = 0u; n < SLICE_AT_ONCE; n++) {
            staged[lane + (part * SLICE_AT_ONCE + n) * WORKGROUP] = next[n];
        }
    }
}

fn add_scored(first: u32, x: u32, y: u32) {
    for (var t = 0u; t < V_OTHERS; t++) {
        let g = given[(first + t) * GIVEN_STEP + y];
        /* unrolled */ for (var n = 0u; n < LANE_VECTORS; n++) {
            let theirs = staged[t * SLICE_VECTORS + x + n * LANES_X];
            /* unrolled */ for (var r = 0u; r < 4u; r++) {
                scored[r * LANE_VECTORS + n] = fma(vec4<f32>(g[r]), theirs, scored[r * LANE_VECTORS + n]);
            }
        }
    }
}

fn add_valued(first: u32, x: u32, y: u32) {
    for (var t = 0u; t < V_OTHERS; t++) {
        let g = given[(first + t) * GIVEN_STEP + y];
        /* unrolled */ for (var n = 0u; n < LANE_VECTORS; n++) {
            let theirs = staged[t * SLICE_VECTORS + x + n * LANES_X];
            /* unrolled */ for (var r = 0u; r < 4u; r++) {
                valued[r * LANE_VECTORS + n] = fma(vec4<f32>(g[r]), theirs, valued[r * LANE_VECTORS + n]);
            }
        }
    }
}

// Adds the contributions of a tile's pairs.
fn add_tile(work: WorkTile, lane: u32) {
    let x = lane % LANES_X;
    let y = lane / LANES_X;
    if OF_VALUES {
        /* unrolled */ for (var c = 0u; c < LANE_OTHERS; c++) {
            given[(x + c * LANES_X) * GIVEN_STEP + y] = scores[c];
        }
        for (var first = 0u; first < OTHERS; first += V_OTHERS) {
            stage_slice(first, work.col0, true, lane);
            workgroupBarrier();
            if AHEAD {
                if first + V_OTHERS < OTHERS {
                    load_slice(first + V_OTHERS, work.col0, true, 0u, lane);
                } else if OF_SCORES {
                    load_slice(0u, work.col0, false, 0u, lane);
                }
            }
            add_valued(first, x, y);
            workgroupBarrier();
        }
    }
    if OF_SCORES {
        /* unrolled */ for (var c = 0u; c < LANE_OTHERS; c++) {
            given[(x + c * LANES_X) * GIVEN_STEP + y] = d_scores[c];
        }
        for (var first = 0u; first < OTHERS; first += V_OTHERS) {
            stage_slice(first, work.col0, false, lane);
            workgroupBarrier();
            if AHEAD {
                if first + V_OTHERS < OTHERS {
                    load_slice(first + V_OTHERS, work.col0, false, 0u, lane);
                }
            }
            add_scored(first, x, y);
            workgroupBarrier();
        }
    }
}

// Divides the sums of output rows by the sums of their weights, and stores the totals.
fn normalise(work: WorkTile, lane: u32) {
    staged[lane] = row_sums;
    workgroupBarrier();
    let y = lane / LANES_X;
    var sum = vec4<f32>();
    for (var n = 0u; n < LANES_X; n++) {
        sum += staged[y * LANES_X + n];
    }
    /* unrolled */ for (var r = 0u; r < 4u; r++) {
        let i = work.own0 + own_of(y, r);
        let total = total_of(work, min(i, work.last_own), sum[r]);
        /* unrolled */ for (var n = 0u; n < LANE_VECTORS; n++) {
            scored[r * LANE_VECTORS + n] *= total;
        }
        if lane % LANES_X == 0u && work.col0 == 0u && i <= work.last_own {
            store_total(work, i, total);
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let work = work_tile(workgroup);
    for (var n = lane; n < OWNS; n += WORKGROUP) {
        let own = min(work.own0 + n, work.last_own);
        own_from[n] = own_rows(work, own);
        if !OF_KEYS {
            query_stats[n] = vec4<f32>(loop_stats(work.b, work.head, own), 0.0);
        }
    }
    /* unrolled */ for (var n = 0u; n < GRADIENTS; n++) {
        scored[n] = vec4<f32>();
        valued[n] = vec4<f32>();
    }
    row_sums = vec4<f32>();
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
            for (var n = lane; n < OTHERS; n += WORKGROUP) {
                let other = min(other0 + n, last);
                other_from[n] = other_rows(work, h, other);
                if OF_KEYS {
                    query_stats[n] = vec4<f32>(loop_stats(work.b, h, other), 0.0);
                }
            }
            workgroupBarrier();
            multiply(work, lane);
            weigh(work, h, other0, range.y, lane % LANES_X, lane / LANES_X);
            add_tile(work, lane);
        }
    }

    if NORMALISES {
        normalise(work, lane);
    }
    let y = lane / LANES_X;
    let col0 = work.col0 + lane % LANES_X * 4u;
    var check = vec4<f32>();
    /* unrolled */ for (var n = 0u; n < GRADIENTS; n++) {
        check += scored[n] + valued[n];
    }
    if !all_finite(check) {
        for (var n = 0u; n < 4u; n++) {
            let own = work.own0 + own_of(y, n);
            if own <= work.last_own {
                store_repaired(work, own, col0, LANES_X * 4u, work.col0 + SLICE);
            }
        }
        return;
    }
    // The loop rotates the vectors through the arrays' first elements.
    for (var n = 0u; n < GRADIENTS; n++) {
        let own = work.own0 + own_of(y, n / LANE_VECTORS);
        let col = col0 + n % LANE_VECTORS * LANES_X * 4u;
        if own <= work.last_own {
            if OF_SCORES && col < p.head_dim {
                store_of_scores(work, own, col, scored[0] * p.scale);
            }
            if OF_VALUES && col < p.value_dim {
                store_of_values(work, own, col, valued[0]);
            }
        }
        /* unrolled */ for (var m = 0u; m < GRADIENTS - 1u; m++) {
            scored[m] = scored[m + 1u];
            valued[m] = valued[m + 1u];
        }
    }
}
