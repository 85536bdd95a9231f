// The contributions of a pair of query and key to gradients.
//
//   weight  = total · exp(score − lse)
//   d_added = weight · (dropout(d_out · v) − dot)           gradient of the final score
//   d_score = d_added times the derivative of the softcap   gradient of scale · q · k
//
// The final score is the score after softcap and bias. A pair that is not seen contributes zeros,
// whatever its tensors hold.
//
// Constants: HAS_DROPOUT, PER_PAIR_MASK
//
// Needs: p.mask, p.scale; HAS_DROPOUT, PER_PAIR_MASK; Query; apply_dropout, mask_mod, score_mod,
// score_slope.
// Gives: LOG2_E; Pair; pair_of.

const LOG2_E: f32 = 1.4426950408889634;

struct Pair {
    weight: f32,   // as dropout leaves it: what d_out is multiplied by for d_v
    probability: f32,  // before dropout
    d_added: f32,
    d_score: f32,
}

fn pair_of(q: Query, j: u32, dot: f32, d_weight: f32, stats: vec3<f32>) -> Pair {
    var seen = (j >= q.first) & (j < q.end);
    let scaled = dot * p.scale;
    var score = scaled;
    if PER_PAIR_MASK {
        // Past the range, use any key, because rules read tensors at its index.
        let key = min(j, p.mask.kv_len - 1u);
        seen = select(false, mask_mod(q, key), seen);
        score = score_mod(scaled, q, key);
    }
    let weight = select(exp2((score - stats.x) * LOG2_E) * stats.z, 0.0, !seen | (score == p.mask.neg_inf));
    let nothing = (bitcast<u32>(weight) & 0x7fffffffu) == 0u;
    var kept = weight;
    var d_kept = d_weight;
    if HAS_DROPOUT {
        let keep = apply_dropout(1.0, q.b, q.h, q.i, j);
        kept = select(weight * keep, 0.0, keep == 0.0);
        d_kept = select(d_weight * keep, 0.0, keep == 0.0);
    }
    let d_added = weight * (d_kept - stats.y);
    let slope = score_slope(scaled, q, min(j, p.mask.kv_len - 1u));
    return Pair(kept, weight, select(d_added, 0.0, nothing), select(d_added * slope, 0.0, nothing));
}
