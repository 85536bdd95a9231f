// What the lanes of a workgroup have of one sum, added as a tree.
//
// Needs: WORKGROUP.
// Gives: sum_of_lanes.

var<workgroup> sums: array<f32, WORKGROUP>;

// Of lane 0 the sum. Every lane of the workgroup calls it.
fn sum_of_lanes(x: f32, lane: u32) -> f32 {
    sums[lane] = x;
    workgroupBarrier();
    for (var apart = WORKGROUP / 2u; apart > 0u; apart /= 2u) {
        if lane < apart {
            sums[lane] += sums[lane + apart];
        }
        workgroupBarrier();
    }
    return sums[0];
}
