// Partial sums for the gradients of a norm's weight and bias. They are sums of d_out · n and of
// d_out over some of the rows, where n is the normalised row. HAS_GATE: d_out has the factor
// f(gate). GATE_FIRST: x has this factor.
//
// x, residual, gate, d_out [batch, heads, length, features]   parts [2, count, features]
// statistics [rows, 3]: mean, rest, scale
//
// A workgroup has COLUMNS channels and a part of the rows. STRIPS invocations share these rows in
// alternation. The first of them adds the sums in order. Then column_sums.wgsl adds the parts.
//
// Bindings (declared by the host): x, residual and gate if present, d_out, statistics, parts.
// Reads x, residual, gate and d_out once, COLUMNS neighbours at a time.

var<workgroup> strips: array<vec2<f32>, COLUMNS * STRIPS>;

@compute @workgroup_size(COLUMNS * STRIPS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let column = group.x * COLUMNS + lane % COLUMNS;
    let d = min(column, p.features - 1u);
    let first = group.y * p.part;
    let end = min(first + p.part, p.rows);
    var sums = vec2<f32>();
    for (var row = first + lane / COLUMNS; row < end; row += STRIPS) {
        let plane = row / p.length;
        let i = row - plane * p.length;
        let b = plane / p.heads;
        let h = plane - b * p.heads;
        var x = x_at(view_at(p.x, b, h, i, d));
        if HAS_RESIDUAL {
            x += residual_at(view_at(p.residual, b, h, i, d));
        }
        var gate = 1.0;
        if HAS_GATE {
            gate = activate4(vec4<f32>(gate_at(view_at(p.gate, b, h, i, d)))).x;
        }
        if GATE_FIRST {
            x *= gate;
        }
        // The scale is negative if the row is divided by 2 to the power of FAR_EXPONENT.
        let scale = statistics_at(3u * row + 2u);
        let low = lowered(vec4<f32>(x), select(0u, FAR_EXPONENT, scale < 0.0)).x;
        let n = ((low - statistics_at(3u * row)) - statistics_at(3u * row + 1u)) * abs(scale);
        var d_out = d_out_at(view_at(p.d_out, b, h, i, d));
        if HAS_GATE && !GATE_FIRST {
            d_out *= gate;
        }
        sums += vec2<f32>(d_out * n, d_out);
    }
    strips[lane] = sums;
    workgroupBarrier();
    if lane < COLUMNS && column < p.features {
        var sum = vec2<f32>();
        for (var s = 0u; s < STRIPS; s++) {
            sum += strips[s * COLUMNS + lane];
        }
        parts_store(group.y * p.features + column, sum.x);
        parts_store((p.count + group.y) * p.features + column, sum.y);
    }
}
