// The gradient of a tensor that a score function of the caller reads.
//
//   gradient[element] = Σ d_score · ∂score_mod / ∂reading   over all readings of the element by all
//                                                           pairs
//
// d_score is the gradient of the function's result.
//
// row_stats [batch, heads, q_len, 4] (backward/stats.wgsl)
// gradient [shape]
//
// A workgroup computes TILE elements for a part of the queries. Each lane has a pair and writes the
// pair's n-th reading to workgroup memory. Lane l then adds all readings of the elements that are l
// modulo WORKGROUP, in order. Every run thus gives the same bits, without atomics. With several
// parts, gradient is [shape, parts] in scratch, and part_sums.wgsl adds the parts.
//
// Constants: WORKGROUP; TILE
//            PER_PAIR_MASK
//
// Bindings (declared by the host): q, k, v, d_out; row_stats, gradient. The mask and dropout add
// theirs.

var<workgroup> sums: array<f32, TILE>;
// The readings of the lanes.
var<workgroup> places: array<u32, WORKGROUP>;
var<workgroup> terms: array<f32, WORKGROUP>;
var<workgroup> readings: array<u32, WORKGROUP>;
var<workgroup> most_readings: u32;

struct Asked {
    q: Query,
    j: u32,
    seen: bool,
    score: f32,
    d_score: f32,
}

fn asked(row: u32, j: u32, inside: bool) -> Asked {
    let i = row % p.mask.q_len;
    let h = row / p.mask.q_len % p.heads;
    let b = row / p.mask.q_len / p.heads;
    let q = query_of(b, h, i);
    var seen = inside & (j >= q.first) & (j < q.stop);
    if PER_PAIR_MASK {
        if seen {
            seen = mask_mod(q, j);
        }
    }
    if !seen {
        return Asked(q, j, false, 0.0, 0.0);
    } else {
        let dot = dot_at(q, j);
        let pair = pair_of(q, j, dot, d_weight_at(q, j), stats_of(b, h, i));
        return Asked(q, j, pair.d_score != 0.0, dot * p.scale, pair.d_score);
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let part = (workgroup.x + p.first) % p.parts;
    let tile = (workgroup.x + p.first) / p.parts * TILE;
    for (var n = lane; n < TILE; n += WORKGROUP) {
        sums[n] = 0.0;
    }
    let begin = part * p.part_rows;
    let keys = p.mask.masked_len;
    let pairs = (min(begin + p.part_rows, p.rows) - begin) * keys;
    for (var first = 0u; first < pairs; first += WORKGROUP) {
        let pair = first + lane;
        let ask = asked(min(begin + pair / keys, p.rows - 1u), pair % keys, pair < pairs);
        var reading = 0u;
        loop {
            places[lane] = TILE;
            readings[lane] = 0u;
            if ask.seen {
                let read = captured_slope(ask.score, ask.q, ask.j, reading);
                places[lane] = read.place - tile;
                terms[lane] = ask.d_score * read.slope;
                readings[lane] = read.readings;
            }
            workgroupBarrier();
            if lane == 0u {
                var most = 0u;
                for (var n = 0u; n < WORKGROUP; n++) {
                    most = max(most, readings[n]);
                }
                most_readings = most;
            }
            for (var n = 0u; n < WORKGROUP; n++) {
                let place = places[n];
                if (place < TILE) & (place % WORKGROUP == lane) {
                    sums[place] += terms[n];
                }
            }
            reading += 1u;
            if reading >= workgroupUniformLoad(&most_readings) {
                break;
            }
        }
    }
    for (var n = lane; n < min(TILE, p.elements - tile); n += WORKGROUP) {
        let element = tile + n;
        let row = element / p.shape.w;
        let slab = row / p.shape.z;
        let o = view_at(p.gradient, slab / p.shape.y, slab % p.shape.y, row % p.shape.z, element % p.shape.w) + part;
        var sum = sums[n];
        if p.accumulates != 0u {
            sum += gradient_at(o);
        }
        gradient_store(o, sum);
    }
}
