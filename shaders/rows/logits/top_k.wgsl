// The k largest elements of every row, the largest first, and their columns. Among equal elements,
// the lower column comes first. NaN comes before all numbers.
//
// x [batch, heads, length, columns]   values, indices [batch, heads, length, k]
//
// A workgroup processes a row. Each invocation knows the best element of its columns, which are
// every LANES-th group of four. When this element is taken, all invocations search the same columns
// for the next best element.
//
// Bindings (declared by the host): x, values if HAS_VALUES, indices.
// Bytes: x once from memory, and k times 1 / LANES of it from caches.

// A sortable key of an element, and its column.
var<workgroup> best: array<vec2<u32>, LANES>;

const BEFORE_ALL: vec2<u32> = vec2<u32>(0xffffffffu, 0u);
const AFTER_ALL: vec2<u32> = vec2<u32>(0u, 0xffffffffu);

// The best element after `after` in the groups of four from `first` on.
fn best_of(at: u32, first: u32, step: u32, after: vec2<u32>) -> vec2<u32> {
    var found = AFTER_ALL;
    for (var four = first; four * 4u < p.columns; four += step) {
        let d = four * 4u;
        let x = x_at4(at + d * p.x.strides.w, p.x.strides.w, p.columns - d);
        for (var c = 0u; c < min(4u, p.columns - d); c++) {
            let candidate = vec2<u32>(key_of(component(x, c)), d + c);
            if is_before(candidate, found) && is_before(after, candidate) {
                found = candidate;
            }
        }
    }
    return found;
}

fn best_of_all(mine: vec2<u32>, lane: u32) -> vec2<u32> {
    best[lane] = mine;
    workgroupBarrier();
    for (var n = LANES / 2u; n > 0u; n /= 2u) {
        if lane < n {
            let other = best[lane + n];
            if is_before(other, best[lane]) {
                best[lane] = other;
            }
        }
        workgroupBarrier();
    }
    let found = best[0];
    // All invocations must read it before the next search starts.
    workgroupBarrier();
    return found;
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    for (var row = group.x; row < p.rows; row += p.step) {
        let place = place_of(row);
        let at = view_at(p.x, place.b, place.h, place.i, 0u);
        var mine = best_of(at, lane, LANES, BEFORE_ALL);
        for (var n = 0u; n < p.k; n++) {
            let found = best_of_all(mine, lane);
            if lane == 0u {
                indices_store(view_at(p.indices, place.b, place.h, place.i, n), found.y);
                if HAS_VALUES {
                    values_store(view_at(p.values, place.b, place.h, place.i, n), x_at(at + found.y * p.x.strides.w));
                }
            }
            if n + 1u < p.k {
                let owner = found.y / 4u % LANES;
                let next = best_of_all(best_of(at, owner + LANES * lane, LANES * LANES, found), lane);
                if lane == owner {
                    mine = next;
                }
            }
        }
    }
}
