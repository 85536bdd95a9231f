// Rows of queries and keys, and their products, for the gradients of an indexer.
//
// Needs: p.all_queries, p.first, p.head_dim, p.k, p.q, p.scale; k_at4, q_at4, ranges_at, view_at.
// Gives: k_four, product, q_four, range_of.

fn q_four(b: u32, h: u32, i: u32, d: u32) -> vec4<f32> {
    return q_at4(view_at(p.q, b, h, i, d), p.q.strides.w, p.head_dim - d);
}

fn k_four(b: u32, j: u32, d: u32) -> vec4<f32> {
    return k_at4(view_at(p.k, b, 0u, j, d), p.k.strides.w, p.head_dim - d);
}

// scale · q[h, i] · k[j].
fn product(b: u32, h: u32, i: u32, j: u32) -> f32 {
    var sum = vec4<f32>();
    for (var d = 0u; d < p.head_dim; d += 4u) {
        sum += q_four(b, h, i, d) * k_four(b, j, d);
    }
    return ((sum.x + sum.y) + (sum.z + sum.w)) * p.scale;
}

fn range_of(b: u32, i: u32) -> vec2<u32> {
    let o = 2u * ((p.first.x + b) * p.all_queries + p.first.y + i);
    return vec2<u32>(ranges_at(o), ranges_at(o + 1u));
}
