// The gradient of a token's row, summed over its rows in the bucket order of each round. Queries
// are keys too, divided by their length.
//   of values    d_x = Σ d_keys
//   of queries   d_x = Σ d_queries + (Σ d_keys − k (k · Σ d_keys)) / |x|   k = x / |x|
//
// d_keys [batch, heads · rounds, ahead + length, dim], F32   ranks [batch, heads, rounds, length]
// d_queries [batch, heads · rounds, length, dim], F32   x, d_x [batch, heads, length, dim]
// lengths [batch or 1, 1, 1, 1]
//
// The first `ahead` rows of d_keys are copies of the last chunk. A workgroup computes ROWS tokens,
// with ROW_LANES invocations each. Rows that are not tokens have a gradient of 0.
//
// Constants: ROWS, ROW_LANES; HAS_X for queries; HAS_LENGTHS; ACCUMULATES: adds to d_x.
//
// Bindings (declared by the host): d_keys; d_queries and x if HAS_X; ranks; lengths if HAS_LENGTHS;
// d_x. The kernel reads each gradient once, and the gradients of normalised keys twice.

const SHORTEST: f32 = 1e-12;

// Each invocation's part of |x|² and of x · Σ d_keys. The second numbers are for x divided by 2 to
// the power of FAR_EXPONENT.
var<workgroup> squares: array<vec2<f32>, ROWS * ROW_LANES>;
var<workgroup> products: array<vec2<f32>, ROWS * ROW_LANES>;

// Returns x divided by 2 to the power of `exponent`.
fn x_of(b: u32, h: u32, i: u32, d: u32, exponent: u32) -> f32 {
    return lowered(vec4<f32>(x_at(view_at(p.x, b, h, i, d))), exponent).x;
}

fn rank_of(b: u32, h: u32, round: u32, i: u32) -> u32 {
    return min(ranks_at(view_at(p.ranks, b, h, round, i)), p.length - 1u);
}

// Returns the sum of the gradients as key or value, over all rounds. A token of the last chunk also
// has a copy ahead.
fn keys_sum(b: u32, h: u32, i: u32, d: u32, last: u32) -> f32 {
    var sum = 0.0;
    for (var n = 0u; n < p.rounds; n++) {
        let rank = rank_of(b, h, n, i);
        sum += d_keys_at(view_at(p.d_keys, b, h * p.rounds + n, p.ahead + rank, d));
        if p.ahead > 0u && last > 0u && rank >= last * p.chunk {
            sum += d_keys_at(view_at(p.d_keys, b, h * p.rounds + n, rank - last * p.chunk, d));
        }
    }
    return sum;
}

fn queries_sum(b: u32, h: u32, i: u32, d: u32) -> f32 {
    var sum = 0.0;
    for (var n = 0u; n < p.rounds; n++) {
        sum += d_queries_at(view_at(p.d_queries, b, h * p.rounds + n, rank_of(b, h, n, i), d));
    }
    return sum;
}

@compute @workgroup_size(ROWS * ROW_LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let h = group.y;
    let b = group.z;
    let lane = index % ROW_LANES;
    let row = group.x * ROWS + index / ROW_LANES;
    let i = min(row, p.length - 1u);
    let tokens = min(length_of(b), p.length);
    let last = (max(tokens, 1u) - 1u) / p.chunk;
    let there = i < tokens;
    var square = vec2<f32>();
    var product = vec2<f32>();
    if HAS_X {
        for (var d = lane; d < p.dim; d += ROW_LANES) {
            let x = vec2<f32>(x_of(b, h, i, d, 0u), x_of(b, h, i, d, FAR_EXPONENT));
            square += x * x;
            product += x * keys_sum(b, h, i, d, last);
        }
        squares[index] = square;
        products[index] = product;
        workgroupBarrier();
        square = vec2<f32>();
        product = vec2<f32>();
        for (var n = 0u; n < ROW_LANES; n++) {
            square += squares[index - lane + n];
            product += products[index - lane + n];
        }
    }
    let is_far = !all_finite(vec4<f32>(square.x));
    let exponent = select(0u, FAR_EXPONENT, is_far);
    let length = max(sqrt(select(square.x, square.y, is_far)), SHORTEST);
    let along = select(0.0, select(product.x, product.y, is_far) / length / length, length > SHORTEST);
    if row < p.length {
        for (var d = lane; d < p.dim; d += ROW_LANES) {
            var sum = 0.0;
            if there {
                sum = keys_sum(b, h, i, d, last);
                if HAS_X {
                    sum = queries_sum(b, h, i, d) + lowered(vec4<f32>((sum - x_of(b, h, i, d, exponent) * along) / length), exponent).x;
                }
            }
            let o = view_at(p.d_x, b, h, i, d);
            if ACCUMULATES {
                sum += d_x_at(o);
            }
            d_x_store(o, sum);
        }
    }
}
