// The exponential of −x for x ≥ 0, with an error of two units in the last place. WGSL's exp may be
// off by three plus twice the exponent, and some drivers lose NaN in it.
//
// Needs: nothing.
// Gives: exp_of_minus, sigmoid, within4.

// Clamps x to −most … most; a NaN stays NaN. It compares bits, because an NVIDIA H100 loses a NaN
// in comparisons and in `min`.
fn within4(x: vec4<f32>, most: f32) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(x);
    let limit = bitcast<u32>(most);
    // True from the next number above `most` to infinity.
    let far = (bits & vec4<u32>(0x7fffffffu)) - vec4<u32>(limit + 1u) <= vec4<u32>(0x7f800000u - (limit + 1u));
    return select(x, bitcast<vec4<f32>>(vec4<u32>(limit) | (bits & vec4<u32>(0x80000000u))), far);
}

// exp(−(a + b)) for a ≥ 0 and a b near zero. b is the rounding error of a.
fn exp_of_minus(a: vec4<f32>, b: vec4<f32>) -> vec4<f32> {
    // Beyond 150 the result is zero.
    let above = within4(a, 150.0);
    // ln 2 as a sum of two numbers. The first has eight bits, so its products with whole numbers
    // are exact (Cody and Waite 1980).
    let n = floor(fma(above, vec4<f32>(-1.442695), vec4<f32>(0.5)));
    let r = fma(n, vec4<f32>(-0.69140625), -above) - fma(n, vec4<f32>(0.00174093060), b);
    // Taylor series: |r| is at most 0.4, so the omitted terms are below 2^-26 of the sum.
    var sum = vec4<f32>(1.0 / 5040.0);
    sum = fma(sum, r, vec4<f32>(1.0 / 720.0));
    sum = fma(sum, r, vec4<f32>(1.0 / 120.0));
    sum = fma(sum, r, vec4<f32>(1.0 / 24.0));
    sum = fma(sum, r, vec4<f32>(1.0 / 6.0));
    sum = fma(sum, r, vec4<f32>(0.5));
    sum = fma(sum, r, vec4<f32>(1.0));
    sum = fma(sum, r, vec4<f32>(1.0));
    // 2^n as a product of two factors, which are both normal numbers.
    let whole = vec4<i32>(n);
    let half = whole >> vec4<u32>(1u);
    let scale = bitcast<vec4<f32>>((half + 127) << vec4<u32>(23u));
    return sum * scale * bitcast<vec4<f32>>((whole - half + 127) << vec4<u32>(23u));
}

// 1 / (1 + exp(−x)), without overflow.
fn sigmoid(x: vec4<f32>) -> vec4<f32> {
    let e = exp_of_minus(abs(x), vec4<f32>());
    return select(vec4<f32>(1.0), e, x < vec4<f32>()) / (1.0 + e);
}
