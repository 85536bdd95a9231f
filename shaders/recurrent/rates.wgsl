// The decay and the rate of a token.
//
// Needs: HAS_BETA; are_nan, beta_at, view_at; p.beta.
// Gives: decay_factor4, rate_of.

fn rate_of(b: u32, h: u32, i: u32) -> f32 {
    if HAS_BETA {
        return beta_at(view_at(p.beta, b, h, i, 0u));
    } else {
        return 1.0;
    }
}

// Below −200 the exponential is 0, and some devices have no −∞. NaN stays NaN.
fn decay_factor4(log: vec4<f32>) -> vec4<f32> {
    return select(exp(max(log, vec4<f32>(-200.0))), log, are_nan(log));
}
