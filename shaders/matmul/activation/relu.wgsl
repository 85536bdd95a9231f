// max(x, 0), and its slope, which is 0 at 0. A NaN stays NaN.
//
// Needs: nothing.
// Gives: activate4, slope4.

// Compares bits to find numbers below zero: numbers with a sign and −∞, but neither −0 nor NaN.
// With a comparison of floats, a NaN became 0 on an NVIDIA H100.
fn activate4(x: vec4<f32>) -> vec4<f32> {
    let below = bitcast<vec4<u32>>(x) - vec4<u32>(0x80000001u) <= vec4<u32>(0x7f7fffffu);
    return select(x, vec4<f32>(), below);
}

fn slope4(x: vec4<f32>) -> vec4<f32> {
    return select(vec4<f32>(), vec4<f32>(1.0), x > vec4<f32>());
}
