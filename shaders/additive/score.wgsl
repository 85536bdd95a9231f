// The additive score of a pair: v · tanh(q + k). (Bahdanau et al. 2014.)
//
// Needs: p.group, p.head_dim, p.q, p.score_vector; Query; dot_tanh, k_four, k_source, key_row,
// q_at4, score_vector_at4, view_at.
// Gives: folds_scale, pair_score.

// Additive scores have no scale.
fn folds_scale() -> bool {
    return true;
}

fn pair_score(q: Query, j: u32) -> f32 {
    let a = view_at(p.q, q.b, q.h, q.i, 0u);
    let w = view_at(p.score_vector, 0u, q.h, 0u, 0u);
    let k = k_source(q.b, q.h / p.group);
    let row = key_row(k, j);
    var sum = 0.0;
    for (var d = 0u; d < p.head_dim; d += 4u) {
        let x = q_at4(a + d * p.q.strides.w, p.q.strides.w, p.head_dim - d) + k_four(k, row, d);
        sum += dot_tanh(score_vector_at4(w + d * p.score_vector.strides.w, p.score_vector.strides.w, p.head_dim - d), x);
    }
    return sum;
}
