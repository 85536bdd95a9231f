// The terms of the gradients of local attention. For the window of each query the kernel writes the
// weights and the gradients of scores. It also writes the gradient of the position.
//   a = softmax(scale · q · k)   g = exp(−(j − position)² / 2σ²)   x = g (d_out · v)
//   weights a g   d_scores scale a (x − Σ a x)   d_positions Σ a x (j − position) / σ²
//
// q [batch, heads, q_len, head_dim]   k [batch, kv_heads, kv_len, head_dim]
// v [batch, kv_heads, kv_len, value_dim]   d_out [batch, heads, q_len, value_dim]
// positions, d_positions [batch, heads or 1, q_len, 1]   lengths [batch or 1, 1, 1, 1]
// band [2 · batch, heads, q_len, widest window]: all weights, then the gradients of scores
//
// A workgroup computes a position at a time, with the query of each head at this position. An
// invocation computes every WORKGROUP-th key of the window.
//
// Bindings (declared by the host): q, k, v, d_out, positions, lengths if there are any, band,
// d_positions if HAS_D_POSITIONS. The kernel reads keys and values once for each query whose window
// contains them.

fn d_weight_of(b: u32, h: u32, i: u32, j: u32) -> f32 {
    let v = view_at(p.v, b, h / p.group, j, 0u);
    let d_out = view_at(p.d_out, b, h, i, 0u);
    let steps = vec2<u32>(p.v.strides.w, p.d_out.strides.w);
    var sum = vec4<f32>();
    for (var d = 0u; d < p.value_dim; d += 4u) {
        let rest = p.value_dim - d;
        sum += v_at4(v + d * steps.x, steps.x, rest) * d_out_at4(d_out + d * steps.y, steps.y, rest);
    }
    return (sum.x + sum.y) + (sum.z + sum.w);
}

// Returns this invocation's part of the gradient of the position.
fn differentiate(b: u32, h: u32, i: u32, reach: Reach, lane: u32) -> f32 {
    let weights = view_at(p.band, b, h, i, 0u);
    let d_scores = view_at(p.band, p.batch + b, h, i, 0u);
    let start = own_first(reach, lane);
    let end = reach.first + reach.count;
    var most = LOWEST;
    for (var j = start; j < end; j += WORKGROUP) {
        let score = score_of(b, h, i, j);
        band_store(weights + j - reach.first, score);
        most = max(most, score);
    }
    most = largest(lane, most);
    var sum = 0.0;
    for (var j = start; j < end; j += WORKGROUP) {
        let weight = exp(band_at(weights + j - reach.first) - most);
        band_store(weights + j - reach.first, weight);
        sum += weight;
    }
    sum = total(lane, sum);
    var mean = 0.0;
    var slope = 0.0;
    for (var j = start; j < end; j += WORKGROUP) {
        let n = j - reach.first;
        let softmax = band_at(weights + n) / sum;
        let x = gaussian_of(reach, j) * d_weight_of(b, h, i, j);
        band_store(weights + n, softmax);
        band_store(d_scores + n, x);
        mean += softmax * x;
        slope += softmax * x * distance_to(reach, j);
    }
    mean = total(lane, mean);
    for (var j = start; j < end; j += WORKGROUP) {
        let n = j - reach.first;
        let softmax = band_at(weights + n);
        band_store(d_scores + n, p.scale * softmax * (band_at(d_scores + n) - mean));
        band_store(weights + n, softmax * gaussian_of(reach, j));
    }
    return slope * p.steepness;
}

fn store_slope(b: u32, h: u32, i: u32, slope: f32) {
    let o = view_at(p.d_positions, b, h, i, 0u);
    var sum = slope;
    if ACCUMULATES {
        sum += d_positions_at(o);
    }
    d_positions_store(o, sum);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let b = group.z;
    for (var i = group.x; i < p.q_len; i += p.step) {
        let reach = reach_of(b, group.y, i);
        var slope = 0.0;
        for (var n = 0u; n < p.heads; n++) {
            slope += differentiate(b, group.y * p.heads + n, i, reach, lane);
        }
        if HAS_D_POSITIONS {
            slope = total(lane, slope);
            if lane == 0u {
                store_slope(b, group.y, i, slope);
            }
        }
    }
}
