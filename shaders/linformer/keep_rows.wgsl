// Rows of keys or values that are there, the others as zeros: y = x where kept, else 0. So padding
// holds nothing of what it stands on before keys are projected along the length, and gets no
// gradient after.
//
// x, y [batch, heads, length, dim]   kept [batch or 1, 1, 1, length]
//
// Bindings (declared by the host): x, kept, y. ACCUMULATES: y holds what is added to.
// Reads and writes everything once; an invocation has channels of rows by turns.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let h = group.y;
    let b = group.z;
    let first = group.x * ROWS;
    let elements = min(ROWS, p.length - first) * p.dim;
    for (var n = lane; n < elements; n += WORKGROUP) {
        let i = first + n / p.dim;
        let d = n % p.dim;
        var value = 0.0;
        if kept_at(view_at(p.kept, b, 0u, 0u, i)) {
            value = x_at(view_at(p.x, b, h, i, d));
        }
        let o = view_at(p.y, b, h, i, d);
        if ACCUMULATES {
            value += y_at(o);
        }
        y_store(o, value);
    }
}
