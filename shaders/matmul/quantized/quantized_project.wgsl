// y = x Wᵀ, where W has the blocks of a GGUF file (quantized/q4_1.wgsl, quantized/q8_0.wgsl).
//
// x   [batch, 1, length, features]   W [heads · dim, features]   y [batch, heads, length, dim]
//
// Bindings (declared by the host): x, w, y. Work: 2 · rows · features · columns. Bytes: x + W + y
// once each at best. For a few rows, W has most of the bytes.

// The index of y for a row and a column. batch is 0 if all sequences form one product.
fn y_of(batch: u32, row: u32, col: u32) -> u32 {
    let sequence = row / p.length;
    let head = col / p.dim;
    return view_at(p.y, batch + sequence, head, row - sequence * p.length, col - head * p.dim);
}
