// Scores → weights, in place: softcap, bias, mask, softmax, dropout. Also lse = ln Σ exp(score).
//
// scores [batch, heads, q_len, kv_len], f32   lse [batch, heads, q_len, 1]
//
// ROW_LANES invocations share a row: one (row_per_invocation.wgsl) or a workgroup
// (row_per_workgroup.wgsl). A row that sees no key becomes zeros, its lse −∞.
//
// Bindings (declared by the host): scores; lse if used. The mask and dropout add theirs.
//
// The kernel does two reads, one write and two exp2 per score. Scores are natural: NATURAL_SCORES.

const NEXT: vec4<u32> = vec4<u32>(0u, 1u, 2u, 3u);

// The values that the loops need, read once, because drivers do not hoist loads of uniforms.
struct Row {
    scores: u32,       // first element, then stride of keys
    step: u32,
    kv_len: u32,
    neg_inf: f32,
    query: Query,
}

// The four scores from key j on, as inputs of the softmax. They are −∞ for keys that the query does
// not see.
fn seen_scores(r: Row, j: u32) -> vec4<f32> {
    var x = scores_at4(r.scores + j * r.step, r.step, r.kv_len - j);
    let q = r.query;
    if j < q.first || j + 4u > q.end {
        let js = vec4<u32>(j) + NEXT;
        x = select(vec4<f32>(r.neg_inf), x, (js >= vec4<u32>(q.first)) & (js < vec4<u32>(q.end)));
    }
    if PER_PAIR_MASK {
        for (var c = 0u; c < 4u; c++) {
            if j + c >= q.first && j + c < q.end {
                var score = r.neg_inf;
                if mask_mod(q, j + c) {
                    score = score_mod(component(x, c), q, j + c);
                }
                x = select(x, vec4<f32>(score), NEXT == vec4<u32>(c));
            }
        }
    }
    return x;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let b = group.z;
    let h = group.y;
    let i = row_index(group.x, index);
    let lane = lane_of(index);
    if i >= p.mask.q_len {
        return;
    }
    let neg_inf = p.mask.neg_inf;
    let kv_len = p.mask.kv_len;
    let q = query_of(b, h, i);
    let r = Row(view_at(p.scores, b, h, i, 0u), p.scores.strides.w, kv_len, neg_inf, q);

    var row_max = LOWEST;
    var sums = vec4<f32>();
    var nan_carry = 0.0;
    // A lane handles the same keys in both loops, so it overwrites only scores that it has read
    // itself.
    for (var j = q.first / (ROW_LANES * 4u) * (ROW_LANES * 4u) + lane * 4u; j < q.end; j += ROW_LANES * 4u) {
        let x = seen_scores(r, j);
        let highest = max(max(x.x, x.y), max(x.z, x.w));
        if highest - row_max > RESCALE_THRESHOLD {
            sums *= rescale_of(row_max, highest);
            row_max = highest;
        }
        sums += weights_of(x, row_max, neg_inf);
        if any_nan(x) {
            nan_carry += x.x + x.y + x.z + x.w;
        }
    }
    let seen_total = reduce_row(row_state(row_max, sums.x + sums.y + sums.z + sums.w + nan_carry, neg_inf), lane);
    let total = with_sink(seen_total, b, h);
    let seen = is_seen(total, neg_inf);
    let scale = select(0.0, 1.0 / total.y, seen);
    if HAS_LSE {
        if lane == 0u {
            lse_store(view_at(p.lse, b, h, i, 0u), lse_of(total, neg_inf));
        }
    }
    for (var j = lane * 4u; j < kv_len; j += ROW_LANES * 4u) {
        var w = vec4<f32>();
        if seen && j < q.end && j + 4u > q.first {
            let x = seen_scores(r, j);
            w = weights_of(x, total.x, neg_inf) * scale;
            if HAS_DROPOUT {
                for (var c = 0u; c < 4u; c++) {
                    if j + c < kv_len {
                        let dropped = apply_dropout(component(w, c), b, h, i, j + c);
                        w = select(w, vec4<f32>(dropped), NEXT == vec4<u32>(c));
                    }
                }
            }
        }
        if IN_FOURS {
            scores_store4(r.scores + j, w);
        } else {
            for (var c = 0u; c < min(4u, kv_len - j); c++) {
                scores_store(r.scores + (j + c) * r.step, component(w, c));
            }
        }
    }
}
