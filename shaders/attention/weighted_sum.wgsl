// out = weights · v, over the keys that a tile's queries may see.
//
// weights [batch, heads, q_len, kv_len], f32   v [batch, kv_heads, kv_len, value_dim]
// out [batch, heads, q_len, value_dim]
//
// Bindings (declared by the host): weights, v, out, and the mask tensors that bound the range of
// keys.
//
// Work: 2 · value_dim per weight. Bytes: 4 per weight read.

// The values that the loops need, read once, because drivers do not hoist loads of uniforms.
struct Tile {
    rows: u32,
    cols: u32,
    inner: u32,
    b: u32,
    h: u32,
    weights: u32,      // first element, then strides of query and key
    weights_row: u32,
    weights_k: u32,
    v: u32,            // first element, then strides of key and channel
    v_k: u32,
    v_col: u32,
    out: u32,          // first element, then strides of query and channel
    out_row: u32,
    out_col: u32,
}

fn tile_of(z: u32) -> Tile {
    let b = z / p.heads;
    let h = z % p.heads;
    return Tile(
        p.mask.q_len, p.value_dim, p.mask.kv_len, b, h,
        view_at(p.weights, b, h, 0u, 0u), p.weights.strides.z, select(p.weights.strides.w, 1u, IN_FOURS),
        view_at(p.v, b, h / p.group, 0u, 0u), p.v.strides.z, select(p.v.strides.w, 1u, IN_FOURS),
        view_at(p.out, b, h, 0u, 0u), p.out.strides.z, p.out.strides.w,
    );
}

fn tile_needed(t: Tile, row: u32, rows: u32, col: u32, cols: u32) -> bool {
    return true;
}

// Keys outside the range have weight zero for all of these rows.
fn tile_inner(t: Tile, row: u32, rows: u32) -> vec2<u32> {
    return key_range(t.b, t.h, row, row + rows - 1u);
}

fn tile_a4(t: Tile, row: u32, k: u32) -> vec4<f32> {
    return weights_at4(t.weights + row * t.weights_row + k * t.weights_k, t.weights_k, t.inner - k);
}

fn tile_b4(t: Tile, k: u32, col: u32) -> vec4<f32> {
    let o = t.v + k * t.v_k + col * t.v_col;
    if B_ALONG_N {
        return v_at4(o, t.v_col, t.cols - col);
    } else {
        return v_at4(o, t.v_k, t.inner - k);
    }
}

fn tile_store4(t: Tile, row: u32, col: u32, value: vec4<f32>) {
    let o = t.out + row * t.out_row + col * t.out_col;
    if OUT_IN_FOURS {
        out_store4(o, value);
    } else {
        for (var c = 0u; c < min(4u, t.cols - col); c++) {
            out_store(o + c * t.out_col, component(value, c));
        }
    }
}

// A weight of zero must contribute nothing for any value, but 0 · NaN and 0 · ∞ are NaN. Rounding
// can also make weights add up to more than 1. If the sum is not finite, the kernel computes half
// of it from the weights that are not zero. This costs nothing for finite sums.
fn tile_repair(t: Tile, row: u32, col: u32) {
    let keys = tile_inner(t, row, 1u);
    for (var c = col; c < min(col + 4u, t.cols); c++) {
        var sum = 0.0;
        for (var j = keys.x; j < keys.y; j++) {
            let weight = weights_at(t.weights + row * t.weights_row + j * t.weights_k);
            // By the bits: a NaN must count, and `!=` is false for NaN in SPIR-V's ordered
            // comparison.
            if (bitcast<u32>(weight) & 0x7fffffffu) != 0u {
                sum = fma(weight, lowered(vec4<f32>(v_at(t.v + j * t.v_k + c * t.v_col)), 1u).x, sum);
            }
        }
        out_store(t.out + row * t.out_row + c * t.out_col, mean_of_half(vec4<f32>(sum)).x);
    }
}
