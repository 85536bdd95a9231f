// Copies the unmasked rows of keys or values, and zeros for the others: y = x if kept, else 0.
// Padding then adds nothing to projected keys, and gets no gradient in the backward pass.
//
// x, y [batch, heads, length, dim]   kept [batch or 1, 1, 1, length]
//
// Bindings (declared by the host): x, kept, y. With ACCUMULATES the kernel adds to y. It reads and
// writes each element once. The invocations of a workgroup alternate over the channels of its rows.

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
