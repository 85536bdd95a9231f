// The positions that hidden states predict: S · sigmoid(vector · tanh(x)). (Luong et al. 2015,
// equation 9.)
//
// x [batch, 1, length, units], f32: W h + b   vector [1, 1, 1, units]
// lengths [batch or 1, 1, 1, 1]: S   positions [batch, 1, length, 1], f32
//
// A workgroup computes a row at a time.
//
// Bindings (declared by the host): x, vector, lengths if there are any, positions. The kernel reads
// x once.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    for (var i = group.x; i < p.rows; i += p.step) {
        let sigmoid = sigmoid_of(total(lane, share_of(b, i, lane)));
        if lane == 0u {
            positions_store(view_at(p.positions, b, 0u, i, 0u), f32(length_of(b)) * sigmoid.x);
        }
    }
}
