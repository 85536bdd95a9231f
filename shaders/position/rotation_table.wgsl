// Rotations by position · frequency, for every position to 2^24 − 1, without sin and cos: drivers'
// own are only good to 2^-11, and to nothing at large angles.
//
// rotation_table [3, 256, pairs, 2]: cos and sin of digit · 256^level · frequency. A position has
// three digits to the base 256, its rotation is the product of theirs: of unit complex numbers, so
// errors add up and do not grow.
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

// x rotated by the angle whose cosine and sine are t: their product as complex numbers.
fn rotated(x: vec2<f32>, t: vec2<f32>) -> vec2<f32> {
    return vec2<f32>(x.x * t.x - x.y * t.y, x.x * t.y + x.y * t.x);
}

fn digit_rotation(t: RotationParams, pair: u32, level: u32, digit: u32) -> vec2<f32> {
    let o = ((level * DIGITS + digit) * t.pairs + pair) * 2u;
    return vec2<f32>(rotation_table_at(o), rotation_table_at(o + 1u));
}

// cos and sin for a pair below t.pairs, times the amplitude. Positions past the last are taken for
// the last.
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

// The two channels of a pair.
fn pair_channels(t: RotationParams, pair: u32) -> vec2<u32> {
    if t.order == ORDER_HALF {
        return vec2<u32>(pair, pair + t.pairs);
    } else {
        return vec2<u32>(2u * pair, 2u * pair + 1u);
    }
}
