// Rows of queries, and the keys that a query may see, for the kernels of an indexer.
//
// Needs: p.all_queries, p.head_dim, p.q, p.span; q_at4, ranges_at, view_at.
// Gives: q_four, range_of.

fn q_four(b: u32, h: u32, i: u32, d: u32) -> vec4<f32> {
    return q_at4(view_at(p.q, b, h, i, d), p.q.strides.w, p.head_dim - d);
}

// The range of keys of query i of the span.
fn range_of(b: u32, i: u32) -> vec2<u32> {
    let o = 2u * ((p.span.x + b) * p.all_queries + p.span.y + i);
    return vec2<u32>(ranges_at(o), ranges_at(o + 1u));
}
