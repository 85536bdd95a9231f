// max(x, 0), and its slope, which is 0 at 0. A NaN stays one.
//
// Needs: nothing.
// Gives: activate4, slope4.

// By the bits: of a comparison of floats NVIDIA's driver makes a maximum, and loses a NaN. −0 and a NaN with a sign are not below zero.
fn activate4(x: vec4<f32>) -> vec4<f32> {
    let below = bitcast<vec4<u32>>(x) - vec4<u32>(0x80000001u) <= vec4<u32>(0x7f7fffffu);
    return select(x, vec4<f32>(), below);
}

fn slope4(x: vec4<f32>) -> vec4<f32> {
    return select(vec4<f32>(), vec4<f32>(1.0), x > vec4<f32>());
}
