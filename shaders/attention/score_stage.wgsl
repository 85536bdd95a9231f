// Writes the scores of a stage in the caller's layout and type. The host chooses the mask's rules:
// none, the softcap, or all rules that change scores and hide keys. Hidden scores are −∞.
//
// scores [batch, heads, q_len, kv_len], f32   out [batch, heads, q_len, kv_len]
// Bindings (declared by the host): scores, out, the mask's. One read and one write per score.

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let j = group.x * 64u + lane;
    if j >= p.mask.kv_len {
        return;
    }
    let i = group.y;
    let b = group.z / p.heads;
    let h = group.z % p.heads;
    let q = query_of(b, h, i);
    var x = p.mask.neg_inf;
    if j >= q.first && j < q.end {
        // If no query of its tile sees a key, the score was not written.
        let score = scores_at(view_at(p.scores, b, h, i, j));
        if !PER_PAIR_MASK {
            x = score;
        } else if mask_mod(q, j) {
            x = score_mod(score, q, j);
        }
    }
    out_store(view_at(p.out, b, h, i, j), x);
}
