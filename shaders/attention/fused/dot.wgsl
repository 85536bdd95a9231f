// The score of a pair: scale · q · k.
//
// Needs: p.group, p.head_dim, p.q, p.scale; Query; k_four, k_source, key_row, lowered, q_at4,
// view_at.
// Gives: folds_scale, pair_score.

// The smallest scale that is multiplied into queries. With a smaller scale, the products can be too
// small for f32 although the scores are not.
const SMALLEST_FOLDED: f32 = 0x1p-64f;
// With a smaller scale, queries are divided by 2 to this power instead. The sum is multiplied by
// the rest of the scale.
const SMALL_EXPONENT: u32 = 62u;

// True if loops may hold queries times the scale.
fn folds_scale() -> bool {
    return abs(p.scale) >= SMALLEST_FOLDED || p.scale == 0.0;
}

fn pair_score(q: Query, j: u32) -> f32 {
    let a = view_at(p.q, q.b, q.h, q.i, 0u);
    let k = k_source(q.b, q.h / p.group);
    let row = key_row(k, j);
    let exponent = select(SMALL_EXPONENT, 0u, folds_scale());
    var sums = vec4<f32>();
    for (var d = 0u; d < p.head_dim; d += 4u) {
        let q4 = lowered(q_at4(a + d * p.q.strides.w, p.q.strides.w, p.head_dim - d), exponent);
        sums += q4 * k_four(k, row, d);
    }
    return (sums.x + sums.y + sums.z + sums.w) * select(p.scale * 0x1p62f, p.scale, folds_scale());
}
