// out = scale · x + encoding of the row's position: sinusoidal (Vaswani et al. 2017), or a row of a
// learned table.
//
// x, out [batch, heads, length, dim]   table [1, 1, rows, dim]
// Bindings (declared by the host): x, out; only out in place; table or rotation_table; positions if
// HAS_POSITIONS.
// Each element is read and written once. Each invocation processes a channel at a time.

fn encoding(position: u32, d: u32) -> f32 {
    if HAS_TABLE {
        return table_at(view_at(p.table, 0u, 0u, position, d));
    } else {
        let t = rotation(p.rotation, d / 2u, position);
        return select(t.x, t.y, d % 2u == 0u);
    }
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let h = group.y;
    let b = group.z;
    for (var n = group.x * 64u + lane; n < p.work; n = next_item(n, p.work, p.step)) {
        let i = n / p.dim;
        let d = n % p.dim;
        let x = x_at(view_at(p.x, b, h, i, d));
        out_store(view_at(p.out, b, h, i, d), p.scale * x + encoding(position_of(p.at, b, 0u, i), d));
    }
}
