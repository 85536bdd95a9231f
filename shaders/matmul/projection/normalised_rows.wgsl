// The rows of a product of few rows (matmul/few_rows.wgsl), normalised: norm(x) · weight + bias,
// see rows/norm. Each workgroup computes the statistics of its rows. ROW_LANES invocations share a
// row.
//
// Needs: p.affine, p.features; HAS_NORM_BIAS, HAS_NORM_WEIGHT, ROWS, ROW_LANES; Statistics, Tile;
// norm_bias_at4, normalised4, norm_weight_at4, row_first, statistics_of, tile_a4.
// Gives: Place; few_a4, input4, prepared, prepare_rows.

struct Place {
    tile: Tile,
    row: u32,
}

// The statistics of each row. In registers, those of eight rows would spill on Apple's GPUs.
var<workgroup> prepared: array<vec4<u32>, ROWS>;

fn input4(at: Place, d: u32) -> vec4<f32> {
    return vec4<f32>(tile_a4(at.tile, at.row, d));
}

// Computes the statistics of the rows from row0 on.
fn prepare_rows(t: Tile, row0: u32, index: u32) {
    let r = index / ROW_LANES;
    row_first = r * ROW_LANES;
    let mine = statistics_of(Place(t, min(row0 + r, t.rows - 1u)), index - row_first);
    if index == row_first {
        prepared[r] = vec4<u32>(bitcast<vec3<u32>>(vec3<f32>(mine.mean, mine.rest, mine.scale)), mine.exponent);
    }
    workgroupBarrier();
}

// Four elements of a row with these statistics. Elements past the last one may have any value.
fn few_a4(t: Tile, of_row: vec4<u32>, row: u32, k: u32) -> vec4<f32> {
    let numbers = bitcast<vec3<f32>>(of_row.xyz);
    let s = Statistics(numbers.x, numbers.y, numbers.z, of_row.w);
    var x = normalised4(vec4<f32>(tile_a4(t, row, k)), s);
    if HAS_NORM_WEIGHT {
        x *= norm_weight_at4(p.affine.x + k * p.affine.y, p.affine.y, p.features - k);
    }
    if HAS_NORM_BIAS {
        x += norm_bias_at4(p.affine.z + k * p.affine.w, p.affine.w, p.features - k);
    }
    return x;
}
