// The mean and the scale 1 / √(variance + eps) of a row, in f32, in two passes. E[x²] − E[x]² is
// not used, because it cancels. The mean of RMSNorm is 0. The second pass also computes the mean of
// x − mean. This is `rest`, the rounding error of the first mean. Without it, the rounding of a
// large mean would shift each normalised value. (Chan, Golub and LeVeque 1983, the corrected
// two-pass algorithm.)
//
// Needs: p.x, p.residual, p.gate, p.features, p.rows, p.eps; CENTRED, FAR_EXPONENT, GATE_FIRST,
// HAS_RESIDUAL, ROW_LANES; activate4, all_finite, lowered, view_at, x_at4, residual_at4, gate_at4,
// row_sums.
// Gives: Place, Statistics; bare4, gate4, input4, normalised4, place_of, rounded4, statistics_of.

// The place of a row.
struct Place {
    b: u32,
    h: u32,
    i: u32,
    x: u32,            // first elements
    residual: u32,
}

struct Statistics {
    mean: f32,         // mean + rest is the mean of the row / 2 to the power of exponent
    rest: f32,
    scale: f32,        // of the same
    exponent: u32,     // 0 or FAR_EXPONENT
}

fn place_of(row: u32) -> Place {
    let plane = row / p.length;
    let i = row - plane * p.length;
    let b = plane / p.heads;
    let h = plane - b * p.heads;
    return Place(b, h, i, view_at(p.x, b, h, i, 0u), view_at(p.residual, b, h, i, 0u));
}

// A product that no compiler contracts with a difference to a fused multiply-add. `p.rows >> 31u`
// is 0, but no compiler knows this.
fn rounded4(product: vec4<f32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(product) | vec4<u32>(p.rows >> 31u));
}

// Four channels of the gate, before its activation.
fn gate4(at: Place, d: u32) -> vec4<f32> {
    return gate_at4(view_at(p.gate, at.b, at.h, at.i, d), p.gate.strides.w, p.features - d);
}

// Four channels of the norm's input, from d on; zero past the last channel.
fn input4(at: Place, d: u32) -> vec4<f32> {
    if GATE_FIRST {
        return rounded4(bare4(at, d) * activate4(gate4(at, d)));
    } else {
        return bare4(at, d);
    }
}

// The same without the gate.
fn bare4(at: Place, d: u32) -> vec4<f32> {
    let step = p.x.strides.w;
    var x = x_at4(at.x + d * step, step, p.features - d);
    if HAS_RESIDUAL {
        let step = p.residual.strides.w;
        x += residual_at4(at.residual + d * step, step, p.features - d);
    }
    return x;
}

fn statistics_of(at: Place, lane: u32) -> Statistics {
    let count = f32(p.features);
    // The means of the row, and of the row / 2 to the power of FAR_EXPONENT.
    var means = vec2<f32>();
    if CENTRED {
        var sums = vec4<f32>();
        var far_sums = vec4<f32>();
        for (var d = lane * 4u; d < p.features; d += ROW_LANES * 4u) {
            let x = input4(at, d);
            sums += x;
            far_sums += lowered(x, FAR_EXPONENT);
        }
        means = row_sums(sums, far_sums, lane) / count;
    }
    var squares = vec4<f32>();
    var far_squares = vec4<f32>();
    var rests = vec4<f32>();
    var far_rests = vec4<f32>();
    for (var d = lane * 4u; d < p.features; d += ROW_LANES * 4u) {
        let x = input4(at, d);
        let within = vec4<u32>(d) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(p.features);
        let off = select(vec4<f32>(), x - means.x, within);
        let far_off = select(vec4<f32>(), lowered(x, FAR_EXPONENT) - means.y, within);
        squares += off * off;
        far_squares += far_off * far_off;
        rests += off;
        far_rests += far_off;
    }
    var variances = row_sums(squares, far_squares, lane) / count;
    let is_far = !all_finite(vec4<f32>(variances.x));
    var rest = vec2<f32>();
    if CENTRED {
        rest = row_sums(rests, far_rests, lane) / count;
        variances = max(variances - rest * rest, vec2<f32>());
    }
    let near = Statistics(means.x, rest.x, 1.0 / sqrt(variances.x + p.eps), 0u);
    // eps is negligible compared with such squares.
    let far = Statistics(means.y, rest.y, 1.0 / sqrt(variances.y), FAR_EXPONENT);
    return Statistics(
        select(near.mean, far.mean, is_far),
        select(near.rest, far.rest, is_far),
        select(near.scale, far.scale, is_far),
        select(near.exponent, far.exponent, is_far),
    );
}

// Four elements of the normalised row.
fn normalised4(x: vec4<f32>, s: Statistics) -> vec4<f32> {
    return ((lowered(x, s.exponent) - s.mean) - s.rest) * s.scale;
}
