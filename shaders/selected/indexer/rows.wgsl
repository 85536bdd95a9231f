// Rows of keys, and products with them, for the gradients of an indexer.
//
// Needs: p.head_dim, p.k, p.scale; k_at4, q_four, view_at.
// Gives: k_four, product.

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
