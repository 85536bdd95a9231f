// The first step of a top-k with a large k: the k largest elements of every row, in any order.
//
// x [batch, heads, length, columns]   indices [batch, heads, length, k]
// or, instead of indices, half 0 of pairs [rows, 2, k]: a key and a column
//
// A workgroup processes a row. It counts the first 11 bits of all keys (sort_key.wgsl), and finds
// the bin of the k-th largest key. It then counts the next 11 bits of the keys of this bin. A third
// read stores the keys whose first 22 bits are above those of the k-th key. Keys with equal bits
// are candidates. Each candidate is compared with all others, and the best ones fill the result.
//
// If there are more than CANDIDATES of them, three more reads are necessary. The first counts the
// last bits. The second counts the keys that equal the k-th key, for each invocation's columns. The
// third stores.
//
// Elements whose key is p.least or smaller are ignored. If there are fewer than k elements, the
// rest of the result is NONE.
//
// Constants: LANES, BINS (2048), CANDIDATES, NONE; HIGH, the first 22 bits.
//
// Bindings (declared by the host): x, indices if HAS_INDICES, pairs if HAS_PAIRS. The results have
// no order, because atomics number them. The next step sorts them.
// Bytes: x three times, from caches if a row fits. Work: a few operations per element and read.

var<workgroup> counts: array<atomic<u32>, BINS>;
// A number of each invocation.
var<workgroup> sums: array<u32, LANES>;
// A bin, and the number of keys in larger bins.
var<workgroup> found: vec2<u32>;
var<workgroup> candidates: array<vec2<u32>, CANDIDATES>;
// The number of results, and the number of candidates.
var<workgroup> taken: array<atomic<u32>, 2>;

struct Row {
    place: Place,
    x: u32,        // first element
    pairs: u32,    // first pair
}

fn row_of(row: u32) -> Row {
    let place = place_of(row);
    return Row(place, view_at(p.x, place.b, place.h, place.i, 0u), row * 2u * p.k);
}

fn four_at(row: Row, d: u32) -> vec4<f32> {
    return x_at4(row.x + d * p.x.strides.w, p.x.strides.w, p.columns - d);
}

fn push(row: Row, pair: vec2<u32>) {
    let n = atomicAdd(&taken[0], 1u);
    if HAS_PAIRS {
        pairs_store(2u * (row.pairs + n), pair.x);
        pairs_store(2u * (row.pairs + n) + 1u, pair.y);
    } else {
        indices_store(view_at(p.indices, row.place.b, row.place.h, row.place.i, n), pair.y);
    }
}

// Counts the 11 bits from `shift` on, of keys whose bits in `mask` are `prefix`.
fn count_keys(row: Row, columns: u32, mask: u32, prefix: u32, shift: u32, lane: u32) {
    for (var n = lane; n < BINS; n += LANES) {
        atomicStore(&counts[n], 0u);
    }
    workgroupBarrier();
    for (var d = lane * 4u; d < columns; d += LANES * 4u) {
        let x = four_at(row, d);
        for (var c = 0u; c < min(4u, columns - d); c++) {
            let key = key_of(component(x, c));
            if key > p.least && (key & mask) == prefix {
                atomicAdd(&counts[(key >> shift) & (BINS - 1u)], 1u);
            }
        }
    }
    workgroupBarrier();
}

// The bin of the counted key with this rank, and the number of keys in larger bins. Rank 1 is the
// largest key. If fewer keys are counted, bin 0 and their number. No key is in bin 0 then.
fn find_bin(rank: u32, lane: u32) -> vec2<u32> {
    let each = BINS / LANES;
    let end = BINS - lane * each;
    var sum = 0u;
    for (var n = 1u; n <= each; n++) {
        sum += atomicLoad(&counts[end - n]);
    }
    sums[lane] = sum;
    workgroupBarrier();
    var above = sum_before(lane);
    if above < rank && rank <= above + sum {
        var bin = end - 1u;
        var count = atomicLoad(&counts[bin]);
        while above + count < rank {
            above += count;
            bin -= 1u;
            count = atomicLoad(&counts[bin]);
        }
        found = vec2<u32>(bin, above);
    } else if lane == LANES - 1u && above + sum < rank {
        found = vec2<u32>(0u, above + sum);
    }
    return workgroupUniformLoad(&found);
}

