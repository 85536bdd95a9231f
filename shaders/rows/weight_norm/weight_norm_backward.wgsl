// The gradients of out = gain · x / |x|. With u = x / |x|:
//   d_x = gain / |x| (d_out − u (u · d_out))   d_gain = u · d_out
//
// x, d_out, d_x [1, heads, 1, dim]   gain, d_gain [1, heads or 1, 1, 1]
//
// A workgroup processes a gain and the vectors that share it. A vector of zeros has no gradient.
//
// Bindings (declared by the host): x, gain, d_out, d_x, d_gain. ACCUMULATES: the gradients are
// added to d_x and d_gain. Reads x four times and d_out twice.

// u · d_out
fn differentiate(h: u32, lane: u32, gain: f32) -> f32 {
    let length = length_of_vector(h, lane);
    var sum = 0.0;
    for (var d = lane; d < p.dim; d += WORKGROUP) {
        let u = unit_of(x_at(view_at(p.x, 0u, h, 0u, d)), length);
        sum += u * d_out_at(view_at(p.d_out, 0u, h, 0u, d));
    }
    let along = total(lane, sum);
    for (var d = lane; d < p.dim; d += WORKGROUP) {
        let u = unit_of(x_at(view_at(p.x, 0u, h, 0u, d)), length);
        let across = d_out_at(view_at(p.d_out, 0u, h, 0u, d)) - u * along;
        let o = view_at(p.d_x, 0u, h, 0u, d);
        var d_x = gain * unit_of(across, length);
        if ACCUMULATES {
            d_x += d_x_at(o);
        }
        d_x_store(o, d_x);
    }
    return along;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let gain = gain_at(view_at(p.gain, 0u, group.x, 0u, 0u));
    var sum = 0.0;
    for (var n = 0u; n < p.heads; n++) {
        sum += differentiate(group.x * p.heads + n, lane, gain);
    }
    if lane == 0u {
        let o = view_at(p.d_gain, 0u, group.x, 0u, 0u);
        if ACCUMULATES {
            sum += d_gain_at(o);
        }
        d_gain_store(o, sum);
    }
}
