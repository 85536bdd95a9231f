// Gradients of y = x Wᵀ + b, each a product C = A · B of views:
//   d_x = d_y W       rows of x, features of x, summed over output columns
//   d_W = d_yᵀ x      output columns, features of x, summed over the rows of x
// Rows of C and the inner axis may consist of several axes: sequence and row, head and channel.
// Narrow: a product per head.
//
// Bindings (declared by the host): d_y is A, other (W or x) is B, result is C. ACCUMULATES: the
// product is added to result.
// Work: 2 · rows · columns · inner; bytes: A + B + C once each at best.
//
// The functions that matmul/*.wgsl need. Levels count the axes that form an axis, 1 to 3.

// An axis of the product, and its strides in the two tensors that have it.
struct ProductAxis {
    lengths: vec4<u32>,   // of the whole; of the innermost axis that it is made of, of the middle one
    left: vec4<u32>,      // strides from the innermost on: of A, or of B for columns
    right: vec4<u32>,     // of B, or of C for rows and columns
}

// All parameters of the loops, read once: drivers do not hoist loads of uniforms.
struct Tile {
    rows: u32,
    cols: u32,
    inner: u32,
    a: u32,
    b: u32,
    c: u32,
    row_lengths: vec4<u32>,
    row_a: vec4<u32>,
    k_lengths: vec4<u32>,
    k_a: vec4<u32>,
    k_b: vec4<u32>,
    col_b: u32,
}

fn tile_of(z: u32) -> Tile {
    let first = p.first + p.step * z;
    return Tile(
        p.rows.lengths.x, p.cols.lengths.x, p.inner.lengths.x, first.x, first.y, first.z,
        p.rows.lengths, p.rows.left, p.inner.lengths, p.inner.left, p.inner.right,
        select(p.cols.left.x, 1u, B_IN_FOURS && B_ALONG_N),
    );
}

fn tile_needed(t: Tile, row: u32, rows: u32, col: u32, cols: u32) -> bool {
    return true;
}

fn tile_inner(t: Tile, row: u32, rows: u32) -> vec2<u32> {
    return vec2<u32>(0u, t.inner);
}

// The distance in elements from the first index of an axis to index i.
fn along_axis(i: u32, levels: u32, lengths: vec4<u32>, strides: vec4<u32>) -> u32 {
    if levels == 1u {
        return i * strides.x;
    } else {
        let n = i / lengths.y;
        let o = (i - n * lengths.y) * strides.x;
        if levels == 2u {
            return o + n * strides.y;
        } else {
            let outer = n / lengths.z;
            return o + (n - outer * lengths.z) * strides.y + outer * strides.z;
        }
    }
}

fn a_of(t: Tile, row: u32, k: u32) -> u32 {
    return t.a + along_axis(row, ROW_LEVELS, t.row_lengths, t.row_a) + along_axis(k, INNER_LEVELS, t.k_lengths, t.k_a);
}

fn b_of(t: Tile, k: u32, col: u32) -> u32 {
    return t.b + along_axis(k, INNER_LEVELS, t.k_lengths, t.k_b) + col * t.col_b;
}

fn tile_a4(t: Tile, row: u32, k: u32) -> vec4<f32> {
    if A_IN_FOURS {
        return d_y_at4(a_of(t, row, k), 1u, 4u);
    } else if A_ALONG_M {
        let r = min(vec4<u32>(row) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(t.rows - 1u));
        return vec4<f32>(
            d_y_at(a_of(t, r.x, k)), d_y_at(a_of(t, r.y, k)), d_y_at(a_of(t, r.z, k)), d_y_at(a_of(t, r.w, k)),
        );
    } else {
        let ks = min(vec4<u32>(k) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(t.inner - 1u));
        return vec4<f32>(
            d_y_at(a_of(t, row, ks.x)), d_y_at(a_of(t, row, ks.y)), d_y_at(a_of(t, row, ks.z)), d_y_at(a_of(t, row, ks.w)),
        );
    }
}

fn tile_b4(t: Tile, k: u32, col: u32) -> vec4<f32> {
    if B_IN_FOURS {
        return other_at4(b_of(t, k, col), 1u, 4u);
    } else if B_ALONG_N {
        return other_at4(b_of(t, k, col), t.col_b, t.cols - col);
    } else {
        let ks = min(vec4<u32>(k) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(t.inner - 1u));
        return vec4<f32>(
            other_at(b_of(t, ks.x, col)), other_at(b_of(t, ks.y, col)), other_at(b_of(t, ks.z, col)), other_at(b_of(t, ks.w, col)),
        );
    }
}

fn tile_store4(t: Tile, row: u32, col: u32, value: vec4<f32>) {
    let o = t.c + along_axis(row, ROW_LEVELS, t.row_lengths, p.rows.right) + col * p.cols.right.x;
    if C_IN_FOURS {
        var sum = value;
        if ACCUMULATES {
            sum += result_at4(o, 1u, 4u);
        }
        result_store4(o, sum);
    } else {
        for (var n = 0u; n < min(t.cols - col, 4u); n++) {
            let to = o + n * p.cols.right.x;
            if ACCUMULATES {
                result_store(to, component(value, n) + result_at(to));
            } else {
                result_store(to, component(value, n));
            }
        }
    }
}

fn tile_repair(t: Tile, row: u32, col: u32) {}
