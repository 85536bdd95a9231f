// The online softmax (Milakov and Gimelshein 2018), shared by all kernels.
//
// A weight is exp(score − row_max), as one exp2. The value of row_max is not always the maximum. It
// follows only if a score exceeds it by more than RESCALE_THRESHOLD. The kernel then rescales older
// sums (as in FlashAttention-4). Weights are at most 2^8, or e^8 with natural scores. The first
// value of row_max is LOWEST, so that no difference is ∞ − ∞.
//
// Sums of weights times values can exceed f32's range if a value exceeds f32's maximum over 2^8. If
// a row's result is not finite, the kernel computes the row again with normalised weights. It
// divides a split's sums by the split's total before it stores them. A score of −∞ has weight 0:
// exp2(−∞) is 0 on every GPU, but WGSL does not promise it.
//
// Addition carries NaN to the sum of the weights. On some drivers max, exp and log lose NaN.
//
// Loops over keys hold scores in units of UNIT. UNIT is LOG2_E, folded into the scale of q · k, so
// that exp2 takes differences directly. UNIT is 1 if score_mod must see the score, because 1e4 and
// a bias are exact in it. Differences are then multiplied. In units of LOG2_E a score may exceed
// f32's range. If a row is then not finite, the kernel computes its state again in natural units.
//
// The result of a loop is a state (row_max, row_sum) in natural units. It is (−∞, 0) if the loop
// has seen no key. Splits, sinks, merged parts and lse share this format. A row without keys has
// output 0 and lse −∞.
//
// Needs: NATURAL_SCORES; any_nan.
// Gives: LOWEST, RESCALE_THRESHOLD, UNIT; is_seen, lse_of, merged, rescale_of, row_state, share_of,
// weight_of, weights_of.

const LOG2_E: f32 = 1.4426950408889634;
const LN_2: f32 = 0.6931471805599453;
const RESCALE_THRESHOLD: f32 = 8.0;
// The lowest finite number. Only −∞ is lower.
const LOWEST: f32 = -0x1.fffffep+127f;

// LOG2_E is part of the scale unless scores are natural.
const UNIT: f32 = select(LOG2_E, 1.0, NATURAL_SCORES);

// exp of a difference of a loop's scores.
fn weight_of(x: f32) -> f32 {
    return exp2(x * (LOG2_E / UNIT));
}

// The weights of four scores.
fn weights_of(s: vec4<f32>, row_max: f32, neg_inf: f32) -> vec4<f32> {
    return select(exp2((s - row_max) * (LOG2_E / UNIT)), vec4<f32>(), s == vec4<f32>(neg_inf));
}

// The factor of older sums when row_max becomes new_max. At LOWEST, nothing was summed yet.
fn rescale_of(row_max: f32, new_max: f32) -> f32 {
    return select(weight_of(row_max - new_max), 0.0, row_max == LOWEST && new_max != LOWEST);
}

// The state that a loop returns.
fn row_state(row_max: f32, row_sum: f32, neg_inf: f32) -> vec2<f32> {
    return vec2<f32>(select(row_max * select(LN_2, 1.0, NATURAL_SCORES), neg_inf, row_sum == 0.0), row_sum);
}

// The state of two disjoint sets of keys. A sum that is NaN stays NaN.
fn merged(a: vec2<f32>, b: vec2<f32>, neg_inf: f32) -> vec2<f32> {
    if b.x == neg_inf {
        return vec2<f32>(a.x, a.y + b.y);
    } else if a.x == neg_inf {
        return vec2<f32>(b.x, a.y + b.y);
    } else {
        let m = max(a.x, b.x);
        return vec2<f32>(m, a.y * exp2((a.x - m) * LOG2_E) + b.y * exp2((b.x - m) * LOG2_E));
    }
}

// True if any key was seen.
fn is_seen(total: vec2<f32>, neg_inf: f32) -> bool {
    return !(total.x == neg_inf && total.y == 0.0);
}

// The factor of sums relative to row_max, over a part of the keys. It makes them relative to all
// keys, and normalises them.
fn share_of(row_max: f32, total: vec2<f32>, neg_inf: f32) -> f32 {
    return select(exp2((row_max - total.x) * LOG2_E), 0.0, row_max == neg_inf) / total.y;
}

// ln Σ exp(score). The test is by the bits, because some drivers' log loses NaN.
fn lse_of(total: vec2<f32>, neg_inf: f32) -> f32 {
    if !is_seen(total, neg_inf) {
        return neg_inf;
    } else {
        return select(total.x + log(total.y), total.y, any_nan(vec4<f32>(total.y)));
    }
}
