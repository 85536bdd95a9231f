// The position of a row: start + i, or the value in a tensor. A tensor has one or three axes of
// positions. With one, `axis` has no effect.
//
// Needs: HAS_POSITIONS; View; positions_at, view_at.
// Gives: PositionParams; next_item, position_of.

struct PositionParams {
    view: View,        // of the tensor [batch, axes, length, 1]
    start: u32,        // without a tensor
    by_row: u32,       // 1: the tensor holds the first position of each sequence
    last: u32,         // what positions past it are taken for
    pad: u32,
}

fn position_of(a: PositionParams, b: u32, axis: u32, i: u32) -> u32 {
    var first = a.start;
    if HAS_POSITIONS {
        first = min(positions_at(view_at(a.view, b, axis, i, 0u)), a.last);
    }
    return min(first + i * a.by_row, a.last);
}

// Returns the next item of an invocation after n, `step` further. It is `work` after the last item.
// n + step may be past 2^32.
fn next_item(n: u32, work: u32, step: u32) -> u32 {
    return n + min(step, work - n);
}
