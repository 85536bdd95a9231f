// Scores → weights, in place: softcap, bias, mask, softmax, dropout; and lse = ln Σ exp(score).
//
// scores [batch, heads, q_len, kv_len], f32   lse [batch, heads, q_len, 1]
//
// LANES invocations share a row, ROWS rows a workgroup. A row that sees no key becomes zeros, its lse −∞.
//
// Bindings (declared by the host): scores; lse, lengths, keep, keys, bias, dropout where used.
// Two reads and one write per score; two exp.

struct Params {
    scores: View,
    lse: View,
    dropout: View,
    mask: MaskParams,
    seed: vec2<u32>,
    heads: u32,
    dropout_threshold: u32,
    dropout_scale: f32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

@group(0) @binding(0) var<uniform> p: Params;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let b = group.z;
    let h = group.y;
    var i = group.x;
    var lane = index;
    if LANES == 1u {
        i = group.x * WORKGROUP + index;
        lane = 0u;
        if i >= p.mask.q_len {
            return;
        }
    }
    let row = view_at(p.scores, b, h, i, 0u);
    let step = p.scores.strides.w;
    let keys = key_range(b, h, i, i);

    var top = p.mask.none;
    var sum = 0.0;
    for (var j = keys.x + lane; j < keys.y; j += LANES) {
        let s = Site(b, h, i, j);
        if permits(s) {
            let score = changed(scores_at(row + j * step), s);
            if score > top {
                // exp(−∞) is not exact everywhere; the first score needs none.
                if top == p.mask.none {
                    sum = sum + 1.0;
                } else {
                    sum = sum * exp(top - score) + 1.0;
                }
                top = score;
            } else if !(score == p.mask.none) {
                // A NaN ends up here and stays in the sum.
                sum += exp(score - top);
            }
        }
    }
    let total = combined(vec2<f32>(top, sum), lane);
    let scale = 1.0 / total.y;
    let seen = !(total.x == p.mask.none && total.y == 0.0);
    if HAS_LSE {
        if lane == 0u {
            var lse = p.mask.none;
            if seen {
                lse = total.x + log(total.y);
            }
            lse_put(view_at(p.lse, b, h, i, 0u), lse);
        }
    }
    for (var j = lane; j < p.mask.kv_len; j += LANES) {
        let s = Site(b, h, i, j);
        var weight = 0.0;
        if seen && j >= keys.x && j < keys.y {
            if permits(s) {
                weight = dropped(exp(changed(scores_at(row + j * step), s) - total.x) * scale, s);
            }
        }
        scores_put(row + j * step, weight);
    }
}
