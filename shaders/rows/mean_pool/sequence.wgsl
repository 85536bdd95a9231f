// The rows of a sequence whose mean is computed. They are all rows, the first rows of a batch
// entry, unmasked rows, or a part of a packed entry.
//
// Needs: p.x, p.numbers, p.keep, p.length, p.features; PACKED, LENGTHS, KEEP, FAR_EXPONENT;
// all_finite, lowered, mean_of_half, view_at, numbers_at, keep_at, x_at4.
// Gives: Sequence; far_exponent, is_kept, mean4, sequence_of.

// Means are divided by 2 to this power before their length is computed.
fn far_exponent(squares: f32) -> u32 {
    return select(FAR_EXPONENT, 0u, all_finite(vec4<f32>(squares)));
}

struct Sequence {
    b: u32,
    first: u32,
    end: u32,
    count: u32,        // rows that are kept
}

fn is_kept(b: u32, i: u32) -> bool {
    if KEEP {
        return keep_at(view_at(p.keep, b, 0u, 0u, i));
    } else {
        return true;
    }
}

fn sequence_of(s: u32) -> Sequence {
    if PACKED {
        let first = min(numbers_at(view_at(p.numbers, 0u, 0u, 0u, s)), p.length);
        let end = clamp(numbers_at(view_at(p.numbers, 0u, 0u, 0u, s + 1u)), first, p.length);
        return Sequence(0u, first, end, end - first);
    } else if LENGTHS {
        let end = min(numbers_at(view_at(p.numbers, s, 0u, 0u, 0u)), p.length);
        return Sequence(s, 0u, end, end);
    } else if !KEEP {
        return Sequence(s, 0u, p.length, p.length);
    } else {
        var count = 0u;
        for (var i = 0u; i < p.length; i++) {
            count += u32(is_kept(s, i));
        }
        return Sequence(s, 0u, p.length, count);
    }
}

// Four channels of the mean, from d on; zero past the last channel, and for no rows. The sum of
// several rows may be infinite although the mean is finite. Then the kernel first divides rows by a
// power of 2 above their number. It computes half the mean from the sum of these rows.
fn mean4(sequence: Sequence, d: u32) -> vec4<f32> {
    let count = max(sequence.count, 1u);
    let mean = sum4(sequence, d, 0u) / f32(count);
    if all_finite(mean) {
        return mean;
    } else {
        let exponent = 32u - countLeadingZeros(count);
        let power = bitcast<f32>((126u + exponent) << 23u);
        return mean_of_half(sum4(sequence, d, exponent) * (power / f32(count)));
    }
}

// The sum of rows / 2 to the power of `exponent`.
fn sum4(sequence: Sequence, d: u32, exponent: u32) -> vec4<f32> {
    var sum = vec4<f32>();
    for (var i = sequence.first; i < sequence.end; i++) {
        if is_kept(sequence.b, i) {
            sum += lowered(x_at4(view_at(p.x, sequence.b, 0u, i, d), p.x.strides.w, p.features - d), exponent);
        }
    }
    return sum;
}
