// The loop of fused_backward.wgsl for GPUs: a workgroup takes 32 own rows and walks the others 32 at a time. Its invocations
// form LANES_X × 8; each holds 4 own rows by LANE_OTHERS others of scores and of gradients of weights, and 4 own rows by 8
// channels of each gradient.
//
// Constants: WORKGROUP, CHUNK (channels of both sides per staging), SLICE (channels of the gradients held, 8 of them by each
// LANES_X). Head and value dimension are not compiled in; what has more channels than SLICE is a grid of slices, each of which
// scores all pairs again.
//
// Floor of the arithmetic, per pair: head_dim + value_dim multiply-adds for score and gradient of weight in every slice, and one
// or two for each channel of it. In workgroup memory, per invocation: in the scores 16 · LANE_OTHERS / 4 multiply-adds of vectors
// against 4 + LANE_OTHERS vector loads; in the sums 32 against 3.
//
// A tile of others: both sides are staged by chunks → scores and gradients of weights in registers → what pairs give, in
// registers, then in workgroup memory, with V_OTHERS rows of the others at a time → sums.
//
// Needs: p.head_dim, p.scale, p.value_dim; CHUNK, NORMALISES, OF_KEYS, OF_SCORES, OF_VALUES, OWNS, SLICE, WORKGROUP; Query, WorkTile;
// all_finite, head_count, loop_stats, other_rows, other_score_vector, other_value_vector, others_of, own_rows, own_score_vector,
// own_value_vector, pair_of, query_head, query_of, store_of_scores, store_of_values, store_repaired, store_total, tile_seen,
// total_of, work_tile.
// Gives: main.

const OTHERS: u32 = 32u;
const LANES_X: u32 = SLICE / 8u;
const LANE_OTHERS: u32 = OTHERS / LANES_X;
const CHUNK_VECTORS: u32 = CHUNK / 4u;
// Rows of staged chunks are apart by one vector more, which spreads what neighbours read over all banks.
const CHUNK_STEP: u32 = CHUNK_VECTORS + 1u;
const SLICE_VECTORS: u32 = SLICE / 4u;
const STAGED: u32 = (OWNS + OTHERS) * CHUNK_STEP;
// Others whose channels are staged at once.
const V_OTHERS: u32 = 16u;
const OTHER_SIZE: u32 = max(STAGED, V_OTHERS * SLICE_VECTORS);
const OWN_VECTORS: u32 = OWNS / 4u;

const_assert OWNS == 32u && WORKGROUP == LANES_X * OWN_VECTORS && OTHERS % LANES_X == 0u && CHUNK % 4u == 0u;
// Every invocation makes the same number of turns: FXC refuses a barrier behind another loop that holds a branch.
const_assert OWNS * CHUNK_VECTORS % WORKGROUP == 0u && V_OTHERS * SLICE_VECTORS % WORKGROUP == 0u;

// Both sides' chunks, or a slice of some others.
var<workgroup> staged: array<vec4<f32>, OTHER_SIZE>;
// What pairs give: of each other, four own rows a vector.
var<workgroup> given: array<vec4<f32>, OTHERS * OWN_VECTORS>;
// Where rows begin, in tensors of scores and of values.
var<workgroup> own_from: array<vec2<u32>, OWNS>;
var<workgroup> other_from: array<vec2<u32>, OTHERS>;

// Of own rows 4y .. 4y + 4 and other x + c · LANES_X: what is summed; scores, then weights; gradients of those, then of scores.
var<private> sums: array<vec4<f32>, LANE_OTHERS>;
var<private> scores: array<vec4<f32>, LANE_OTHERS>;
var<private> d_scores: array<vec4<f32>, LANE_OTHERS>;
// Of the weights of own rows 4y .. 4y + 4 and the invocation's others.
var<private> row_sums: vec4<f32>;
// Channels 4x .. and 4 (x + LANES_X) .. of the slice, of each own row.
var<private> scored: array<vec4<f32>, 8>;
var<private> valued: array<vec4<f32>, 8>;

// Channels d0 .. d0 + CHUNK of both sides.
fn stage_chunk(d0: u32, of_values: bool, lane: u32) {
    for (var first = 0u; first < OWNS * CHUNK_VECTORS; first += WORKGROUP) {
        let n = first + lane;
        let row = n / CHUNK_VECTORS;
        let d = d0 + n % CHUNK_VECTORS * 4u;
        var own = vec4<f32>();
        var other = vec4<f32>();
        if of_values {
            if d < p.value_dim {
                own = own_value_vector(own_from[row].y, d);
                other = other_value_vector(other_from[row].y, d);
            }
        } else {
            if d < p.head_dim {
                own = own_score_vector(own_from[row].x, d);
                other = other_score_vector(other_from[row].x, d);
            }
        }
        staged[row * CHUNK_STEP + n % CHUNK_VECTORS] = own;
        staged[(OWNS + row) * CHUNK_STEP + n % CHUNK_VECTORS] = other;
    }
}

