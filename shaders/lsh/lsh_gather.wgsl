// Copies the rows of a tensor in bucket order, for each round. Before them there are `ahead` rows:
// copies of the last chunk. With NORMALISES each row is divided by its length.
//
// x [batch, heads, length, dim]   order [batch, heads, rounds, length]
// y [batch, heads · rounds, ahead + length, dim]   lengths [batch or 1, 1, 1, 1]
//
// A workgroup computes ROWS rows, with ROW_LANES invocations each. Rows that are not tokens are
// zeros.
//
// Bindings (declared by the host): x, order; lengths if HAS_LENGTHS; y. The kernel reads and writes
// each row once for each round, and reads it twice if it normalises.

const SHORTEST: f32 = 1e-12;

// Each invocation's part of the squared length of its row. The second number is for the row divided
// by 2 to the power of FAR_EXPONENT.
var<workgroup> squares: array<vec2<f32>, ROWS * ROW_LANES>;

@compute @workgroup_size(ROWS * ROW_LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let b = group.z;
    let h = group.y / p.rounds;
    let round = group.y % p.rounds;
    let lane = index % ROW_LANES;
    let row = group.x * ROWS + index / ROW_LANES;
    let tokens = min(length_of(b), p.length);
    let last = (max(tokens, 1u) - 1u) / p.chunk;
    let copied = row < p.ahead;
    let place = select(row - p.ahead, last * p.chunk + row, copied);
    let used = row < p.ahead + p.length;
    let there = used && place < tokens && !(copied && last == 0u);
    var position = 0u;
    if there {
        position = order_at(view_at(p.order, b, h, round, place));
    }
    var factor = 1.0;
    var exponent = 0u;
    if NORMALISES {
        var mine = vec2<f32>();
        for (var d = lane; d < p.dim; d += ROW_LANES) {
            let value = x_at(view_at(p.x, b, h, position, d));
            let both = vec2<f32>(value, lowered(vec4<f32>(value), FAR_EXPONENT).x);
            mine += both * both;
        }
        squares[index] = mine;
        workgroupBarrier();
        var sum = vec2<f32>();
        for (var n = 0u; n < ROW_LANES; n++) {
            sum += squares[index - lane + n];
        }
        let is_far = !all_finite(vec4<f32>(sum.x));
        exponent = select(0u, FAR_EXPONENT, is_far);
        factor = 1.0 / max(sqrt(select(sum.x, sum.y, is_far)), SHORTEST);
    }
    if used {
        for (var d = lane; d < p.dim; d += ROW_LANES) {
            var value = 0.0;
            if there {
                value = lowered(vec4<f32>(x_at(view_at(p.x, b, h, position, d))), exponent).x * factor;
            }
            y_store(view_at(p.y, b, group.y, row, d), value);
        }
    }
}
