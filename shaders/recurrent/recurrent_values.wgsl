// Copies the rows of v or of the gradient of out. Rows past the last are zeros.
//
// x [batch, value_heads, length, value_dim]   memory: an array of rows [values], at p.result
//
// Bindings (declared by the host): x, chunks, memory. Floors: 4 · value_dim bytes read and 4 ·
// values written a row. An invocation copies four channels of a row.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let z = group.z;
    let e = (group.x * WORKGROUP + index) * 4u;
    let t = e / p.values;
    let c = e % p.values;
    if t >= p.chunk_len {
        return;
    }
    let chunk = chunk_of(z, group.y);
    var value = vec4<f32>();
    if t < chunk.count {
        value = x4(z / p.value_heads, z % p.value_heads, chunk.first + t, c);
    }
    memory_store4(p.result + (row_at(z, group.y) + t) * p.values + c, value);
}
