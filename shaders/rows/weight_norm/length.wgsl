// The length of a vector in units of its largest element, so that its square neither overflows nor
// underflows.
//
// Needs: WORKGROUP, p, x_at, view_at, largest, total.
// Gives: VectorLength, length_of_vector, unit_of.

struct VectorLength {
    most: f32,
    rest: f32,         // 1 to √dim
}

fn length_of_vector(h: u32, lane: u32) -> VectorLength {
    var most = 0.0;
    for (var d = lane; d < p.dim; d += WORKGROUP) {
        most = max(most, abs(x_at(view_at(p.x, 0u, h, 0u, d))));
    }
    most = largest(lane, most);
    var sum = 0.0;
    for (var d = lane; d < p.dim; d += WORKGROUP) {
        let x = x_at(view_at(p.x, 0u, h, 0u, d)) / most;
        sum += x * x;
    }
    return VectorLength(most, sqrt(total(lane, sum)));
}

// An element divided by the length.
fn unit_of(x: f32, length: VectorLength) -> f32 {
    if length.most == 0.0 {
        return 0.0;
    } else {
        return x / length.most / length.rest;
    }
}
