// A workgroup owns a row: the maxima and sums of its invocations are combined in a fixed order.
//
// Needs: p.mask; ROW_LANES; merged.
// Gives: lane_of, reduce_row, row_index.

var<workgroup> lane_states: array<vec2<f32>, ROW_LANES>;

fn row_index(group: u32, index: u32) -> u32 {
    return group;
}

fn lane_of(index: u32) -> u32 {
    return index;
}

fn reduce_row(mine: vec2<f32>, lane: u32) -> vec2<f32> {
    lane_states[lane] = mine;
    workgroupBarrier();
    for (var n = ROW_LANES / 2u; n > 0u; n /= 2u) {
        if lane < n {
            lane_states[lane] = merged(lane_states[lane], lane_states[lane + n], p.mask.neg_inf);
        }
        workgroupBarrier();
    }
    return lane_states[0];
}
