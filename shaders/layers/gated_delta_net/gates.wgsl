// Functions of gates that are exact for large and small arguments.
//
// Needs: nothing.
// Gives: sigmoid, softplus.

fn sigmoid(x: f32) -> f32 {
    let e = exp(-abs(x));
    return select(e, 1.0, x >= 0.0) / (1.0 + e);
}

// log(1 + exp(x)). The quotient corrects the rounding of 1 + e.
fn softplus(x: f32) -> f32 {
    let e = exp(-abs(x));
    let u = 1.0 + e;
    if u == 1.0 {
        return max(x, 0.0) + e;
    } else {
        return max(x, 0.0) + log(u) * (e / (u - 1.0));
    }
}
