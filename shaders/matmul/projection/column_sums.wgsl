// d_b = Σ over rows of d_y: the gradient of a projection's bias, one element for each output
// column.
//
// d_y [batch, heads, length, dim]   sums [heads · dim]
//
// A workgroup has COLUMNS columns. STRIPS invocations share the rows of a column, in alternation.
// The first of them adds the sums in order, so the bits are the same on every run.
//
// Bindings (declared by the host): d_y, sums. ACCUMULATES: the result is added to sums.
// Reads everything once, COLUMNS neighbours at a time.

var<workgroup> strips: array<f32, COLUMNS * STRIPS>;

@compute @workgroup_size(COLUMNS * STRIPS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let column = group.x * COLUMNS + lane % COLUMNS;
    let within = min(column, p.columns - 1u);
    let h = within / p.dim;
    let d = within - h * p.dim;
    // Four independent sums, to shorten the dependency chain.
    var sums4 = vec4<f32>();
    for (var r = lane / COLUMNS; r < p.rows; r += 4u * STRIPS) {
        /* unrolled */ for (var c = 0u; c < 4u; c++) {
            let row = r + c * STRIPS;
            if row < p.rows {
                let b = row / p.length;
                sums4[c] += d_y_at(view_at(p.d_y, b, h, row - b * p.length, d));
            }
        }
    }
    strips[lane] = (sums4.x + sums4.y) + (sums4.z + sums4.w);
    workgroupBarrier();
    if lane < COLUMNS && column < p.columns {
        var sum = 0.0;
        for (var s = 0u; s < STRIPS; s++) {
            sum += strips[s * COLUMNS + lane];
        }
        let o = p.first + column * p.stride;
        if ACCUMULATES {
            sum += sums_at(o);
        }
        sums_store(o, sum);
    }
}
