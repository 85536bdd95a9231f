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

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let n = group.x * LANES + lane;
    if n >= p.k {
        return;
    }
    let run = n / p.run;
    let other = run ^ 1u;
    let start = min(other * p.run, p.k);
    for (var row = group.y; row < p.rows; row += p.step) {
        let from_row = (row * 2u + p.half) * p.k;
        let own = pair_at(from_row + n);
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
        let place = min(run, other) * p.run + (n - run * p.run) + (first - start);
        if HAS_INDICES {
            let plane = row / p.length;
            let i = row - plane * p.length;
            let b = plane / p.heads;
            let h = plane - b * p.heads;
            indices_store(view_at(p.indices, b, h, i, place), own.y);
            if HAS_VALUES {
                var value = p.neg_inf;
                if own.y != NONE {
                    value = x_at(view_at(p.x, b, h, i, own.y));
                }
                values_store(view_at(p.values, b, h, i, place), value);
            }
        } else {
            let to = 2u * ((row * 2u + 1u - p.half) * p.k + place);
            pairs_store(to, own.x);
            pairs_store(to + 1u, own.y);
        }
    }
}
