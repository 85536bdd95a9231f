// Weights of the keys in the window of each query: softmax(scale · q · k) times a Gaussian around
// the query's position. (Luong et al. 2015, equations 7 and 10.)
//
// q [batch, heads, q_len, head_dim]   k [batch, kv_heads, kv_len, head_dim]
// positions [batch, heads or 1, q_len, 1]   lengths [batch or 1, 1, 1, 1]
// band [batch, heads, q_len, widest window]: from the first key of the window on
// weights [batch, heads, q_len, kv_len]
//
// A workgroup computes a query at a time. An invocation computes every WORKGROUP-th key of its
// window.
//
// Bindings (declared by the host): q, k, positions, lengths if there are any, band, weights if
// HAS_WEIGHTS. The kernel reads keys once for each query whose window contains them. It writes each
// score or weight to memory three times.

fn write_weights(b: u32, h: u32, i: u32, reach: Reach, row: u32, lane: u32) {
    for (var j = lane; j < p.kv_len; j += WORKGROUP) {
        var weight = 0.0;
        if j >= reach.first && j < reach.first + reach.count {
            weight = band_at(row + j - reach.first);
        }
        weights_store(view_at(p.weights, b, h, i, j), weight);
    }
}

fn weigh(b: u32, h: u32, i: u32, lane: u32) {
    let reach = reach_of(b, h, i);
    let row = view_at(p.band, b, h, i, 0u);
    let start = own_first(reach, lane);
    let end = reach.first + reach.count;
    var most = LOWEST;
    for (var j = start; j < end; j += WORKGROUP) {
        let score = score_of(b, h, i, j);
        band_store(row + j - reach.first, score);
        most = max(most, score);
    }
    most = largest(lane, most);
    var sum = 0.0;
    for (var j = start; j < end; j += WORKGROUP) {
        let weight = exp(band_at(row + j - reach.first) - most);
        band_store(row + j - reach.first, weight);
        sum += weight;
    }
    sum = total(lane, sum);
    for (var j = start; j < end; j += WORKGROUP) {
        let n = row + j - reach.first;
        band_store(n, band_at(n) / sum * gaussian_of(reach, j));
    }
    if HAS_WEIGHTS {
        write_weights(b, h, i, reach, row, lane);
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    for (var i = group.x; i < p.q_len; i += p.step) {
        weigh(group.z, group.y, i, lane);
    }
}
