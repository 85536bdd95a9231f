// The second step of a top-k with a large k: sorts blocks of up to BLOCK results of a row. It is a
// bitonic sort (Batcher 1968) in workgroup memory.
//
// x [batch, heads, length, columns]   values, indices [batch, heads, length, k]
// pairs of a key and a column [rows, 2, k], half 0
//
// If a row fits in a block, `indices` is sorted in place, and `values` is written. Otherwise the
// blocks of `pairs` are sorted, and top_k_merge.wgsl merges them.
//
// Constants: LANES, BLOCK, NONE.
//
// Bindings (declared by the host): x and indices, and values if HAS_VALUES; or pairs if HAS_PAIRS.
// Work: log² of the block's length / 4 comparisons for each element. Bytes: 8 for each element, and
// as many elements of x from any place.

var<workgroup> keys: array<u32, BLOCK>;
var<workgroup> order: array<u32, BLOCK>;

fn sort_step(size: u32, distance: u32, lane: u32) {
    for (var n = lane; n < p.block / 2u; n += LANES) {
        let a = 2u * n - (n & (distance - 1u));
        let b = a + distance;
        let left = vec2<u32>(keys[a], order[a]);
        let right = vec2<u32>(keys[b], order[b]);
        let falls = (a & size) == 0u;
        if (falls && is_before(right, left)) || (!falls && is_before(left, right)) {
            keys[a] = right.x;
            order[a] = right.y;
            keys[b] = left.x;
            order[b] = left.y;
        }
    }
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = group.y;
    let place = place_of(row);
    let first = group.x * BLOCK;
    let pairs_row = row * 2u * p.k + first;
    // All invocations leave this loop together. Otherwise FXC refuses the barriers after it.
    for (var start = 0u; start < p.block; start += LANES) {
        let n = start + lane;
        var pair = vec2<u32>(0u, NONE);
        if first + n < p.k {
            if HAS_PAIRS {
                let o = 2u * (pairs_row + n);
                pair = vec2<u32>(pairs_at(o), pairs_at(o + 1u));
            } else {
                pair.y = indices_at(view_at(p.indices, place.b, place.h, place.i, n));
                if pair.y != NONE {
                    pair.x = key_of(x_at(view_at(p.x, place.b, place.h, place.i, pair.y)));
                }
            }
        }
        if n < p.block {
            keys[n] = pair.x;
            order[n] = pair.y;
        }
    }
    workgroupBarrier();
    for (var size = 2u; size <= p.block; size *= 2u) {
        for (var distance = size / 2u; distance > 0u; distance /= 2u) {
            sort_step(size, distance, lane);
            workgroupBarrier();
        }
    }
    for (var n = lane; n < min(p.block, p.k - first); n += LANES) {
        if HAS_PAIRS {
            let o = 2u * (pairs_row + n);
            pairs_store(o, keys[n]);
            pairs_store(o + 1u, order[n]);
        } else {
            store_result(place, n, order[n]);
        }
    }
}
