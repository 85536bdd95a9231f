// max(x, 0), and its slope, which is 0 at 0. A NaN stays one.
//
// Needs: nothing.
// Gives: activate4, slope4.

fn activate4(x: vec4<f32>) -> vec4<f32> {
    return select(x, vec4<f32>(), x < vec4<f32>());
}

fn slope4(x: vec4<f32>) -> vec4<f32> {
    return select(vec4<f32>(), vec4<f32>(1.0), x > vec4<f32>());
}
