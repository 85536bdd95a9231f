// The score of a pair before the mask, from memory: v · tanh(q + k).
//
// Needs: p.group, p.head_dim, p.k, p.q, p.score_vector; Query; dot_tanh, k_at4, q_at4,
// score_vector_at4, view_at.
// Gives: raw_score.

fn raw_score(q: Query, j: u32) -> f32 {
    let a = view_at(p.q, q.b, q.h, q.i, 0u);
    let c = view_at(p.k, q.b, q.h / p.group, j, 0u);
    let w = view_at(p.score_vector, 0u, q.h, 0u, 0u);
    var sum = 0.0;
    for (var d = 0u; d < p.head_dim; d += 4u) {
        let x = q_at4(a + d * p.q.strides.w, p.q.strides.w, p.head_dim - d)
            + k_at4(c + d * p.k.strides.w, p.k.strides.w, p.head_dim - d);
        sum += dot_tanh(score_vector_at4(w + d * p.score_vector.strides.w, p.score_vector.strides.w, p.head_dim - d), x);
    }
    return sum;
}
