// The order of elements: the largest first, and among equal elements the lower column first.
//
// Needs: nothing.
// Gives: is_before, key_of.

// Larger numbers have larger keys. NaN has the largest key, 0xfffffffe. −∞ has the smallest key,
// 0x007fffff. Both zeros are equal.
fn key_of(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let magnitude = bits & 0x7fffffffu;
    if magnitude > 0x7f800000u {
        return 0xfffffffeu;
    } else if magnitude == 0u {
        return 0x80000000u;
    } else {
        return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
    }
}

// a, b: a key and a column.
fn is_before(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.x > b.x || (a.x == b.x && a.y < b.y);
}
