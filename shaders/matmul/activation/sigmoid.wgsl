// 1 / (1 + exp(−x)), and its slope.
//
// Needs: sigmoid.
// Gives: activate4, slope4.

fn activate4(x: vec4<f32>) -> vec4<f32> {
    return sigmoid(x);
}

// The second factor is 1 − sigmoid(x), without the rounding error of this difference.
fn slope4(x: vec4<f32>) -> vec4<f32> {
    return sigmoid(x) * sigmoid(-x);
}
