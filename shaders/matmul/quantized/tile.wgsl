// The functions that matmul/*.wgsl need, for many rows.
//
// Needs: BLOCK_BYTES, IN_FOURS, Y_IN_FOURS; p; block_four, component, view_at, x_at4, y_of,
// y_store, y_store4.
// Gives: Tile; tile_a4, tile_b4, tile_inner, tile_needed, tile_of, tile_repair, tile_store4.

// All parameters of the loops, read once: drivers do not hoist loads of uniforms.
struct Tile {
    rows: u32,
    cols: u32,
    inner: u32,
    batch: u32,
    x: u32,            // first element, then strides of row and feature
    x_row: u32,
    x_k: u32,
    w: u32,            // first byte, then bytes of a row
    w_row: u32,
}

fn tile_of(z: u32) -> Tile {
    let x = view_at(p.x, z, 0u, 0u, 0u);
    return Tile(p.rows, p.cols, p.features, z, x, p.x.strides.z, select(p.x.strides.w, 1u, IN_FOURS), p.first_byte, p.row_bytes);
}

fn tile_needed(t: Tile, row: u32, rows: u32, col: u32, cols: u32) -> bool {
    return true;
}

fn tile_inner(t: Tile, row: u32, rows: u32) -> vec2<u32> {
    return vec2<u32>(0u, t.inner);
}

fn tile_a4(t: Tile, row: u32, k: u32) -> vec4<f32> {
    return x_at4(t.x + row * t.x_row + k * t.x_k, t.x_k, t.inner - k);
}

fn tile_b4(t: Tile, k: u32, col: u32) -> vec4<f32> {
    return block_four(t.w + col * t.w_row + k / 32u * BLOCK_BYTES, k % 32u);
}

fn tile_store4(t: Tile, row: u32, col: u32, value: vec4<f32>) {
    if Y_IN_FOURS {
        y_store4(y_of(t.batch, row, col), value);
    } else {
        for (var c = 0u; c < min(t.cols - col, 4u); c++) {
            y_store(y_of(t.batch, row, col + c), component(value, c));
        }
    }
}

fn tile_repair(t: Tile, row: u32, col: u32) {}
