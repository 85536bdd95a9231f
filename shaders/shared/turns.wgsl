// Rotations by position · frequency, for every position to 2^24 − 1, without sin and cos: drivers' own are only good
// to 2^-11, and to nothing at large angles.
//
// turns [3, 256, pairs, 2]: cos and sin of digit · 256^level · frequency. A position has three digits to the base 256,
// its rotation is the product of theirs: of unit complex numbers, so errors add up and do not grow.
//
// Needs: turns_at(o).

struct Turns {
    pairs: u32,
    amplitude: f32,    // what cos and sin are multiplied by
    rotary_dim: u32,   // 2 · pairs channels are rotated
    order: u32,
}

const ORDER_HALF: u32 = 0u;
const TURNS_DIGITS: u32 = 256u;
const TURNS_LAST: u32 = 0xffffffu;

// x rotated by the angle whose cosine and sine are t: their product as complex numbers.
fn turned(x: vec2<f32>, t: vec2<f32>) -> vec2<f32> {
    return vec2<f32>(x.x * t.x - x.y * t.y, x.x * t.y + x.y * t.x);
}

fn turn_of(t: Turns, pair: u32, level: u32, digit: u32) -> vec2<f32> {
    let o = ((level * TURNS_DIGITS + digit) * t.pairs + pair) * 2u;
    return vec2<f32>(turns_at(o), turns_at(o + 1u));
}

// cos and sin for a pair below t.pairs, times the amplitude. Positions past the last are taken for the last.
fn turn(t: Turns, pair: u32, position: u32) -> vec2<f32> {
    let at = min(position, TURNS_LAST);
    var result = turn_of(t, pair, 0u, at % TURNS_DIGITS);
    // A digit of 0 turns nothing.
    if at >= TURNS_DIGITS {
        let middle = at / TURNS_DIGITS % TURNS_DIGITS;
        if middle > 0u {
            result = turned(result, turn_of(t, pair, 1u, middle));
        }
        let high = at / (TURNS_DIGITS * TURNS_DIGITS);
        if high > 0u {
            result = turned(result, turn_of(t, pair, 2u, high));
        }
    }
    return result * t.amplitude;
}

// The two channels of a pair.
fn turned_channels(t: Turns, pair: u32) -> vec2<u32> {
    if t.order == ORDER_HALF {
        return vec2<u32>(pair, pair + t.pairs);
    }
    return vec2<u32>(2u * pair, 2u * pair + 1u);
}
