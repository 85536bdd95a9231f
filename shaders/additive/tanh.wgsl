// tanh of four numbers, in 18 multiplications and additions and a division each.
//
// The tanh of drivers is slow, and some return NaN for a large argument. A tanh from exp loses
// digits of a small argument. This function is x · P(x²) / Q(x²), fitted so that the relative error
// is at most 2.2e-8 up to |x| = 9.02. From there on f32 has no number between tanh and 1. Rounding
// adds up to six units in the last place (4e-7) without fused multiply-adds, 1 on average.
//
// P and Q begin with 1 and have no negative coefficient. For a tiny x and for −0 the result is x.
// It never decreases by more than its error. It is 1 or −1 for large or infinite x, and never
// beyond. NaN stays NaN.
//
// Needs: are_nan.
// Gives: dot_tanh, tanh4.

fn tanh4(x: vec4<f32>) -> vec4<f32> {
    let z = min(x * x, vec4<f32>(81.3604));
    let over = (((1.3383926855681239e-8 * z + 2.0635552573367022e-5) * z + 3.497441066429019e-3) * z + 0.13382673263549805) * z + 1.0;
    let under = (((7.790097811266605e-7 * z + 3.288490406703204e-4) * z + 2.5884298607707024e-2) * z + 0.4671599566936493) * z + 1.0;
    let t = clamp(x * over / under, vec4<f32>(-1.0), vec4<f32>(1.0));
    // The clamp of some compilers loses a NaN.
    return select(t, x, are_nan(x));
}

// w · tanh(x)
fn dot_tanh(w: vec4<f32>, x: vec4<f32>) -> f32 {
    let t = w * tanh4(x);
    return (t.x + t.y) + (t.z + t.w);
}
