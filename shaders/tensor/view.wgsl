// A window of a buffer: strides of [batch, heads, length, dim] and the first element, in elements.
//
// Needs: nothing.
// Gives: View; all_finite, any_nan, are_nan, component, mean_of_half, view_at.

struct View {
    strides: vec4<u32>,
    offset: u32,
}

fn view_at(v: View, b: u32, h: u32, i: u32, d: u32) -> u32 {
    return v.offset + b * v.strides.x + h * v.strides.y + i * v.strides.z + d * v.strides.w;
}

// By the bits: compilers may take it that there is neither NaN nor ∞.
fn are_nan(x: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
}

fn any_nan(x: vec4<f32>) -> bool {
    return any(are_nan(x));
}

fn all_finite(x: vec4<f32>) -> bool {
    return all((bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu)) < vec4<u32>(0x7f800000u));
}

// A mean, from the half of it that is computed where its sum is not finite. Weights add up to 1 only up to rounding: what is above
// the largest number by at most a 1024th is the largest number.
fn mean_of_half(half: vec4<f32>) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(half);
    let most = vec4<u32>(0x7effffffu);
    let is_near = (bits & vec4<u32>(0x7fffffffu)) - most <= vec4<u32>(0x2000u);
    return 2.0 * select(half, bitcast<vec4<f32>>(most | (bits & vec4<u32>(0x80000000u))), is_near);
}

// x[c]. FXC computes that as x · (0, 1, 0, 0), which an infinite x.x makes NaN.
fn component(x: vec4<f32>, c: u32) -> f32 {
    let pair = select(x.xy, x.zw, c >= 2u);
    return select(pair.x, pair.y, (c & 1u) != 0u);
}
