// scores = scale · q kᵀ, in tiles. Tiles that no query may see are not written.
//
// q [batch, heads, q_len, head_dim]   k [batch, kv_heads, kv_len, head_dim]
// scores [batch, heads, q_len, kv_len], f32
//
// Bindings (declared by the host): q, k, scores, and the mask tensors that bound the range of keys.
// Work: 2 · head_dim per score. Bytes: 4 per score written, which is the limit if head_dim is
// small.

// The values that the loops need, read once, because drivers do not hoist loads of uniforms.
struct Tile {
    rows: u32,
    cols: u32,
    inner: u32,
    b: u32,
    h: u32,
    q: u32,            // first element, then strides of query and channel
    q_row: u32,
    q_k: u32,
    k: u32,            // first element, then strides of key and channel
    k_col: u32,
    k_k: u32,
    out: u32,          // first element, then strides of query and key
    out_row: u32,
    out_col: u32,
    scale: f32,
}

fn tile_of(z: u32) -> Tile {
    let b = z / p.heads;
    let h = z % p.heads;
    return Tile(
        p.mask.q_len, p.mask.kv_len, p.head_dim, b, h,
        view_at(p.q, b, h, 0u, 0u), p.q.strides.z, select(p.q.strides.w, 1u, IN_FOURS),
        view_at(p.k, b, h / p.group, 0u, 0u), p.k.strides.z, select(p.k.strides.w, 1u, IN_FOURS),
        view_at(p.scores, b, h, 0u, 0u), p.scores.strides.z, p.scores.strides.w, p.scale,
    );
}

fn tile_needed(t: Tile, row: u32, rows: u32, col: u32, cols: u32) -> bool {
    let keys = key_range(t.b, t.h, row, row + rows - 1u);
    return col < keys.y && col + cols > keys.x;
}

fn tile_inner(t: Tile, row: u32, rows: u32) -> vec2<u32> {
    return vec2<u32>(0u, t.inner);
}

fn tile_a4(t: Tile, row: u32, k: u32) -> vec4<f32> {
    return q_at4(t.q + row * t.q_row + k * t.q_k, t.q_k, t.inner - k);
}

fn tile_b4(t: Tile, k: u32, col: u32) -> vec4<f32> {
    return k_at4(t.k + col * t.k_col + k * t.k_k, t.k_k, t.inner - k);
}

fn tile_store4(t: Tile, row: u32, col: u32, value: vec4<f32>) {
    let o = t.out + row * t.out_row + col * t.out_col;
    if SCORES_IN_FOURS {
        scores_store4(o, value * t.scale);
    } else {
        for (var c = 0u; c < min(4u, t.cols - col); c++) {
            scores_store(o + c * t.out_col, component(value, c) * t.scale);
        }
    }
}

fn tile_repair(t: Tile, row: u32, col: u32) {}
