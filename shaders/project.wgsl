// y = x Wᵀ + b for up to three projections in one dispatch: queries, keys and values.
//
// x   [batch, heads or 1, rows, features]   W [heads, dim, features]   y [batch, heads, rows, dim]
// Wide: one product of heads · dim columns per batch. Narrow: one of dim columns per batch and head,
// reading that head's slice of x.
//
// Bindings (declared by the host): x0.., w0.., bias0.., y. `*_slot` says which of them a side uses.
// Work: 2 · rows · features · columns per side; bytes: x + W + y once each at best.

struct Part {
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

struct Params {
    parts: array<Part, 3>,
    batches: u32,
    narrow: u32,       // heads are separate products
    z_heads: u32,      // products per batch: the largest head count if narrow, else 1
    pad: u32,
}

@group(0) @binding(0) var<uniform> p: Params;

struct Tile {
    rows: u32,
    cols: u32,
    inner: u32,
    part: u32,
    x: u32,
    w: u32,
    y: u32,
    head: u32,
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
    let x = s.x_offset + batch * s.x.x + head * s.x.y;
    let w = s.w.w + head * s.w.x;
    return Tile(s.rows, cols, s.features, part, x, w, s.y_offset + batch * s.y.x, head);
}

fn tile_needed(t: Tile, row: u32, rows: u32, col: u32, cols: u32) -> bool {
    return true;
}

fn tile_inner(t: Tile, row: u32, rows: u32) -> vec2<u32> {
    return vec2<u32>(0u, t.inner);
}

fn tile_a4(t: Tile, row: u32, k: u32) -> vec4<f32> {
    let s = p.parts[t.part].x;
    return x_at4(p.parts[t.part].x_slot, t.x + row * s.z + k * s.w, s.w, t.inner - k);
}

fn tile_b4(t: Tile, k: u32, col: u32) -> vec4<f32> {
    let s = p.parts[t.part].w;
    let o = t.w + col * s.y + k * s.z;
    if B_ALONG_N {
        return w_at4(p.parts[t.part].w_slot, o, s.y, t.cols - col);
    }
    return w_at4(p.parts[t.part].w_slot, o, s.z, t.inner - k);
}

fn bias_of(t: Tile, col: u32) -> f32 {
    let part = t.part;
    return bias_at(p.parts[part].bias_slot, p.parts[part].bias_offset + (t.head * p.parts[part].dim + col) * p.parts[part].bias_stride);
}

fn y_of(t: Tile, row: u32, col: u32) -> u32 {
    let dim = p.parts[t.part].dim;
    let length = p.parts[t.part].length;
    let s = p.parts[t.part].y;
    return t.y + row / length * s.x + (t.head + col / dim) * s.y + row % length * s.z + col % dim * s.w;
}

fn tile_put4(t: Tile, row: u32, col: u32, value: vec4<f32>) {
    var sum = value;
    let n = t.cols - col;
    if HAS_BIAS {
        if p.parts[t.part].has_bias != 0u {
            for (var c = 0u; c < min(n, 4u); c++) {
                sum[c] += bias_of(t, col + c);
            }
        }
    }
    if Y_IN_FOURS {
        y_put4(y_of(t, row, col), sum);
    } else {
        for (var c = 0u; c < min(n, 4u); c++) {
            y_put(y_of(t, row, col + c), sum[c]);
        }
    }
}
