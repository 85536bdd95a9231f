// The rows of a product of few rows (matmul/few_rows.wgsl), without a norm.
//
// Needs: Tile; tile_a4.
// Gives: few_a4, prepare_row.

fn prepare_row(t: Tile, row: u32, index: u32) {}

fn few_a4(t: Tile, row: u32, k: u32) -> vec4<f32> {
    return vec4<f32>(tile_a4(t, row, k));
}
