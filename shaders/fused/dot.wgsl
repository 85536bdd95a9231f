// The score of a pair: scale · q · k.
//
// Needs: p.group, p.head_dim, p.q, p.scale; Query; k_four, k_source, key_row, q_at4, view_at.
// Gives: pair_score.

fn pair_score(q: Query, j: u32) -> f32 {
    let a = view_at(p.q, q.b, q.h, q.i, 0u);
    let k = k_source(q.b, q.h / p.group);
    let row = key_row(k, j);
    var sums = vec4<f32>();
    for (var d = 0u; d < p.head_dim; d += 4u) {
        sums += q_at4(a + d * p.q.strides.w, p.q.strides.w, p.head_dim - d) * k_four(k, row, d);
    }
    return (sums.x + sums.y + sums.z + sums.w) * p.scale;
}
