// The row of a product of one row (matmul/few_rows.wgsl), normalised: norm(x) · weight + bias, see
// rows/norm. Each workgroup computes the statistics of the row.
//
// Needs: p.affine, p.features; CENTRED, HAS_NORM_BIAS, HAS_NORM_WEIGHT; Statistics, Tile; lowered,
// norm_bias_at4, norm_weight_at4, statistics_of, tile_a4.
// Gives: Place; few_a4, input4, prepare_row.

struct Place {
    tile: Tile,
    row: u32,
}

var<private> statistics: Statistics;

fn input4(at: Place, d: u32) -> vec4<f32> {
    return vec4<f32>(tile_a4(at.tile, at.row, d));
}

fn prepare_row(t: Tile, row: u32, index: u32) {
    statistics = statistics_of(Place(t, row), index);
}

// Four elements of the row, as normalised4 of rows/norm computes them. Elements past the last one
// may have any value. Each group of columns normalises the row again, so this takes few
// instructions. The exponent is rarely other than 0.
fn few_a4(t: Tile, row: u32, k: u32) -> vec4<f32> {
    var x = vec4<f32>(tile_a4(t, row, k));
    if statistics.exponent != 0u {
        x = lowered(x, statistics.exponent);
    }
    if CENTRED {
        x = (x - statistics.mean) - statistics.rest;
    }
    x *= statistics.scale;
    if HAS_NORM_WEIGHT {
        x *= norm_weight_at4(p.affine.x + k * p.affine.y, p.affine.y, p.features - k);
    }
    if HAS_NORM_BIAS {
        x += norm_bias_at4(p.affine.z + k * p.affine.w, p.affine.w, p.features - k);
    }
    return x;
}
