// A workgroup owns a row: the sums of its invocations are added in a fixed order.
//
// Needs: ROW_LANES.
// Gives: first_row, lane_of, row_sum.

var<workgroup> lane_sums: array<f32, ROW_LANES>;

fn first_row(group: u32, index: u32) -> u32 {
    return group;
}

fn lane_of(index: u32) -> u32 {
    return index;
}

fn row_sum(mine: vec4<f32>, lane: u32) -> f32 {
    lane_sums[lane] = (mine.x + mine.y) + (mine.z + mine.w);
    workgroupBarrier();
    for (var n = ROW_LANES / 2u; n > 0u; n /= 2u) {
        if lane < n {
            lane_sums[lane] += lane_sums[lane + n];
        }
        workgroupBarrier();
    }
    let sum = lane_sums[0];
    // All have read it before the next sum begins.
    workgroupBarrier();
    return sum;
}
