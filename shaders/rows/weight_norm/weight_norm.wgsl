// Scales vectors to a length: out = gain · x / |x| (Salimans and Kingma 2016, "Weight
// normalization").
//
// x, out [1, heads, 1, dim]   gain [1, heads or 1, 1, 1]
//
// A workgroup computes a vector. A vector of zeros stays zero.
//
// Bindings (declared by the host): x, gain, out. Reads x three times.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let h = group.x;
    let length = length_of_vector(h, lane);
    let gain = gain_at(view_at(p.gain, 0u, h, 0u, 0u));
    for (var d = lane; d < p.dim; d += WORKGROUP) {
        let x = x_at(view_at(p.x, 0u, h, 0u, d));
        out_store(view_at(p.out, 0u, h, 0u, d), gain * unit_of(x, length));
    }
}
