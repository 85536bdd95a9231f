// The sums of a tensor's elements, from their parts.
//
// parts [shape, count]   sums [shape]
//
// An invocation has an element, whose parts it adds in their order: the same bits on every run.
//
// Constants: WORKGROUP
//
// Bindings (declared by the host): parts, sums. ACCUMULATES: sums holds what is added to.
// Reads each part once, count apart within a workgroup: there are few.

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
