// The rows of a product of few rows (matmul/few_rows.wgsl), without a norm.
//
// Needs: ROWS; Tile; tile_a4.
// Gives: few_a4, prepared, prepare_rows.

// Nothing is known of a row.
var<private> prepared: array<u32, ROWS>;

fn prepare_rows(t: Tile, row0: u32, index: u32) {}

fn few_a4(t: Tile, of_row: u32, row: u32, k: u32) -> vec4<f32> {
    return vec4<f32>(tile_a4(t, row, k));
}
