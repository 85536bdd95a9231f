// The score of a pair before the mask, from memory: scale · q · k.
//
// Needs: p.group, p.head_dim, p.k, p.q, p.scale; Query; k_at4, key_batch, key_head, list_of,
// listed, q_at4, view_at.
// Gives: raw_score.

fn raw_score(q: Query, j: u32) -> f32 {
    let a = view_at(p.q, q.b, q.h, q.i, 0u);
    let kv_head = q.h / p.group;
    let c = view_at(p.k, key_batch(q.b), key_head(kv_head), listed(list_of(q.b, kv_head), j), 0u);
    var sums = vec4<f32>();
    for (var d = 0u; d < p.head_dim; d += 4u) {
        sums += q_at4(a + d * p.q.strides.w, p.q.strides.w, p.head_dim - d)
            * k_at4(c + d * p.k.strides.w, p.k.strides.w, p.head_dim - d);
    }
    return ((sums.x + sums.y) + (sums.z + sums.w)) * p.scale;
}
