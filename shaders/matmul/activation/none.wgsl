// The identity, for products without an activation.
//
// Needs: nothing.
// Gives: activate4, slope4.

fn activate4(x: vec4<f32>) -> vec4<f32> {
    return x;
}

fn slope4(x: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(1.0);
}
