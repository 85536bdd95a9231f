// One invocation owns a row, so nothing is combined.
//
// Needs: WORKGROUP.
// Gives: first_row, lane_of, row_max, row_sum, row_sums.

fn first_row(group: u32, index: u32) -> u32 {
    return group * WORKGROUP + index;
}

fn lane_of(index: u32) -> u32 {
    return 0u;
}

fn row_sum(mine: vec4<f32>, lane: u32) -> f32 {
    return (mine.x + mine.y) + (mine.z + mine.w);
}

fn row_sums(a: vec4<f32>, b: vec4<f32>, lane: u32) -> vec2<f32> {
    return vec2<f32>(row_sum(a, lane), row_sum(b, lane));
}

fn row_max(mine: vec4<f32>, lane: u32) -> f32 {
    return max(max(mine.x, mine.y), max(mine.z, mine.w));
}
