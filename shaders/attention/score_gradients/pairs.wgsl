// Gradients of the terms that are added to the scores of pairs: biases, slopes, tables.
//
// Constants: OF_PLACES   true if the elements of the last axis are distances, false if keys
//
// Needs: p.key_lanes, p.mask, p.shape; OF_PLACES, PER_PAIR_MASK; Query; factor_of, mask_mod,
// pair_at, query_of, stands_for, stats_of.
// Gives: row_sum.

// The keys of q's interval that the n-th element of the last axis covers. Appended keys have no
// added terms.
fn keys_of(q: Query, n: u32) -> vec2<u32> {
    if !OF_PLACES {
        let keys = stands_for(n, p.shape.w, p.mask.kv_len);
        return vec2<u32>(max(keys.x, q.first), min(keys.y, q.stop));
    } else {
        // The outermost elements cover all keys at larger distances.
        let key = q.position + i32(n) - p.mask.reach;
        let first = select(max(key, i32(q.first)), i32(q.first), n == 0u);
        let end = select(min(key + 1, i32(q.stop)), i32(q.stop), n + 1u == p.shape.w);
        return vec2<u32>(u32(first), u32(max(end, 0)));
    }
}

// The contribution of a query to the n-th element, over the keys of a lane.
fn row_sum(b: u32, h: u32, i: u32, n: u32, key_lane: u32) -> f32 {
    let q = query_of(b, h, i);
    let keys = keys_of(q, n);
    let stats = stats_of(b, h, i);
    var sum = 0.0;
    for (var j = keys.x + key_lane; j < keys.y; j += p.key_lanes) {
        if PER_PAIR_MASK {
            if !mask_mod(q, j) {
                continue;
            }
        }
        let factor = factor_of(q, j);
        if factor != 0.0 {
            sum += factor * pair_at(q, j, stats).d_added;
        }
    }
    return sum;
}
