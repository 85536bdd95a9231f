// The last steps of a top-k with a very large k. Each step merges sorted runs in pairs, until one
// run is the whole row. An element finds its place by a binary search in the other run of its pair.
//
// x [batch, heads, length, columns]   values, indices [batch, heads, length, k]
// pairs of a key and a column [rows, 2, k]
//
// Constants: LANES, NONE.
//
// Bindings (declared by the host): pairs. The last step adds x and indices, and values if
// HAS_VALUES. Bytes: 16 for each element and step, and the binary searches.

fn pair_at(o: u32) -> vec2<u32> {
    return vec2<u32>(pairs_at(2u * o), pairs_at(2u * o + 1u));
}

// The place of element n of a row among the merged runs.
fn merged_place(from_row: u32, n: u32, own: vec2<u32>) -> u32 {
    let run = n / p.run;
    let other = run ^ 1u;
    let start = min(other * p.run, p.k);
    var first = start;
    var end = min(start + p.run, p.k);
    while first < end {
        let middle = (first + end) / 2u;
        let pair = pair_at(from_row + middle);
        // Equal elements of the first run come first. Only elements of NONE are equal.
        if is_before(pair, own) || (run > other && !is_before(own, pair)) {
            first = middle + 1u;
        } else {
            end = middle;
        }
    }
    return min(run, other) * p.run + (n - run * p.run) + (first - start);
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let n = group.x * LANES + lane;
    let row = group.y;
    let from_row = (row * 2u + p.half) * p.k;
    if n < p.k {
        let own = pair_at(from_row + n);
        let place = merged_place(from_row, n, own);
        if HAS_INDICES {
            store_result(place_of(row), place, own.y);
        } else {
            let to = 2u * ((row * 2u + 1u - p.half) * p.k + place);
            pairs_store(to, own.x);
            pairs_store(to + 1u, own.y);
        }
    }
}
