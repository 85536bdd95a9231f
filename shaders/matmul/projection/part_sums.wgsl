// The sums of a tensor's elements, from their partial sums.
//
// parts [shape, count]   sums [shape]
//
// An invocation adds the partial sums of an element in order, so the bits are the same on every
// run.
//
// Constants: WORKGROUP
//
// Bindings (declared by the host): parts, sums. ACCUMULATES: the result is added to sums.
// Reads each part once. Neighbours read elements that are count apart, but there are few.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let element = (group.x + p.first) * WORKGROUP + lane;
    if element >= p.elements {
        return;
    }
    var sum = 0.0;
    for (var n = 0u; n < p.count; n++) {
        sum += parts_at(element * p.count + n);
    }
    let plane = element / p.shape.w;
    let slab = plane / p.shape.z;
    let o = view_at(p.sums, slab / p.shape.y, slab % p.shape.y, plane % p.shape.z, element % p.shape.w);
    if ACCUMULATES {
        sum += sums_at(o);
    }
    sums_store(o, sum);
}
