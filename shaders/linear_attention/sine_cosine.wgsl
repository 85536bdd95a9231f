// Sine and cosine, accurate to a few units in the last place of 1. The functions of drivers may be
// off by 2^-11 (WGSL, "Accuracy of built-in functions").
//
// The function first subtracts a multiple of π/2 from the angle, in three parts. The first products
// are then exact up to |x| = 50 000 (Cody and Waite 1980). Then it sums the Taylor series, whose
// first missing term is below 3e-9 up to π/4.
//
// Needs: nothing.
// Gives: sine_cosine.

fn sine_cosine(x: f32) -> vec2<f32> {
    let n = round(x * 0.63661977);
    let r = ((x - n * 1.5703125) - n * 0.00048375129699707031) - n * 7.549790126404332e-8;
    let z = r * r;
    let s = r + r * z * (-0.16666667 + z * (0.0083333333 + z * (-0.0001984127 + z * 2.7557319e-6)));
    let c = 1.0 - z * (0.5 - z * (0.041666667 + z * (-0.0013888889 + z * 2.4801587e-5)));
    let quadrant = u32(i32(n)) & 3u;
    let turned = select(vec2<f32>(s, c), vec2<f32>(c, -s), (quadrant & 1u) == 1u);
    return select(turned, -turned, quadrant >= 2u);
}
