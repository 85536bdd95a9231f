// Evaluates a mask for single pairs, for a comparison with the host.
//
// pairs [count, 4]: batch, head, query, key   scores [count]
// answers [count, 3]: 1 if the pair is seen, the score, its derivative
//
// Constants: WORKGROUP
//
// Bindings (declared by the host): pairs, scores, answers, the mask's. Each invocation processes a
// pair.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let n = group.x * WORKGROUP + lane;
    if n >= p.count {
        return;
    }
    let q = query_of(pairs_at(4u * n), pairs_at(4u * n + 1u), pairs_at(4u * n + 2u));
    let j = pairs_at(4u * n + 3u);
    var seen = j >= q.first && j < q.end;
    if seen {
        seen = mask_mod(q, j);
    }
    let score = scores_at(n);
    answers_store(3u * n, select(0.0, 1.0, seen));
    answers_store(3u * n + 1u, score_mod(score, q, j));
    answers_store(3u * n + 2u, score_slope(score, q, j));
}
