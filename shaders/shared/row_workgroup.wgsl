// A workgroup owns a row: the maxima and sums of its invocations are combined in a fixed order.

var<workgroup> partial: array<vec2<f32>, LANES>;

fn row_of(group: u32, index: u32) -> u32 {
    return group;
}

fn lane_of(index: u32) -> u32 {
    return index;
}

// x: maximum, y: sum of exp(score − maximum).
fn merged(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
    if b.x == p.mask.none {
        return vec2<f32>(a.x, a.y + b.y);
    }
    if a.x == p.mask.none {
        return vec2<f32>(b.x, a.y + b.y);
    }
    let m = max(a.x, b.x);
    return vec2<f32>(m, a.y * exp(a.x - m) + b.y * exp(b.x - m));
}

fn combined(mine: vec2<f32>, lane: u32) -> vec2<f32> {
    partial[lane] = mine;
    workgroupBarrier();
    for (var n = LANES / 2u; n > 0u; n /= 2u) {
        if lane < n {
            partial[lane] = merged(partial[lane], partial[lane + n]);
        }
        workgroupBarrier();
    }
    return partial[0];
}
