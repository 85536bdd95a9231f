// out = scale · table[id] for every id, zero if the table has no such row. If p.accumulates, it is
// added to out.
//
// ids [batch, 1, length, 1]   table [1, 1, rows, dim]   out [batch, 1, length, dim]
//
// An invocation computes four channels of a row at a time.
//
// Bindings (declared by the host): ids, table, out. `IN_FOURS`: table and out are accessed as vec4.
// Bytes: reads a row of the table for each id, and writes everything once.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    for (var n = group.x * WORKGROUP + lane; n < p.work; n += p.step) {
        let row = n / p.fours;
        let d = (n - row * p.fours) * 4u;
        let b = row / p.length;
        let i = row - b * p.length;
        let within = p.dim - d;
        let id = ids_at(view_at(p.ids, b, 0u, i, 0u));
        var y = vec4<f32>();
        if id < p.rows {
            y = p.scale * table_at4(view_at(p.table, 0u, 0u, id, d), p.table.strides.w, within);
        }
        let o = view_at(p.out, b, 0u, i, d);
        if p.accumulates != 0u {
            y += out_at4(o, p.out.strides.w, within);
        }
        store_four(o, within, y);
    }
}
