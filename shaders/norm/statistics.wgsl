// The mean and the scale 1 / √(variance + eps) of a row, in f32, by two passes: never E[x²] − E[x]², which cancels. The mean of
// RMSNorm is 0. The second pass also sums x − mean: the mean of that is the rounding of the first mean, `rest`. A large mean would
// otherwise shift each normalised value by its rounding (Chan, Golub and LeVeque 1983, the corrected two-pass algorithm).
//
// Needs: p.x, p.residual, p.features, p.eps; CENTRED, HAS_RESIDUAL, ROW_LANES; view_at, x_at4, residual_at4, row_sum.
// Gives: Place, Statistics; input4, normalised4, place_of, statistics_of.

// Where a row is.
struct Place {
    b: u32,
    h: u32,
    i: u32,
    x: u32,            // first elements
    residual: u32,
}

struct Statistics {
    mean: f32,         // mean + rest is the mean
    rest: f32,
    scale: f32,
}

fn place_of(row: u32) -> Place {
    let plane = row / p.length;
    let i = row - plane * p.length;
    let b = plane / p.heads;
    let h = plane - b * p.heads;
    return Place(b, h, i, view_at(p.x, b, h, i, 0u), view_at(p.residual, b, h, i, 0u));
}

// The four from channel d on of what is normalised; zero past the last.
fn input4(at: Place, d: u32) -> vec4<f32> {
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
    var mean = 0.0;
    if CENTRED {
        var sums = vec4<f32>();
        for (var d = lane * 4u; d < p.features; d += ROW_LANES * 4u) {
            sums += input4(at, d);
        }
        mean = row_sum(sums, lane) / count;
    }
    var squares = vec4<f32>();
    var rests = vec4<f32>();
    for (var d = lane * 4u; d < p.features; d += ROW_LANES * 4u) {
        let off = input4(at, d) - mean;
        let within = vec4<u32>(d) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(p.features);
        squares += select(vec4<f32>(), off * off, within);
        rests += select(vec4<f32>(), off, within);
    }
    var variance = row_sum(squares, lane) / count;
    var rest = 0.0;
    if CENTRED {
        rest = row_sum(rests, lane) / count;
        variance = max(variance - rest * rest, 0.0);
    }
    return Statistics(mean, rest, 1.0 / sqrt(variance + p.eps));
}

// Four elements of the normalised row.
fn normalised4(x: vec4<f32>, s: Statistics) -> vec4<f32> {
    return ((x - s.mean) - s.rest) * s.scale;
}
