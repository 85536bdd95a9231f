// Decays, from their logarithms.
//
// Needs: are_nan.
// Gives: decay_factor4, finite_log4.

// Returns exp(log). Near 0 it is a polynomial, whose last rounding is the only one: errors of all
// tokens multiply. Below −200 it is 0. NaN stays NaN.
fn decay_factor4(log: vec4<f32>) -> vec4<f32> {
    let near = log * (1.0 + log * (0.5 + log * (1.0 / 6.0 + log * (1.0 / 24.0 + log * (1.0 / 120.0 + log / 720.0)))));
    let far = exp(max(log, vec4<f32>(-200.0)));
    return select(select(far, 1.0 + near, abs(log) < vec4<f32>(0.25)), log, are_nan(log));
}

// Some devices have no −∞.
fn finite_log4(log: vec4<f32>) -> vec4<f32> {
    return select(max(log, vec4<f32>(-1e30)), log, are_nan(log));
}
