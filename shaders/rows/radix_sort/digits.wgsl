// Digits of keys, and the count of each digit for each invocation of a workgroup. A workgroup has a
// block of WORKGROUP · KEYS places of the previous order. An invocation has KEYS consecutive
// places. Each invocation counts separately, so no result depends on the order of execution.
//
// Constants: WORKGROUP, KEYS, DIGITS; HAS_BEFORE. Before the first pass, the order is the order of
// the keys.
//
// Needs: p.before, p.digit_mask, p.keys, p.length, p.shift; HAS_BEFORE, KEYS, WORKGROUP, DIGITS;
// before_at, keys_at, view_at.
// Gives: digit_counts; count_digits, digit_of, position_before.

// The count of digit d for invocation n is element d · WORKGROUP + n.
var<workgroup> digit_counts: array<u32, DIGITS * WORKGROUP>;

// The index of the key at place s of the previous order.
fn position_before(b: u32, h: u32, row: u32, s: u32) -> u32 {
    if !HAS_BEFORE {
        return s;
    } else {
        return before_at(view_at(p.before, b, h, row, s));
    }
}

fn digit_of(b: u32, h: u32, row: u32, position: u32) -> u32 {
    return (keys_at(view_at(p.keys, b, h, row, position)) >> p.shift) & p.digit_mask;
}

fn count_digits(b: u32, h: u32, row: u32, first: u32, lane: u32) {
    for (var d = 0u; d < DIGITS; d++) {
        digit_counts[d * WORKGROUP + lane] = 0u;
    }
    for (var s = first; s < min(first + KEYS, p.length); s++) {
        let digit = digit_of(b, h, row, position_before(b, h, row, s));
        digit_counts[digit * WORKGROUP + lane] += 1u;
    }
}
