// x Φ(x), where Φ is the cumulative distribution function of the normal distribution (Hendrycks and
// Gimpel 2016), and its slope. The error is a few units in the last place of the result, also for x
// far below zero.
//
// Φ(−z) = exp(−z²/2) · P(t) · k / (z + k), t = (z − k) / (z + k), for every z ≥ 0. With this t the
// quotient of Φ and the exponential is almost a straight line. (Shepherd and Laframboise 1981,
// "Chebyshev approximation of (1 + 2x) exp(x²) erfc x in 0 ≤ x < ∞".) P interpolates it at ten
// Chebyshev points of z from 0 to 15, with k = 3.25. The relative error is 1e-8.
//
// Needs: exp_of_minus, within4.
// Gives: activate4, slope4.

// exp(−x²/2): the square of the upper twelve bits of x is exact, and the rest is added.
fn bell(z: vec4<f32>) -> vec4<f32> {
    let most = bitcast<vec4<f32>>(bitcast<vec4<u32>>(z) & vec4<u32>(0xfffff000u));
    return exp_of_minus(0.5 * most * most, 0.5 * (z - most) * (z + most));
}

// |x|, clamped to 15, where Φ(−z) is below the smallest number.
fn distance_of(x: vec4<f32>) -> vec4<f32> {
    return abs(within4(x, 15.0));
}

// Φ(−z), from the bell at z.
fn tail(z: vec4<f32>, bell: vec4<f32>) -> vec4<f32> {
    let share = 3.25 / (z + 3.25);
    let t = (z - 3.25) / (z + 3.25);
    var sum = vec4<f32>(3.9059753e-05);
    sum = fma(sum, t, vec4<f32>(4.4218574e-05));
    sum = fma(sum, t, vec4<f32>(-0.00032296559));
    sum = fma(sum, t, vec4<f32>(-0.00035803573));
    sum = fma(sum, t, vec4<f32>(0.0025548278));
    sum = fma(sum, t, vec4<f32>(0.00033756800));
    sum = fma(sum, t, vec4<f32>(-0.024899771));
    sum = fma(sum, t, vec4<f32>(0.084447354));
    sum = fma(sum, t, vec4<f32>(-0.16599591));
    sum = fma(sum, t, vec4<f32>(0.22690412));
    return sum * share * bell;
}

fn activate4(x: vec4<f32>) -> vec4<f32> {
    let z = distance_of(x);
    let below = tail(z, bell(z));
    return x * select(1.0 - below, below, x < vec4<f32>());
}

// Φ(x) + x · exp(−x²/2) / √(2π)
fn slope4(x: vec4<f32>) -> vec4<f32> {
    let z = distance_of(x);
    let e = bell(z);
    let below = tail(z, e);
    let near = select(z, -z, x < vec4<f32>());
    return fma(near * 0.3989422804, e, select(1.0 - below, below, x < vec4<f32>()));
}
