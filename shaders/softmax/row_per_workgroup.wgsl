// A workgroup owns a row: the maxima and sums of its invocations are combined in a fixed order.

var<workgroup> partial: array<vec2<f32>, LANES>;

fn row_of(group: u32, index: u32) -> u32 {
    return group;
}

fn lane_of(index: u32) -> u32 {
    return index;
}

fn combined(mine: vec2<f32>, lane: u32) -> vec2<f32> {
    partial[lane] = mine;
    workgroupBarrier();
    for (var n = LANES / 2u; n > 0u; n /= 2u) {
        if lane < n {
            partial[lane] = merged(partial[lane], partial[lane + n], p.mask.neg_inf);
        }
        workgroupBarrier();
    }
    return partial[0];
}
