// Rotations by position · frequency without sin and cos, for every position to 2^24 − 1. Drivers'
// sin and cos have errors of 2^-11, and are wrong for large angles.
//
// rotation_table [3, 256, pairs, 2]: cos and sin of digit · 256^level · frequency. A position has
// three digits to the base 256. Its rotation is the product of their rotations. These are unit
// complex numbers, so errors add up and do not grow.
//
// Needs: rotation_table_at.
// Gives: ORDER_HALF; RotationParams; pair_channels, rotated, rotation.

struct RotationParams {
    pairs: u32,
    amplitude: f32,    // what cos and sin are multiplied by
    rotary_dim: u32,   // 2 · pairs channels are rotated
    order: u32,
}

const ORDER_HALF: u32 = 0u;
const DIGITS: u32 = 256u;
const LAST_POSITION: u32 = 0xffffffu;

// Rotates x by the angle whose cosine and sine are t, as a product of complex numbers.
fn rotated(x: vec2<f32>, t: vec2<f32>) -> vec2<f32> {
    return vec2<f32>(x.x * t.x - x.y * t.y, x.x * t.y + x.y * t.x);
}

fn digit_rotation(t: RotationParams, pair: u32, level: u32, digit: u32) -> vec2<f32> {
    let o = ((level * DIGITS + digit) * t.pairs + pair) * 2u;
    return vec2<f32>(rotation_table_at(o), rotation_table_at(o + 1u));
}

// Returns cos and sin for a pair below t.pairs, times the amplitude. Positions past the last count
// as the last.
fn rotation(t: RotationParams, pair: u32, position: u32) -> vec2<f32> {
    let at = min(position, LAST_POSITION);
    var result = digit_rotation(t, pair, 0u, at % DIGITS);
    // A digit of 0 rotates nothing.
    if at >= DIGITS {
        let middle = at / DIGITS % DIGITS;
        if middle > 0u {
            result = rotated(result, digit_rotation(t, pair, 1u, middle));
        }
        let high = at / (DIGITS * DIGITS);
        if high > 0u {
            result = rotated(result, digit_rotation(t, pair, 2u, high));
        }
    }
    return result * t.amplitude;
}

// Returns the two channels of a pair.
fn pair_channels(t: RotationParams, pair: u32) -> vec2<u32> {
    if t.order == ORDER_HALF {
        return vec2<u32>(pair, pair + t.pairs);
    } else {
        return vec2<u32>(2u * pair, 2u * pair + 1u);
    }
}
