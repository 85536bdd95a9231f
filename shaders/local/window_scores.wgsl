// Scores of the keys in a query's window, and their Gaussian.
//
// Needs: WORKGROUP, p, q_at4, k_at4, view_at, Reach, distance_to.
// Gives: LOWEST, score_of, gaussian_of, own_first.

const LOWEST: f32 = -3.4028234e38;

fn score_of(b: u32, h: u32, i: u32, j: u32) -> f32 {
    let q = view_at(p.q, b, h, i, 0u);
    let k = view_at(p.k, b, h / p.group, j, 0u);
    let steps = vec2<u32>(p.q.strides.w, p.k.strides.w);
    var sum = vec4<f32>();
    for (var d = 0u; d < p.head_dim; d += 4u) {
        let rest = p.head_dim - d;
        sum += q_at4(q + d * steps.x, steps.x, rest) * k_at4(k + d * steps.y, steps.y, rest);
    }
    return p.scale * ((sum.x + sum.y) + (sum.z + sum.w));
}

fn gaussian_of(reach: Reach, j: u32) -> f32 {
    let x = distance_to(reach, j) * p.narrowness;
    return exp(-x * x);
}

// Returns the first key of the window for this invocation. Lane j mod WORKGROUP always computes key
// j.
fn own_first(reach: Reach, lane: u32) -> u32 {
    return reach.first + (lane + WORKGROUP - reach.first % WORKGROUP) % WORKGROUP;
}
