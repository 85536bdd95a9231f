// The gradient of v: that of the errors, after the transposed equation. Rows outside of all
// sequences get 0.
//
// d_v [batch, value_heads, length, value_dim]   memory: d_errors [values] of each row
//
// Bindings (declared by the host): chunks, memory, `written`, which is d_v. Floors: 4 · (values +
// value_dim) bytes read or written a row. An invocation copies four channels of a row.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let z = group.z;
    let e = (group.x * WORKGROUP + index) * 4u;
    let t = e / p.values;
    let c = e % p.values;
    let chunk = chunk_of(z, group.y);
    if t >= chunk.rows || c >= p.value_dim {
        return;
    }
    var value = vec4<f32>();
    if t < chunk.count {
        value = at4(p.left + (row_at(z, group.y) + t) * p.values + c);
    }
    store_row(z / p.value_heads, z % p.value_heads, chunk.first + t, c, value);
}
