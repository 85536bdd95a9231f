// tanh of four numbers, in 18 multiplications and additions and a division each.
//
// Drivers' own is slow, NaN for a large argument on some, and made of exp it keeps few digits of a
// small one. This is x · P(x²) / Q(x²), fitted so that the relative error is at most 2.2e-8 up to
// |x| = 9.02, from where f32 has nothing between tanh and 1. Rounding adds up to six units in the
// last place (4e-7) where there is no fused multiply-add, 1 on average. P and Q begin with 1 and
// have no negative coefficient: of a tiny x or of −0 it is x, it never decreases by more than it is
// off by, it is 1 and −1 of what is large or infinite, and never beyond. NaN stays NaN.
//
// Needs: are_nan.
// Gives: dot_tanh, tanh4.

fn tanh4(x: vec4<f32>) -> vec4<f32> {
    let z = min(x * x, vec4<f32>(81.3604));
    let over = (((1.3383926855681239e-8 * z + 2.0635552573367022e-5) * z + 3.497441066429019e-3) * z + 0.13382673263549805) * z + 1.0;
    let under = (((7.790097811266605e-7 * z + 3.288490406703204e-4) * z + 2.5884298607707024e-2) * z + 0.4671599566936493) * z + 1.0;
    let t = clamp(x * over / under, vec4<f32>(-1.0), vec4<f32>(1.0));
    // Compilers' clamp may lose it.
    return select(t, x, are_nan(x));
}

// w · tanh(x)
fn dot_tanh(w: vec4<f32>, x: vec4<f32>) -> f32 {
    let t = w * tanh4(x);
    return (t.x + t.y) + (t.z + t.w);
}
