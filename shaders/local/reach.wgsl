// The keys that a query sees. They are at most p.half_window from the key that is nearest to the
// query's position, and belong to its sequence.
//
// Needs: p, positions_at, view_at, length_of.
// Gives: Reach, reach_of, distance_to.

struct Reach {
    first: u32,
    count: u32,
    centre: i32,       // of a position half way between two keys, the second
    beside: f32,       // from the position to the centre, exactly
}

fn reach_of(b: u32, h: u32, i: u32) -> Reach {
    let position = positions_at(view_at(p.positions, b, h, i, 0u));
    // From 2^30 on, infinite or NaN. The kernel tests the bits, because compilers may assume that
    // there is no infinity or NaN.
    if (bitcast<u32>(position) & 0x7fffffffu) >= 0x4e800000u {
        return Reach();
    } else {
        let below = floor(position);
        let above = select(0.0, 1.0, position - below >= 0.5);
        let centre = i32(below) + i32(above);
        let first = max(centre - p.half_window, 0);
        let end = min(centre + p.half_window + 1, i32(min(length_of(b), p.kv_len)));
        return Reach(u32(first), u32(max(end - first, 0)), centre, above - (position - below));
    }
}

// j − position
fn distance_to(reach: Reach, j: u32) -> f32 {
    return f32(i32(j) - reach.centre) + reach.beside;
}
