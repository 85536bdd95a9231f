// out = rows of a table with the blocks of a GGUF file: the embeddings of tokens.
//
// ids [batch, 1, length, 1]   table [rows, features]   out [batch, 1, length, features]
//
// An invocation computes four channels at a time. An id outside the table gives NaN.
//
// Bindings (declared by the host): ids, w, out. `OUT_IN_FOURS`: out is stored as vec4. Bytes: the
// rows of the ids, and out.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    for (var n = group.x * WORKGROUP + lane; n < p.work; n += p.step) {
        let i = n / p.fours;
        let d = (n - i * p.fours) * 4u;
        let id = ids_at(view_at(p.ids, b, 0u, i, 0u));
        let byte = p.first_byte + min(id, p.rows - 1u) * p.row_bytes + d / 32u * BLOCK_BYTES;
        let value = select(vec4<f32>(bitcast<f32>(p.missing)), block_four(byte, d % 32u), id < p.rows);
        let o = view_at(p.out, b, 0u, i, d);
        if OUT_IN_FOURS {
            out_store4(o, value);
        } else {
            for (var c = 0u; c < 4u; c++) {
                out_store(o + c * p.out.strides.w, component(value, c));
            }
        }
    }
}
