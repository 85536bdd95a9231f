// The terms of the gradients of predicted positions. With d = d_positions · S · sigmoid'(vector ·
// tanh(x)):
//   d_x = d · vector · (1 − tanh²(x))   terms = d · tanh(x), whose sum over rows is d_vector
//
// x, d_x, terms [batch, 1, length, units], f32   vector [1, 1, 1, units]
// lengths [batch or 1, 1, 1, 1]: S   d_positions [batch, 1, length, 1], f32
//
// A workgroup computes a row at a time.
//
// Bindings (declared by the host): x, vector, lengths if there are any, d_positions, d_x, terms.
// The kernel reads x twice, and writes d_x and terms once.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    for (var i = group.x; i < p.rows; i += p.step) {
        let sigmoid = sigmoid_of(total(lane, share_of(b, i, lane)));
        let d = d_positions_at(view_at(p.d_positions, b, 0u, i, 0u)) * f32(length_of(b)) * sigmoid.y;
        for (var u = lane * 4u; u < p.units; u += WORKGROUP * 4u) {
            let rest = p.units - u;
            let t = tanh4(x_at4(view_at(p.x, b, 0u, i, u), p.x.strides.w, rest));
            let v = vector_at4(view_at(p.vector, 0u, 0u, 0u, u), p.vector.strides.w, rest);
            let d_x = d * v * ((1.0 - t) * (1.0 + t));
            for (var c = 0u; c < min(4u, rest); c++) {
                d_x_store(view_at(p.d_x, b, 0u, i, u + c), component(d_x, c));
                terms_store(view_at(p.terms, b, 0u, i, u + c), d * component(t, c));
            }
        }
    }
}