// sums += the staged chunk's part of own · other
fn multiply_chunk(x: u32, y: u32) {
    let own = y * 4u * CHUNK_STEP;
    let other = (OWNS + x) * CHUNK_STEP;
    for (var d = 0u; d < CHUNK_VECTORS; d++) {
        let a0 = staged[own + d];
        let a1 = staged[own + CHUNK_STEP + d];
        let a2 = staged[own + 2u * CHUNK_STEP + d];
        let a3 = staged[own + 3u * CHUNK_STEP + d];
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

// sums = own · other
fn multiply(of_values: bool, lane: u32) {
    /* unrolled */ for (var c = 0u; c < LANE_OTHERS; c++) {
        sums[c] = vec4<f32>();
    }
    for (var d0 = 0u; d0 < select(p.head_dim, p.value_dim, of_values); d0 += CHUNK) {
        stage_chunk(d0, of_values, lane);
        workgroupBarrier();
        multiply_chunk(lane % LANES_X, lane / LANES_X);
        workgroupBarrier();
    }
}

// Scores become weights as dropout leaves them, gradients of weights those of scores.
fn weigh(work: WorkTile, h: u32, other0: u32, end: u32, x: u32, y: u32) {
    var queries: array<Query, 4>;
    var stats: array<vec3<f32>, 4>;
    let own0 = work.own0 + y * 4u;
    if !OF_KEYS {
        /* unrolled */ for (var r = 0u; r < 4u; r++) {
            let i = min(own0 + r, work.last_own);
            queries[r] = query_of(work.b, h, i);
            stats[r] = loop_stats(work.b, h, i);
        }
    }
    // The vectors take turns in scores[0] and d_scores[0].
    for (var c = 0u; c < LANE_OTHERS; c++) {
        let other = other0 + x + c * LANES_X;
        let dots = scores[0];
        let d_weights = d_scores[0];
        var weights = vec4<f32>();
        var gradients = vec4<f32>();
        var probabilities = vec4<f32>();
        if OF_KEYS {
            let i = min(other, end - 1u);
            queries[0] = query_of(work.b, h, i);
            stats[0] = loop_stats(work.b, h, i);
            if other >= end {
                queries[0].end = 0u;
            }
        }
        /* unrolled */ for (var r = 0u; r < 4u; r++) {
            let j = select(other, min(own0 + r, work.last_own), OF_KEYS);
            let pair = pair_of(queries[select(r, 0u, OF_KEYS)], j, dots[r], d_weights[r], stats[select(r, 0u, OF_KEYS)]);
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

// The slice of the others from the first-th on.
fn stage_slice(first: u32, col0: u32, of_values: bool, lane: u32) {
    for (var done = 0u; done < V_OTHERS * SLICE_VECTORS; done += WORKGROUP) {
        let n = done + lane;
        let theirs = other_from[first + n / SLICE_VECTORS];
        let d = col0 + n % SLICE_VECTORS * 4u;
        var other = vec4<f32>();
        if of_values {
            if d < p.value_dim {
                other = other_value_vector(theirs.y, d);
            }
        } else {
            if d < p.head_dim {
                other = other_score_vector(theirs.x, d);
            }
        }
        staged[n] = other;
    }
}

fn add_scored(first: u32, x: u32, y: u32) {
    for (var t = 0u; t < V_OTHERS; t++) {
        let g = given[(first + t) * OWN_VECTORS + y];
        let low = staged[t * SLICE_VECTORS + x];
        let high = staged[t * SLICE_VECTORS + x + LANES_X];
        /* unrolled */ for (var r = 0u; r < 4u; r++) {
            scored[r * 2u] = fma(vec4<f32>(g[r]), low, scored[r * 2u]);
            scored[r * 2u + 1u] = fma(vec4<f32>(g[r]), high, scored[r * 2u + 1u]);
        }
    }
}

fn add_valued(first: u32, x: u32, y: u32) {
    for (var t = 0u; t < V_OTHERS; t++) {
        let g = given[(first + t) * OWN_VECTORS + y];
        let low = staged[t * SLICE_VECTORS + x];
        let high = staged[t * SLICE_VECTORS + x + LANES_X];
        /* unrolled */ for (var r = 0u; r < 4u; r++) {
            valued[r * 2u] = fma(vec4<f32>(g[r]), low, valued[r * 2u]);
            valued[r * 2u + 1u] = fma(vec4<f32>(g[r]), high, valued[r * 2u + 1u]);
        }
    }
}

// Adds what the pairs of a tile give.
fn add_tile(work: WorkTile, lane: u32) {
    let x = lane % LANES_X;
    let y = lane / LANES_X;
    if OF_VALUES {
        /* unrolled */ for (var c = 0u; c < LANE_OTHERS; c++) {
            given[(x + c * LANES_X) * OWN_VECTORS + y] = scores[c];
        }
        for (var first = 0u; first < OTHERS; first += V_OTHERS) {
            stage_slice(first, work.col0, true, lane);
            workgroupBarrier();
            add_valued(first, x, y);
            workgroupBarrier();
        }
    }
    if OF_SCORES {
        /* unrolled */ for (var c = 0u; c < LANE_OTHERS; c++) {
            given[(x + c * LANES_X) * OWN_VECTORS + y] = d_scores[c];
        }
        for (var first = 0u; first < OTHERS; first += V_OTHERS) {
            stage_slice(first, work.col0, false, lane);
            workgroupBarrier();
            add_scored(first, x, y);
            workgroupBarrier();
        }
    }
}

// Divides the sums of own rows by those of their weights, and stores what those are divided by.
fn normalise(work: WorkTile, lane: u32) {
    staged[lane] = row_sums;
    workgroupBarrier();
    let y = lane / LANES_X;
    var sum = vec4<f32>();
    for (var n = 0u; n < LANES_X; n++) {
        sum += staged[y * LANES_X + n];
    }
    /* unrolled */ for (var r = 0u; r < 4u; r++) {
        let i = work.own0 + y * 4u + r;
        let total = total_of(work, min(i, work.last_own), sum[r]);
        scored[r * 2u] *= total;
        scored[r * 2u + 1u] *= total;
        if lane % LANES_X == 0u && work.col0 == 0u && i <= work.last_own {
            store_total(work, i, total);
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let work = work_tile(workgroup);
    for (var n = lane; n < OWNS; n += WORKGROUP) {
        own_from[n] = own_rows(work, min(work.own0 + n, work.last_own));
    }
    /* unrolled */ for (var n = 0u; n < 8u; n++) {
        scored[n] = vec4<f32>();
        valued[n] = vec4<f32>();
    }
    row_sums = vec4<f32>();
    for (var head = 0u; head < head_count(); head++) {
        let h = query_head(work, head);
        let range = others_of(work, h, lane);
        for (var other0 = range.x; other0 < range.y; other0 += OTHERS) {
            let last = min(other0 + OTHERS, range.y) - 1u;
            if !tile_seen(work, h, other0, last) {
                continue;
            }
            for (var n = lane; n < OTHERS; n += WORKGROUP) {
                other_from[n] = other_rows(work, h, min(other0 + n, last));
            }
            workgroupBarrier();
            multiply(false, lane);
            /* unrolled */ for (var c = 0u; c < LANE_OTHERS; c++) {
                scores[c] = sums[c];
            }
            if OF_SCORES {
                multiply(true, lane);
            }
            /* unrolled */ for (var c = 0u; c < LANE_OTHERS; c++) {
                d_scores[c] = sums[c];
            }
            weigh(work, h, other0, range.y, lane % LANES_X, lane / LANES_X);
            add_tile(work, lane);
        }
    }

    if NORMALISES {
        normalise(work, lane);
    }
    let own0 = work.own0 + lane / LANES_X * 4u;
    let low = work.col0 + lane % LANES_X * 4u;
    let high = low + LANES_X * 4u;
    var check = vec4<f32>();
    /* unrolled */ for (var n = 0u; n < 8u; n++) {
        check += scored[n] + valued[n];
    }
    if !all_finite(check) {
        for (var own = own0; own < min(own0 + 4u, work.last_own + 1u); own++) {
            store_repaired(work, own, low, LANES_X * 4u, high + 1u);
        }
        return;
    }
    // The vectors take turns in the first places.
    for (var n = 0u; n < 8u; n++) {
        let own = own0 + n / 2u;
        let col = select(low, high, n % 2u == 1u);
        if own <= work.last_own {
            if OF_SCORES && col < p.head_dim {
                store_of_scores(work, own, col, scored[0] * p.scale);
            }
            if OF_VALUES && col < p.value_dim {
                store_of_values(work, own, col, valued[0]);
            }
        }
        /* unrolled */ for (var m = 0u; m < 7u; m++) {
            scored[m] = scored[m + 1u];
            valued[m] = valued[m + 1u];
        }
    }
}
