// The gradient of a tensor of the mask: bias, ALiBi's slopes, the table of relative biases, sinks.
//
//   d_bias[b, h, i, j]         = d_added[i, j]   (backward/pair.wgsl)
//   d_slopes[b, h]             = Σ d_added[i, j] · distance(i, j)
//   d_relative[b, h, 0, place] = Σ d_added[i, j]   of the pairs whose distance has that place
//   d_sinks[b, h]              = −Σᵢ exp(sink − lse[i]) · dot[i]
//
// The gradient is also summed over each axis that is 1 and repeats.
//
// row_stats [batch, heads, q_len, 4] (backward/stats.wgsl)
// gradient [shape], where any axis may be 1
//
// With SHARED, a workgroup computes a part of one element, and its lanes share the queries and
// keys. Otherwise an invocation computes an element. Each lane adds queries and keys in order, and
// lanes are added as a tree. Every run thus gives the same bits, without atomics. With several
// parts, gradient is [shape, parts] in scratch, and part_sums.wgsl adds the parts.
//
// Constants: WORKGROUP; SHARED
//
// The terms of the gradient are in score_gradients/pairs.wgsl and score_gradients/sinks.wgsl. The
// sum over lanes is in score_gradients/lanes.wgsl.
//
// Bindings (declared by the host): q, k, v, d_out except for sinks; row_stats, gradient. The mask
// and dropout add theirs.

// The range of an axis of length `len` that element `at` of the gradient's axis covers.
fn stands_for(at: u32, size: u32, len: u32) -> vec2<u32> {
    return select(vec2<u32>(at, at + 1u), vec2<u32>(0u, len), size == 1u);
}

// The sum of a lane, for a part of an element.
fn lane_sum(element: vec4<u32>, part: u32, lane: u32) -> f32 {
    let batches = stands_for(element.x, p.shape.x, p.batch);
    let heads = stands_for(element.y, p.shape.y, p.heads);
    let queries = stands_for(element.z, p.shape.z, p.mask.q_len);
    let head_count = heads.y - heads.x;
    let query_count = queries.y - queries.x;
    let rows = (batches.y - batches.x) * head_count * query_count;
    let first = part * p.part_rows;
    let end = min(first + p.part_rows, rows);
    let step = select(1u, WORKGROUP / p.key_lanes, SHARED);
    var sum = 0.0;
    for (var row = first + lane / p.key_lanes; row < end; row += step) {
        let i = queries.x + row % query_count;
        let h = heads.x + row / query_count % head_count;
        let b = batches.x + row / query_count / head_count;
        sum += row_sum(b, h, i, element.w, lane % p.key_lanes);
    }
    return sum;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let at = workgroup + p.first.xyz;
    let lane = select(0u, index, SHARED);
    let part = select(0u, at.x % p.parts, SHARED);
    let n = select(at.x * WORKGROUP + index, at.x / p.parts, SHARED);
    let element = vec4<u32>(at.z / p.shape.y, at.z % p.shape.y, at.y, n);
    var sum = 0.0;
    if element.w < p.shape.w {
        sum = lane_sum(element, part, lane);
    }
    // All lanes reach this call, because it may contain barriers.
    sum = sum_of_lanes(sum, lane);
    if element.w < p.shape.w && lane == 0u {
        let o = view_at(p.gradient, element.x, element.y, element.z, element.w) + part;
        if p.accumulates != 0u {
            sum += gradient_at(o);
        }
        gradient_store(o, sum);
    }
}
