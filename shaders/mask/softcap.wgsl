// Softcap: softcap · tanh(score / softcap).
//
// Needs: p.mask; any_nan.
// Gives: softcap, softcap_slope.

// Drivers compute tanh from exp. For a small x few digits are correct, and softcap magnifies the
// error. For a large x the result is NaN. So the function uses a polynomial near 0 (Cephes, tanhf).
// It returns ±1 from where f32 has no value between. NaN stays NaN.
fn tanh_exact(x: f32) -> f32 {
    let a = abs(x);
    if a < 0.625 {
        let z = x * x;
        let c = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z;
        return x + x * z * (c - 3.33332819422e-1);
    } else if a > 15.0 {
        return sign(x);
    } else {
        let t = 1.0 - 2.0 / (exp(2.0 * a) + 1.0);
        return select(t, -t, x < 0.0);
    }
}

fn softcap(score: f32) -> f32 {
    // Here the cap changes nothing that f32 holds, and a division by a huge cap would lose the
    // score. NaN also returns here, because some drivers' exp loses it.
    if abs(score) <= p.mask.softcap * 2e-4 || any_nan(vec4<f32>(score)) {
        return score;
    } else {
        return p.mask.softcap * tanh_exact(score / p.mask.softcap);
    }
}

// The derivative of softcap: 1 − tanh².
fn softcap_slope(score: f32) -> f32 {
    if abs(score) <= p.mask.softcap * 2e-4 || any_nan(vec4<f32>(score)) {
        return 1.0;
    } else {
        let t = tanh_exact(score / p.mask.softcap);
        return (1.0 - t) * (1.0 + t);
    }
}
