// One invocation owns a row: nothing to combine.

fn row_of(group: u32, index: u32) -> u32 {
    return group * WORKGROUP + index;
}

fn lane_of(index: u32) -> u32 {
    return 0u;
}

fn combined(mine: vec2<f32>, lane: u32) -> vec2<f32> {
    return mine;
}
