// vector · tanh(x) of a row, and its sigmoid.
//
// Needs: WORKGROUP, p, x_at4, vector_at4, view_at, dot_tanh.
// Gives: share_of, sigmoid_of.

// Returns this invocation's part of the product of the row.
fn share_of(b: u32, i: u32, lane: u32) -> f32 {
    var sum = 0.0;
    for (var d = lane * 4u; d < p.units; d += WORKGROUP * 4u) {
        let rest = p.units - d;
        let x = x_at4(view_at(p.x, b, 0u, i, d), p.x.strides.w, rest);
        sum += dot_tanh(vector_at4(view_at(p.vector, 0u, 0u, 0u, d), p.vector.strides.w, rest), x);
    }
    return sum;
}

// Returns the sigmoid and its slope, without overflow.
fn sigmoid_of(x: f32) -> vec2<f32> {
    let t = exp(-abs(x));
    let under = 1.0 / (1.0 + t);
    return vec2<f32>(select(t, 1.0, x >= 0.0) * under, t * under * under);
}
