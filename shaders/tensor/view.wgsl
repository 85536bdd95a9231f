// A window of a buffer: strides of [batch, heads, length, dim] and the first element, in elements.
//
// Needs: nothing.
// Gives: FAR_EXPONENT; View; all_finite, any_nan, are_nan, component, lowered, mean_of_half,
// view_at.

struct View {
    strides: vec4<u32>,
    offset: u32,
}

fn view_at(v: View, b: u32, h: u32, i: u32, d: u32) -> u32 {
    return v.offset + b * v.strides.x + h * v.strides.y + i * v.strides.z + d * v.strides.w;
}

// Compares bits, because compilers may assume that there is neither NaN nor ∞.
fn are_nan(x: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
}

fn any_nan(x: vec4<f32>) -> bool {
    return any(are_nan(x));
}

fn all_finite(x: vec4<f32>) -> bool {
    return all((bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu)) < vec4<u32>(0x7f800000u));
}

// If sums or squares are beyond f32's range, rows are first divided by 2 to this power.
const FAR_EXPONENT: u32 = 100u;

// x / 2ⁿ, for sums and squares beyond f32's range whose results are in range. ∞ and NaN stay
// unchanged. Numbers below 2ⁿ⁻¹²⁶ become some number below 2⁻¹²⁵.
//
// It works on bits, because compilers may reorder products and sums as if they had no range. They
// may compute (x / 2ⁿ)² as x² / 2²ⁿ, and a / 2 − b / 2 as (a − b) / 2.
fn lowered(x: vec4<f32>, n: u32) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(x);
    let size = bits & vec4<u32>(0x7fffffffu);
    let low = select(size, size - min(size, vec4<u32>(n << 23u)), size < vec4<u32>(0x7f800000u));
    return bitcast<vec4<f32>>(low | (bits & vec4<u32>(0x80000000u)));
}

// A mean, from half of it, which the kernel computes if its sum is not finite. The sum of weights
// is 1 only up to rounding. Therefore a result up to 1/1024 above the largest number becomes the
// largest number. It works on bits, as `lowered` does.
fn mean_of_half(half: vec4<f32>) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(half);
    let size = bits & vec4<u32>(0x7fffffffu);
    let most = vec4<u32>(0x7effffffu);
    let is_near = size - most <= vec4<u32>(0x2000u);
    let twice = select(min(size + vec4<u32>(0x800000u), vec4<u32>(0x7f800000u)), vec4<u32>(0x7f7fffffu), is_near);
    let mean = bitcast<vec4<f32>>(twice | (bits & vec4<u32>(0x80000000u)));
    // Below 2⁻¹²⁶ there is no exponent to increase.
    let is_plain = size - vec4<u32>(0x800000u) < vec4<u32>(0x7f000000u);
    return select(half + half, mean, is_plain);
}

// x[c]. FXC computes it as x · (0, 1, 0, 0), which is NaN if x.x is infinite.
fn component(x: vec4<f32>, c: u32) -> f32 {
    let pair = select(x.xy, x.zw, c >= 2u);
    return select(pair.x, pair.y, (c & 1u) != 0u);
}