// The sum of `sums` of the invocations before this one.
fn sum_before(lane: u32) -> u32 {
    var sum = 0u;
    for (var n = 0u; n < lane; n++) {
        sum += sums[n];
    }
    return sum;
}

// Stores keys whose bits in HIGH are above `limit`. Keys with the bits of `limit` are candidates.
fn collect(row: Row, limit: u32, lane: u32) {
    for (var d = lane * 4u; d < p.columns; d += LANES * 4u) {
        let x = four_at(row, d);
        for (var c = 0u; c < min(4u, p.columns - d); c++) {
            let key = key_of(component(x, c));
            if key > p.least && (key & HIGH) >= limit {
                if (key & HIGH) > limit {
                    push(row, vec2<u32>(key, d + c));
                } else {
                    let n = atomicAdd(&taken[1], 1u);
                    if n < CANDIDATES {
                        candidates[n] = vec2<u32>(key, d + c);
                    }
                }
            }
        }
    }
}

// Stores the best `wanted` of `count` candidates.
fn take_candidates(row: Row, count: u32, wanted: u32, lane: u32) {
    for (var n = lane; n < count; n += LANES) {
        let own = candidates[n];
        var before = 0u;
        for (var m = 0u; m < count; m++) {
            before += select(0u, 1u, is_before(candidates[m], own));
        }
        if before < wanted {
            push(row, own);
        }
    }
}

// Stores the best `wanted` keys with the bits of `limit`, for any number of candidates. `columns`
// is 0 if there is nothing to do.
fn take_again(row: Row, columns: u32, limit: u32, wanted: u32, lane: u32) {
    count_keys(row, columns, HIGH, limit, 0u, lane);
    let last = find_bin(wanted, lane);
    let key = limit | last.x;
    // The columns of an invocation are consecutive, so that lower columns come first.
    let share = (columns / 4u / LANES + 1u) * 4u;
    let first = min(lane * share, columns);
    let end = min(first + share, columns);
    var equal = 0u;
    for (var d = first; d < end; d += 4u) {
        let x = four_at(row, d);
        for (var c = 0u; c < min(4u, end - d); c++) {
            equal += select(0u, 1u, key_of(component(x, c)) == key);
        }
    }
    sums[lane] = equal;
    workgroupBarrier();
    var before = sum_before(lane);
    for (var d = first; d < end; d += 4u) {
        let x = four_at(row, d);
        for (var c = 0u; c < min(4u, end - d); c++) {
            let other = key_of(component(x, c));
            if (other & HIGH) == limit && other >= key {
                if other > key || before < wanted - last.y {
                    push(row, vec2<u32>(other, d + c));
                }
                before += select(0u, 1u, other == key);
            }
        }
    }
    workgroupBarrier();
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = row_of(group.x);
    if lane < 2u {
        atomicStore(&taken[lane], 0u);
    }
    count_keys(row, p.columns, 0u, 0u, 21u, lane);
    let first = find_bin(p.k, lane);
    let high = first.x << 21u;
    count_keys(row, p.columns, 0xffe00000u, high, 10u, lane);
    let second = find_bin(p.k - first.y, lane);
    let limit = high | (second.x << 10u);
    let wanted = p.k - first.y - second.y;
    collect(row, limit, lane);
    workgroupBarrier();
    let count = atomicLoad(&taken[1]);
    take_candidates(row, select(count, 0u, count > CANDIDATES), wanted, lane);
    take_again(row, select(0u, p.columns, count > CANDIDATES), limit, wanted, lane);
    for (var rest = atomicLoad(&taken[0]) + lane; rest < p.k; rest += LANES) {
        if HAS_PAIRS {
            pairs_store(2u * (row.pairs + rest), 0u);
            pairs_store(2u * (row.pairs + rest) + 1u, NONE);
        } else {
            indices_store(view_at(p.indices, row.place.b, row.place.h, row.place.i, rest), NONE);
        }
    }
}
