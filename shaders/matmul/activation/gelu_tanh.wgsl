// x (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³), and its slope (Hendrycks and Gimpel 2016).
// It is x / (1 + exp(−2u)), without tanh, which overflows on some drivers.
//
// Needs: sigmoid, within4.
// Gives: activate4, slope4.

// From here on the sigmoid is 0 or 1.
const FAR: f32 = 30.0;

// 2u
fn doubled(x: vec4<f32>) -> vec4<f32> {
    return 1.5957691216 * (x * fma(x * x, vec4<f32>(0.044715), vec4<f32>(1.0)));
}

fn activate4(x: vec4<f32>) -> vec4<f32> {
    return x * sigmoid(doubled(within4(x, FAR)));
}

fn slope4(x: vec4<f32>) -> vec4<f32> {
    let near = within4(x, FAR);
    let u = doubled(near);
    let share = sigmoid(u);
    let rise = 1.5957691216 * fma(near * near, vec4<f32>(0.134145), vec4<f32>(1.0));
    return fma(near * rise, share * sigmoid(-u), share);
}
