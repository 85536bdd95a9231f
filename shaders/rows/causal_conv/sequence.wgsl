// The sequences of a causal convolution, and their rows: first the rows of the state, then the rows
// of x. Row k of a sequence is a row of its state if k is below KEPT.
//
// Needs: p.x, p.numbers, p.channels, p.length, p.sequences; PACKED, LENGTHS, WIDTH; kept4,
// numbers_at, view_at, x_at4.
// Gives: KEPT, Sequence; fill, next_row, push, row4, sequence_at, sequence_of, window.

const KEPT: u32 = WIDTH - 1u;

struct Sequence {
    s: u32,
    b: u32,            // the batch entry
    first: u32,        // rows of the batch entry
    end: u32,
}

fn start_of(s: u32) -> u32 {
    return min(numbers_at(view_at(p.numbers, 0u, 0u, 0u, s)), p.length);
}

fn sequence_of(s: u32) -> Sequence {
    if PACKED {
        let first = start_of(s);
        return Sequence(s, 0u, first, max(start_of(s + 1u), first));
    } else if LENGTHS {
        return Sequence(s, s, 0u, min(numbers_at(view_at(p.numbers, s, 0u, 0u, 0u)), p.length));
    } else {
        return Sequence(s, s, 0u, p.length);
    }
}

// The sequence of row i of batch entry b: the last one that starts at or before the row. If all
// start later, it is the first one.
fn sequence_at(b: u32, i: u32) -> Sequence {
    if PACKED {
        var low = 0u;
        var high = p.sequences;
        while high - low > 1u {
            let middle = (low + high) / 2u;
            if start_of(middle) <= i {
                low = middle;
            } else {
                high = middle;
            }
        }
        return sequence_of(low);
    } else {
        return sequence_of(b);
    }
}

// The first row after i that is not in the same part: before, in or after the sequence.
fn next_row(q: Sequence, i: u32, stop: u32) -> u32 {
    if i < q.first {
        return min(stop, q.first);
    } else if i < q.end {
        return min(stop, q.end);
    } else {
        return stop;
    }
}

// Four channels of row k of a sequence, from d on.
fn row4(q: Sequence, k: u32, d: u32) -> vec4<f32> {
    if k < KEPT {
        return kept4(q.s, k, d);
    } else {
        return x_at4(view_at(p.x, q.b, 0u, q.first + k - KEPT, d), p.x.strides.w, p.channels - d);
    }
}

// The last WIDTH rows, the oldest first.
var<private> window: array<vec4<f32>, WIDTH>;

// Loads the KEPT rows before row k, which is no row of the state.
fn fill(q: Sequence, k: u32, d: u32) {
    /* unrolled */ for (var j = 1u; j < WIDTH; j++) {
        window[j] = row4(q, k - WIDTH + j, d);
    }
}

// Moves the window by one row.
fn push(row: vec4<f32>) {
    /* unrolled */ for (var j = 1u; j < WIDTH; j++) {
        window[j - 1u] = window[j];
    }
    window[KEPT] = row;
}
