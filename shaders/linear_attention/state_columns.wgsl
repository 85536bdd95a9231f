// Rows times a transposed state, for four features: the sum over values of the row's side times the
// state's column. `value_factors` are the factors of these sums, `norms` the factors of the state's
// norm.
//
// Needs: Chunk, Tile; ROWS; row_of, state4, sums, value_side4; p.features, p.state_stride,
// p.value_dim.
// Gives: add_state, clear_norms, norms, value_factors.

var<private> norms: array<f32, ROWS>;
var<private> value_factors: array<f32, ROWS>;

fn clear_norms() {
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        norms[r] = 0.0;
        value_factors[r] = 0.0;
    }
}

fn add_state(b: u32, h: u32, chunk: Chunk, tile: Tile, state: u32) {
    let last = p.features - 1u;
    let rows = vec4<u32>(
        tile.column,
        min(tile.column + 1u, last),
        min(tile.column + 2u, last),
        min(tile.column + 3u, last),
    ) * p.state_stride + state;
    for (var c = 0u; c < p.value_dim; c += 4u) {
        let columns = mat4x4<f32>(
            state4(rows.x + c),
            state4(rows.y + c),
            state4(rows.z + c),
            state4(rows.w + c),
        );
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            sums[r] += value_side4(b, h, chunk.first + row_of(tile.row + r, chunk.count), c) * columns;
        }
    }
    let at = rows + vec4<u32>(p.state_stride - 4u);
    let norm = vec4<f32>(state4(at.x).x, state4(at.y).x, state4(at.z).x, state4(at.w).x);
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        sums[r] = sums[r] * value_factors[r] + norm * norms[r];
    }
}
