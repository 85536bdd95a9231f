// A workgroup owns a row. The results of its invocations are combined in a fixed order.
//
// Needs: ROW_LANES.
// Gives: first_row, lane_of, row_max, row_sum, row_sums.

var<workgroup> lane_parts: array<vec2<f32>, ROW_LANES>;

fn first_row(group: u32, index: u32) -> u32 {
    return group;
}

fn lane_of(index: u32) -> u32 {
    return index;
}

fn row_sum(mine: vec4<f32>, lane: u32) -> f32 {
    return row_sums(mine, vec4<f32>(), lane).x;
}

// Computes two sums at once.
fn row_sums(a: vec4<f32>, b: vec4<f32>, lane: u32) -> vec2<f32> {
    lane_parts[lane] = vec2<f32>((a.x + a.y) + (a.z + a.w), (b.x + b.y) + (b.z + b.w));
    workgroupBarrier();
    for (var n = ROW_LANES / 2u; n > 0u; n /= 2u) {
        if lane < n {
            lane_parts[lane] += lane_parts[lane + n];
        }
        workgroupBarrier();
    }
    let sum = lane_parts[0];
    // All invocations must read it before the next sum starts.
    workgroupBarrier();
    return sum;
}

fn row_max(mine: vec4<f32>, lane: u32) -> f32 {
    lane_parts[lane] = vec2<f32>(max(max(mine.x, mine.y), max(mine.z, mine.w)));
    workgroupBarrier();
    for (var n = ROW_LANES / 2u; n > 0u; n /= 2u) {
        if lane < n {
            lane_parts[lane] = max(lane_parts[lane], lane_parts[lane + n]);
        }
        workgroupBarrier();
    }
    let largest = lane_parts[0].x;
    // All invocations must read it before the next maximum starts.
    workgroupBarrier();
    return largest;
}
