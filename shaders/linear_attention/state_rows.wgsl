// Rows times a state: the sum over features of the row's side times the state's row.
//
// Needs: Chunk, Tile; ROWS; feature_side4, row_of, state4, sums; p.features, p.state_stride.
// Gives: add_state, clear_norms, norms, within_features.

var<private> norms: array<f32, ROWS>;

fn clear_norms() {
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        norms[r] = 0.0;
    }
}

// Returns the n-th row after feature f, or the row of f if that is past the last. Such a row has
// the factor 0.
fn within_features(at: u32, f: u32, n: u32) -> u32 {
    return select(at, at + n * p.state_stride, f + n < p.features);
}

fn add_state(b: u32, h: u32, chunk: Chunk, tile: Tile, state: u32) {
    for (var f = 0u; f < p.features; f += 4u) {
        let at = state + f * p.state_stride + tile.column;
        let rows = mat4x4<f32>(
            state4(at),
            state4(within_features(at, f, 1u)),
            state4(within_features(at, f, 2u)),
            state4(within_features(at, f, 3u)),
        );
        let last = state + (f + 1u) * p.state_stride - 4u;
        let norm = vec4<f32>(
            state4(last).x,
            state4(within_features(last, f, 1u)).x,
            state4(within_features(last, f, 2u)).x,
            state4(within_features(last, f, 3u)).x,
        );
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            let side = feature_side4(b, h, chunk.first + row_of(tile.row + r, chunk.count), f);
            sums[r] += rows * side;
            norms[r] += dot(norm, side);
        }
    }
}
