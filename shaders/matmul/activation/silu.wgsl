// x / (1 + exp(−x)), and its slope (Hendrycks and Gimpel 2016; Ramachandran et al. 2017, "Swish").
//
// Needs: sigmoid, within4.
// Gives: activate4, slope4.

fn activate4(x: vec4<f32>) -> vec4<f32> {
    return x * sigmoid(x);
}

fn slope4(x: vec4<f32>) -> vec4<f32> {
    // Beyond 150 sigmoid is 0 or 1. For infinite x, the term x · sigmoid(x) · sigmoid(−x) would
    // then be NaN, not 0.
    let near = within4(x, 150.0);
    let share = sigmoid(near);
    return fma(near * share, sigmoid(-near), share);
}
