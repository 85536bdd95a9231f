// The sum over the lanes of a workgroup, added as a tree.
//
// Needs: WORKGROUP.
// Gives: sum_of_lanes.

var<workgroup> sums: array<f32, WORKGROUP>;

// Returns the sum in lane 0. All lanes of the workgroup must call it.
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
