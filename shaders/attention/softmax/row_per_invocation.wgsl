// One invocation owns a row: nothing to combine.
//
// Needs: WORKGROUP.
// Gives: lane_of, reduce_row, row_index.

fn row_index(group: u32, index: u32) -> u32 {
    return group * WORKGROUP + index;
}

fn lane_of(index: u32) -> u32 {
    return 0u;
}

fn reduce_row(mine: vec2<f32>, lane: u32) -> vec2<f32> {
    return mine;
}
