// y = f(x Wᵀ + b) for up to three projections in one dispatch: queries, keys and values.
//
// x   [batch, heads or 1, rows, features]   W [heads, dim, features]   y [batch, heads, rows, dim]
// Wide: one product of heads · dim columns per batch. Narrow: one product of dim columns per batch
// and head, which reads the head's slice of x.
//
// f is the activation of activation/*.wgsl, the same for all projections.
//
// Bindings (declared by the host): x0.., w0.., bias0.., y. `*_slot` is the index of a side's
// buffer. A_ELEMENT, B_ELEMENT: the types that x and W are loaded as.
// Work: 2 · rows · features · columns per side; bytes: x + W + y once each at best.

struct ProjectPart {
    x: vec4<u32>,      // strides of batch, head, row, feature
    w: vec4<u32>,      // strides of head, output column, feature; offset
    y: vec4<u32>,      // strides of batch, head, row, channel
    x_offset: u32,
    y_offset: u32,
    bias_offset: u32,
    bias_stride: u32,
    features: u32,
    dim: u32,          // columns of one head
    heads: u32,
    has_bias: u32,
    x_slot: u32,
    w_slot: u32,
    bias_slot: u32,
    rows: u32,         // of one product: all sequences at once where x allows it
    length: u32,       // rows of one sequence
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

// All parameters of the loops, read once: drivers do not hoist loads of uniforms.
struct Tile {
    rows: u32,
    cols: u32,
    inner: u32,
    part: u32,
    head: u32,
    x: u32,            // first element, then strides of row and feature
    x_row: u32,
    x_k: u32,
    x_slot: u32,
    w: u32,            // first element, then strides of output column and feature
    w_col: u32,
    w_k: u32,
    w_slot: u32,
    y: vec4<u32>,      // strides of batch, head, row, channel
    y_offset: u32,
    dim: u32,
    length: u32,
    has_bias: bool,
}

fn tile_of(z: u32) -> Tile {
    let head = z % p.z_heads;
    let batch = (z / p.z_heads) % p.batches;
    let part = z / p.z_heads / p.batches;
    let s = p.parts[part];
    var cols = s.dim;
    if p.narrow == 0u {
        cols = s.dim * s.heads;
    } else if head >= s.heads {
        cols = 0u;
    }
    return Tile(
        s.rows, cols, s.features, part, head,
        s.x_offset + batch * s.x.x + head * s.x.y, s.x.z, select(s.x.w, 1u, IN_FOURS), s.x_slot,
        s.w.w + head * s.w.x, select(s.w.y, 1u, IN_FOURS && B_ALONG_N), select(s.w.z, 1u, IN_FOURS && !B_ALONG_N), s.w_slot,
        s.y, s.y_offset + batch * s.y.x + head * s.y.y, s.dim, s.length, s.has_bias != 0u,
    );
}

fn tile_needed(t: Tile, row: u32, rows: u32, col: u32, cols: u32) -> bool {
    return true;
}

fn tile_inner(t: Tile, row: u32, rows: u32) -> vec2<u32> {
    return vec2<u32>(0u, t.inner);
}

fn tile_a4(t: Tile, row: u32, k: u32) -> vec4<A_ELEMENT> {
    return x_at4(t.x_slot, t.x + row * t.x_row + k * t.x_k, t.x_k, t.inner - k);
}

fn tile_b4(t: Tile, k: u32, col: u32) -> vec4<B_ELEMENT> {
    let o = t.w + col * t.w_col + k * t.w_k;
    if B_ALONG_N {
        return w_at4(t.w_slot, o, t.w_col, t.cols - col);
    } else {
        return w_at4(t.w_slot, o, t.w_k, t.inner - k);
    }
}

fn bias_of(t: Tile, col: u32) -> f32 {
    let s = p.parts[t.part];
    return bias_at(s.bias_slot, s.bias_offset + (t.head * s.dim + col) * s.bias_stride);
}

fn y_of(t: Tile, row: u32, col: u32) -> u32 {
    let head = col / t.dim;
    var o = t.y_offset + head * t.y.y + (col - head * t.dim) * t.y.w;
    if t.rows == t.length {
        o += row * t.y.z;
    } else {
        let sequence = row / t.length;
        o += sequence * t.y.x + (row - sequence * t.length) * t.y.z;
    }
    return o;
}

fn tile_store4(t: Tile, row: u32, col: u32, value: vec4<f32>) {
    var sum = value;
    let n = min(t.cols - col, 4u);
    if HAS_BIAS {
        if t.has_bias {
            for (var c = 0u; c < n; c++) {
                sum = select(sum, sum + bias_of(t, col + c), vec4<u32>(0u, 1u, 2u, 3u) == vec4<u32>(c));
            }
        }
    }
    sum = activate4(sum);
    if Y_IN_FOURS {
        y_store4(y_of(t, row, col), sum);
    } else {
        for (var c = 0u; c < n; c++) {
            y_store(y_of(t, row, col + c), component(sum, c));
        }
    }
}

fn tile_repair(t: Tile, row: u32, col: u32) {}
